"""The server of the page and its open pages: each has a place, and nothing is queued for it.

A pulse each second says how old the newest snapshot is; the whole state comes as often as the page
wants it. The next message is made when the last one has left, so a page that reads slowly misses
states and holds no memory but one message. A page that reads nothing at all loses its place.
"""

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import uvicorn
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diloco_tools.monitor.web.source import FeedSource

MOST_STREAMS = 16  # a browser opens six at most; several people may look
TURN_S = 0.1  # between two looks at the source: a snapshot shows that much later
PULSE_S = 1.0
PATIENCE_S = 20.0  # for a page to take one message
EARLY_S = 0.5  # snapshots come once a second, and not quite evenly
GRACE_S = 1  # for answers that are under way at the end
MOST_CONNECTIONS = 128
LARGEST_HEADERS = 16 << 10  # bytes


class Streams:
    """Server-sent events for at most `most` open pages, until `is_ending`."""

    def __init__(self, source: FeedSource, most: int = MOST_STREAMS) -> None:
        self.source = source
        self.most = most
        self.places = asyncio.Semaphore(most)
        self.is_ending: Callable[[], bool] = lambda: False

    async def messages(self, every_s: float) -> AsyncIterator[str]:
        """What a page is sent until the program ends. Before the first snapshot, only pulses."""
        received, after, state_at, said_at = 0, -math.inf, -math.inf, -math.inf
        while not self.is_ending():
            now = time.monotonic()
            if self.source.received != received and now - state_at >= every_s - EARLY_S:
                received, state_at, said_at = self.source.received, now, now
                state, after = self.source.state(after)
                yield f"event: state\ndata: {state}\n\n"
            elif now - said_at >= PULSE_S:
                said_at = now
                pulse = self.source.pulse(is_shown=self.source.received == received)
                yield f"event: pulse\ndata: {pulse}\n\n"
            await asyncio.sleep(TURN_S)


class EventStream(StreamingResponse):
    """The answer to a request for events: it has a place as long as its page reads."""

    def __init__(self, streams: Streams, every_s: float) -> None:
        super().__init__(streams.messages(every_s), media_type="text/event-stream")
        self._places = streams.places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._places:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Give up on a page that reads nothing, or is gone."""

        async def bounded(message: Message) -> None:
            await asyncio.wait_for(send(message), PATIENCE_S)

        with suppress(asyncio.TimeoutError, OSError):
            await super().stream_response(bounded)


def server_of(app: ASGIApp, streams: Streams | None) -> uvicorn.Server:
    """uvicorn, made to end at once by `should_exit = True`, whatever pages are open."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        access_log=False,  # it would have the token in it
        log_level="critical",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=LARGEST_HEADERS,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = uvicorn.Server(config)
    if streams is not None:
        # The server waits for answers under way, and these have no end.
        streams.is_ending = lambda: server.should_exit
    return server


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        OSError: the name is unknown, or the address is not to be had.
    """
    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, dualstack_ipv6=is_dual)
