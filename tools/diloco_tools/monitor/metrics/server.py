"""Metrics over HTTP by prometheus_client, with limits on slow clients.

A connection ends after ten seconds; a scrape takes milliseconds. At most sixteen are served at a time:
one more ends the oldest. So a client that sends or reads slowly or never costs one thread for ten
seconds, and does not block others.
"""

from __future__ import annotations

import contextlib
import socket
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
POLL_S = 0.25  # longest delay of the end of the server, and of an expired connection

HOME = b"diloco-exporter: metrics at /metrics, health of the broker at /healthz\n"


class MetricsServer(ThreadingWSGIServer):
    """`serve_forever` answers. `health` returns why the broker counts as dead, or None."""

    def __init__(
        self, listening: socket.socket, collector: Collector, health: Callable[[], str | None]
    ) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        self._metrics: WSGIApplication = make_wsgi_app(registry)
        self._health = health
        self._since: dict[socket.socket, float] = {}  # the oldest first
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = listening, listening.getsockname()
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.setup_environ()
        self.set_app(self._answer)

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
            return [f"{problem or 'the broker is alive'}\n".encode()]
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
        """End old connections; called by `serve_forever` after each new one, and every `POLL_S`."""
        late = time.monotonic() - LONGEST_CONNECTION_S
        too_many = len(self._since) - MOST_CONNECTIONS
        # A copy, since threads remove their connections meanwhile.
        for number, (request, since) in enumerate(self._since.copy().items()):
            if number < too_many or since < late:
                _end(request)

    def server_close(self) -> None:
        super().server_close()
        for request in self._since.copy():
            _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors of ours; a client that disconnected is not one."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _end(request: socket.socket) -> None:
    """Wake the thread of a connection, which closes it."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    """One request, one answer, then the connection ends: HTTP/1.0."""

    timeout = LONGEST_CONNECTION_S

    def log_message(self, format: str, *args: object) -> None:
        """Do not log scrapes."""
