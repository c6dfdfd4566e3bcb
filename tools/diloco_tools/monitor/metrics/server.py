"""Metrics over HTTP: prometheus_client answers, and no client can take more than its share.

A scrape takes milliseconds, so a connection that is there for ten seconds is not one. At most sixteen
are served at a time: the next one ends the oldest. So a client that says nothing, sends a byte now and
then, or never reads its answer costs one thread for ten seconds and keeps nobody from scraping.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

MOST_CONNECTIONS = 16
LONGEST_CONNECTION_S = 10.0
POLL_S = 0.25  # how long the end of the server, and one connection too old, may have to wait

HOME = b"diloco-exporter: the metrics are at /metrics, whether the broker lives at /healthz\n"


class MetricsServer(ThreadingWSGIServer):
    """Listens from its making on; `serve_forever` answers.

    `health` says why the broker counts as dead, and None while it lives.

    Raises:
        OSError: the address is not one of this machine, or the port is taken.
    """

    request_queue_size = 64

    def __init__(
        self, host: str, port: int, collector: Collector, health: Callable[[], str | None]
    ) -> None:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        registry = CollectorRegistry()
        registry.register(collector)
        self._metrics: WSGIApplication = make_wsgi_app(registry)
        self._health = health
        self._since: dict[socket.socket, float] = {}  # the oldest first
        super().__init__(address, _Handler)  # type: ignore[arg-type]
        self.set_app(self._answer)

    def server_bind(self) -> None:
        """As WSGIServer does, without asking a name server what this machine is called."""
        socketserver.TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        self.setup_environ()

    @property
    def url(self) -> str:
        name = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{name}:{self.server_port}/metrics"

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            return self._metrics(environ, start_response)
        if environ["PATH_INFO"] == "/healthz":
            problem = self._health()
            status = "200 OK" if problem is None else "503 Service Unavailable"
            start_response(status, [("Content-Type", "text/plain")])
            return [f"{problem or 'the broker lives'}\n".encode()]
        is_home = environ["PATH_INFO"] == "/"
        start_response("200 OK" if is_home else "404 Not Found", [("Content-Type", "text/plain")])
        return [HOME]

    def process_request(self, request: Any, client_address: Any) -> None:
        self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """`serve_forever` calls this after each connection that comes, and all the time."""
        late = time.monotonic() - LONGEST_CONNECTION_S
        too_many = len(self._since) - MOST_CONNECTIONS
        # A copy is made in one go; the threads of connections take theirs out meanwhile.
        for number, (request, since) in enumerate(self._since.copy().items()):
            if number < too_many or since < late:
                _end(request)

    def server_close(self) -> None:
        super().server_close()
        for request in self._since.copy():
            _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error; anything else is one of ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _end(request: socket.socket) -> None:
    """Wake up the thread of a connection, which closes it."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    """One request, one answer, then the connection ends: HTTP/1.0."""

    timeout = LONGEST_CONNECTION_S

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not news."""
