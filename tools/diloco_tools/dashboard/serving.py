"""uvicorn, made to end at once: a page that stays open never keeps the program from stopping."""

import socket

import uvicorn
from starlette.types import ASGIApp

from diloco_tools.dashboard.streams import Streams

GRACE_S = 1  # for answers that are under way at the end
MOST_CONNECTIONS = 128
LARGEST_HEADERS = 16 << 10  # bytes


class Server(uvicorn.Server):
    """One server on one socket that listens already. `should_exit = True` ends it."""

    def __init__(self, app: ASGIApp, streams: Streams | None) -> None:
        super().__init__(
            uvicorn.Config(
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
        )
        self._streams = streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams first: the server waits for answers under way, and they have no end."""
        if self._streams is not None:
            self._streams.close()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        OSError: the name is unknown, or the address is not to be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen()
    except OSError:
        made.close()
        raise
    return made
