"""Server-sent events: each open page has a place and its newest state, and nothing is queued for it.

A pulse each second says how old the newest snapshot is; the whole state comes as often as the page
wants it. The next message is made when the last one has left, so a page that reads slowly misses
states and holds no memory but one message. A page that reads nothing at all loses its place.
"""

import asyncio
import math
import time
from collections.abc import Iterator

from starlette.types import Message, Receive, Scope, Send

from diloco_tools.dashboard.picture import encoded
from diloco_tools.dashboard.security import HEADERS
from diloco_tools.dashboard.source import FeedSource

MOST_STREAMS = 16  # a browser opens six at most; several people may look
TURN_S = 0.1  # between two looks at the source: a snapshot shows that much later
PULSE_S = 1.0
PATIENCE_S = 20.0  # for a page to take one message
EARLY_S = 0.5  # snapshots come once a second, and not quite evenly


class Streams:
    """The places for open pages, and the end of all of them."""

    def __init__(self, source: FeedSource, most: int = MOST_STREAMS) -> None:
        self.source = source
        self.most = most
        self.open = 0
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End every stream now; for the event loop's own thread."""
        self._closing.set()

    @property
    def has_place(self) -> bool:
        return self.open < self.most and not self._closing.is_set()

    async def follow(self, every_s: float, receive: Receive, send: Send) -> None:
        """Serve one page until it, or this program, goes."""
        self.open += 1
        ending = [asyncio.ensure_future(part) for part in (_gone(receive), self._closing.wait())]
        try:
            await _sent(send, _start())
            for chunk in self._chunks(every_s):
                if chunk:
                    await _sent(send, _body(chunk))
                if (await asyncio.wait(ending, timeout=TURN_S, return_when="FIRST_COMPLETED"))[0]:
                    break
            await _sent(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except (asyncio.TimeoutError, OSError):
            pass  # it reads nothing, or is gone
        finally:
            self.open -= 1
            for part in ending:
                part.cancel()

    def _chunks(self, every_s: float) -> Iterator[str]:
        """What is due at each look; mostly nothing. Before the first snapshot there are only pulses."""
        serial, after, state_at, said_at = 0, -math.inf, -math.inf, -math.inf
        while True:
            now = time.monotonic()
            if self.source.serial != serial and now - state_at >= every_s - EARLY_S:
                serial, state_at, said_at = self.source.serial, now, now
                state, after = self.source.state(after)
                yield f"event: state\ndata: {state}\n\n"
            elif now - said_at >= PULSE_S:
                said_at = now
                yield f"event: pulse\ndata: {encoded(self.source.pulse())}\n\n"
            else:
                yield ""


class EventStream:
    """The answer to a request for events."""

    def __init__(self, streams: Streams, every_s: float) -> None:
        self._streams, self._every_s = streams, every_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._streams.follow(self._every_s, receive, send)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _sent(send: Send, message: Message) -> None:
    await asyncio.wait_for(send(message), PATIENCE_S)


def _start() -> Message:
    headers = {"content-type": "text/event-stream; charset=utf-8", **HEADERS}
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }


def _body(chunk: str) -> Message:
    return {"type": "http.response.body", "body": chunk.encode(), "more_body": True}
