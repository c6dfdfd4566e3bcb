"""A stage for the dashboard: a feed without a broker, the real server in a thread, plain HTTP."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import uvicorn

from diloco_protocol.clients import Keys
from diloco_tools.monitor.feed.replay import History
from diloco_tools.monitor.web.app import Dashboard, application, server_of
from diloco_tools.monitor.web.security import Policy
from diloco_tools.monitor.web.source import FeedSource
from kit import feed_snapshots
from kit.feed_snapshots import PATIENCE_S, frame, status, worker
from kit.process_kit import wait_for

TOKEN = "the-token-of-these-tests"


def a_worker(name: str, **keys: Any) -> dict[str, Any]:
    return worker(name, **{"sync_age_s": 31.0, **keys})


def a_status(**keys: Any) -> dict[str, Any]:
    """What a broker in the middle of a synchronous run says."""
    more = {
        "run": "3fa2c1d09b11aaaa",
        "checkpoint": {"folder": "diloco-run", "round": 411, "age_s": 12.0, "error": None},
        "workers": [a_worker("a100-0", state="waiting"), a_worker("rtx")],
    }
    return status(**{**more, **keys})


class Publisher(feed_snapshots.Publisher):
    """A feed that says `a_status`, and only once it has a subscriber."""

    _has_subscriber = False

    def says(self, **keys: Any) -> None:
        if not self._has_subscriber:
            self.await_subscriber()
            self._has_subscriber = True
        self.send(frame(a_status(**keys)))


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Site:
    """A dashboard that is served, and requests to it."""

    def __init__(self, port: int, server: uvicorn.Server, source: FeedSource | None) -> None:
        self.port, self.server, self.source = port, server, source
        self.address = f"http://127.0.0.1:{port}"

    def with_token(self, token: str = TOKEN) -> str:
        return f"{self.address}/?token={token}"

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """A body of several parts has no length."""
        made = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with closing(made) as connection:
            shown = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, shown, encode_chunked=True)
            return Answer(connection.getresponse())

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, **headers)

    def orders(self, document: Any, token: str | None = TOKEN, **headers: str) -> Answer:
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        headers = {"Content_Type": "application/json"} | headers
        return self.request("POST", "/api/control", json.dumps(document), **headers)

    def await_state(self, **wanted: Any) -> Any:
        """The first state in which the snapshot says all of `wanted`."""

        def state() -> Any:
            found = self.get("/api/state").json
            snapshot = (found["picture"] or {}).get("snapshot", {})
            return found if wanted.items() <= snapshot.items() else None

        return wait_for(state, PATIENCE_S)


@contextmanager
def serving(
    feed: str | None = None,
    *,
    policy: Policy | None = None,
    control: str | None = None,
    replay: History | None = None,
    keys: Keys | None = None,
) -> Iterator[Site]:
    """The dashboard as the command serves it, in a thread and on a free port."""
    source = FeedSource(feed, keys) if feed is not None else None
    page = Dashboard(policy or Policy("127.0.0.1", TOKEN), source, replay, control, keys)
    server = server_of(application(page))
    with source or nullcontext(), socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield Site(listening.getsockname()[1], server, source)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "the server does not end"
