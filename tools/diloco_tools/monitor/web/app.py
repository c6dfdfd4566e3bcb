"""The dashboard as an ASGI app: the page, its figures, and one way to change something.

GET  /, /assets/NAME        the page, without figures, so it needs no token
GET  /api/session           the kind of this dashboard, and whether the token may steer
GET  /api/state             the newest snapshot and the plots as JSON, for programs
GET  /api/state?after=T     the same as texts, for a page that has the points up to T
GET  /api/replay[/INDEX]    a recorded run: its outline, one of its moments
POST /api/control           {"action": ...} with the token; answered with {"ok", "text"}
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diloco_protocol.addresses import as_reached
from diloco_protocol.clients import Keys
from diloco_protocol.clients.operator import ask_once, this_user
from diloco_protocol.errors import Unreachable
from diloco_protocol.feed import Snapshot
from diloco_protocol.monitor.fields import confirmed_by
from diloco_tools.monitor.feed.replay import History
from diloco_tools.monitor.web.security import HEADERS, Policy, Refusal
from diloco_tools.monitor.web.source import FeedSource, moment_of, outline_of
from diloco_tools.monitor.web.words import titles

LONGEST_BODY = 4096  # bytes; the longest order contains a worker's name
BODY_S = 5.0  # seconds for a body of that size to arrive
MOST_ORDERS = 4  # at once; each occupies a thread until the broker answers
GRACE_S = 1  # seconds for answers in progress at the end
MOST_CONNECTIONS = 128
LARGEST_HEADERS = 16 << 10  # bytes
RECORDED = "This is a recorded run; nothing can be changed."
# The actions of a page with their arguments; "set" takes any of these.
ACTIONS: Mapping[str, Sequence[str]] = {
    "save": (),
    "kick": ("worker",),
    "set": (
        *("outer_lr", "outer_momentum", "workers", "min_workers", "sync_every", "quorum", "grace"),
        "save_every",
    ),
    "pause": (),
    "resume": (),
    "shutdown": ("confirm",),
}
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Dashboard:
    """A feed or a recorded run, served as `policy` allows; `keys` steer the broker at `control`."""

    def __init__(
        self,
        policy: Policy,
        feed: FeedSource | None = None,
        replay: History | None = None,
        control: str | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.policy, self.feed, self.replay, self.control = policy, feed, replay, control
        self._keys = keys
        self._assets = _assets()
        self._orders = asyncio.Semaphore(MOST_ORDERS)
        # Made once, at the start, so that no request waits for it.
        self._outline = outline_of(replay) if replay else ""

    async def asset(self, request: Request) -> Response:
        found = self._assets.get(request.path_params.get("name", "index.html"))
        if found is None:
            raise Refusal(404, "No such page.")
        return Response(found[0], media_type=found[1])

    async def session(self, request: Request) -> Response:
        feed = self.feed
        refusal = self.policy.of_reading(request.headers)
        if refusal is not None:
            return JSONResponse({"reading": False, "needs_token": True, "reason": refusal.text})
        refusal = (
            Refusal(409, RECORDED) if feed is None else self.policy.of_steering(request.headers)
        )
        return JSONResponse(
            {
                "reading": True,
                "mode": "live" if feed is not None else "replay",
                "feed": feed.address if feed is not None else None,
                "steering": refusal is None,
                "needs_token": refusal is not None and refusal.status == 401,
                "reason": refusal and refusal.text,
                "columns": titles(),
            }
        )

    async def state(self, request: Request) -> Response:
        assert self.feed is not None
        after = request.query_params.get("after")
        try:
            body = self.feed.state(None if after is None else float(after))
        except ValueError:
            raise Refusal(400, "after= must be the clock of an earlier answer.") from None
        return Response(body, media_type="application/json")

    async def outline(self, _request: Request) -> Response:
        return Response(self._outline, media_type="application/json")

    async def moment(self, request: Request) -> Response:
        assert self.replay is not None
        body = moment_of(self.replay, request.path_params["index"])
        if body is None:
            raise Refusal(404, "The recorded run has no such moment.")
        return Response(body, media_type="application/json")

    async def order(self, request: Request) -> Response:
        refusal = self.policy.of_steering(request.headers)
        if refusal is not None:
            raise refusal
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refusal(415, "Orders are JSON: send Content-Type: application/json.")
        if self._orders.locked():
            raise Refusal(429, f"{MOST_ORDERS} orders already wait for the broker; try again.")
        async with self._orders:
            feed = self.feed
            if feed is None:
                raise Refusal(409, RECORDED)
            action, arguments = read_order(await _json_body(request), feed.model.snapshot)
            address = steering_address(self.control, feed.model.snapshot, feed.address)
            if address is None:
                raise Refusal(503, "The control address is unknown until the feed is heard.")
            who = f"{this_user()}, dashboard"
            answer = await run_in_threadpool(
                ask_once, address, action, arguments, who=who, keys=self._keys
            )
        status = 200 if answer.error is None else 400
        if isinstance(answer.error, Unreachable):
            status = 504
        return JSONResponse({"ok": answer.ok, "text": answer.text}, status)


def application(dashboard: Dashboard) -> ASGIApp:
    """The page behind the policy, whose headers are on every answer."""
    routes = [
        Route("/", dashboard.asset),
        Route("/assets/{name}", dashboard.asset),
        Route("/api/session", dashboard.session),
        Route("/api/control", dashboard.order, methods=["POST"]),
    ]
    if dashboard.feed is not None:
        routes.append(Route("/api/state", dashboard.state))
    if dashboard.replay is not None:
        routes += [
            Route("/api/replay", dashboard.outline),
            Route("/api/replay/{index:int}", dashboard.moment),
        ]
    inner = Starlette(
        routes=routes, exception_handlers={Refusal: _refused, HTTPException: _refused}
    )
    policy = dashboard.policy

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets; the server's lifespan is off
            return
        headers = Headers(scope=scope)
        refusal = policy.of_request(headers)
        if scope["path"].startswith("/api/"):
            refusal = refusal or policy.of_api(headers)
            if scope["path"] != "/api/session":  # which itself says why a token is refused
                refusal = refusal or policy.of_reading(headers)

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    given.setdefault(name, value)
            await send(message)

        answer = inner if refusal is None else await _refused(Request(scope), refusal)
        await answer(scope, receive, dressed)

    return guarded


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """The answer to a refusal of ours, or to a request that no route accepts (404, 405)."""
    if isinstance(error, HTTPException):
        where = request.url.path[:80]
        error = Refusal(error.status_code, f"{request.method} {where!a}: {error.detail}.")
    assert isinstance(error, Refusal)
    # The body of a refused request may still arrive, so the connection cannot be used again.
    body = {"ok": False, "text": error.text}
    return JSONResponse(body, error.status, {"connection": "close"})


async def _json_body(request: Request) -> object:
    async def read() -> bytes:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > LONGEST_BODY:
                raise Refusal(413, f"The request is longer than {LONGEST_BODY} bytes.")
        return body

    try:
        return json.loads(await asyncio.wait_for(read(), BODY_S))
    except asyncio.TimeoutError:
        raise Refusal(408, f"The request did not arrive within {BODY_S:g} s.") from None
    except (ValueError, RecursionError):
        raise Refusal(400, "The request is not JSON.") from None


def _assets() -> dict[str, tuple[bytes, str]]:
    """The files of the page by name; read once, so that no request names a file."""
    folder = resources.files("diloco_tools.monitor.web") / "assets"
    return {
        item.name: (item.read_bytes(), KINDS[item.name.rpartition(".")[2]])
        for item in (*folder.iterdir(), *(folder / "uplot").iterdir())
        if item.name.rpartition(".")[2] in KINDS
    }


def read_order(document: object, snapshot: Snapshot | None) -> tuple[str, dict[str, Any]]:
    """The action and its arguments from the JSON of a request: {"action": ..., argument: value, ...}.

    The broker checks their values. `shutdown` must name the run in `confirm`.

    Raises:
        Refusal: it is not a known action with its arguments.
    """
    if not isinstance(document, dict):
        raise Refusal(400, 'The request is not a JSON object such as {"action": "save"}.')
    arguments = dict(document)
    action = str(arguments.pop("action", None))
    if action not in ACTIONS:
        raise Refusal(400, f"Unknown action {action[:60]!r}; known are {', '.join(ACTIONS)}.")
    if strange := sorted(str(name) for name in arguments.keys() - set(ACTIONS[action])):
        raise Refusal(400, f"{action!r} has no argument {strange[0][:60]!r}.")
    if not arguments and ACTIONS[action]:
        needed = "a setting" if action == "set" else ACTIONS[action][0]
        raise Refusal(400, f"{action!r} needs {needed}.")
    if action == "shutdown" and arguments.pop("confirm") != confirmed_by(snapshot):
        raise Refusal(400, "That is not the name of this run, so the broker was not stopped.")
    return action, arguments


def steering_address(given: str | None, snapshot: Snapshot | None, feed: str) -> str | None:
    """The control address: `given`, else that of the feed; None while unknown."""
    if given is not None:
        return given
    bound = snapshot.control if snapshot is not None else ""
    return as_reached(bound, feed) if bound else None


def server_of(app: ASGIApp) -> uvicorn.Server:
    """uvicorn; `should_exit = True` ends it at once, even with open pages."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        access_log=False,  # it would contain the token
        log_level="critical",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=LARGEST_HEADERS,
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(config)
