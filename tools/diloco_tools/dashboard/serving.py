"""uvicorn, made to end at once: a page that stays open never keeps the program from stopping."""

import socket
from contextlib import nullcontext

import uvicorn

from diloco_tools.dashboard.app import Dashboard, application

GRACE_S = 1  # for answers that are under way at the end
MOST_CONNECTIONS = 128
LARGEST_HEADERS = 16 << 10  # bytes


class Server(uvicorn.Server):
    """One server on one socket that listens already. `should_exit = True` ends it.

    The dashboard's feed is listened to while it runs.
    """

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        super().__init__(
            uvicorn.Config(
                application(dashboard),
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

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        with self._dashboard.feed or nullcontext():
            super().run(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams first: the server waits for answers under way, and they have no end."""
        if self._dashboard.streams is not None:
            self._dashboard.streams.close()
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
