"""Server-sent events: each open page has a place and its newest state, and nothing is queued for it.

A pulse each second says how old the newest snapshot is; the whole state comes as often as the page
wants it. The next message is made when the last one has left, so a page that reads slowly misses
states and holds no memory but one message. A page that reads nothing at all loses its place.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from diloco_tools.dashboard.source import FeedSource, encoded

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

    async def messages(self, every_s: float) -> AsyncIterator[str]:
        """What a page is sent until the program ends. Before the first snapshot, only pulses."""
        received, after, state_at, said_at = 0, -math.inf, -math.inf, -math.inf
        while not self._closing.is_set():
            now = time.monotonic()
            if self.source.received != received and now - state_at >= every_s - EARLY_S:
                received, state_at, said_at = self.source.received, now, now
                state, after = self.source.state(after)
                yield f"event: state\ndata: {state}\n\n"
            elif now - said_at >= PULSE_S:
                said_at = now
                yield f"event: pulse\ndata: {encoded(self.source.pulse())}\n\n"
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), TURN_S)


class EventStream(StreamingResponse):
    """The answer to a request for events: it has a place as long as its page reads."""

    def __init__(self, streams: Streams, every_s: float) -> None:
        super().__init__(streams.messages(every_s), media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._streams.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1

    async def stream_response(self, send: Send) -> None:
        """Give up on a page that reads nothing, or is gone."""

        async def bounded(message: Message) -> None:
            await asyncio.wait_for(send(message), PATIENCE_S)

        with suppress(asyncio.TimeoutError, OSError):
            await super().stream_response(bounded)
