"""The dashboard as an ASGI app: the page, its figures, and one way to change something.

GET  /, /assets/NAME        the page; no figures in it, so it needs no token
GET  /api/session           what this dashboard is, and whether the token given may steer
GET  /api/state             the newest snapshot and the plots as JSON, for programs
GET  /api/events?every=N    the same as server-sent events, every N seconds
GET  /api/replay[/INDEX]    a recorded run: its outline, one of its moments
POST /api/control           {"action": ...} with the token; answered with {"ok", "text"}
"""

import asyncio
import json
import math
from importlib import resources

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diloco_protocol.clients import Keys
from diloco_protocol.clients.operator import ask_once, this_user
from diloco_protocol.errors import Unreachable
from diloco_tools.monitor.feed.model import LIVE_BELOW_S, STALE_ABOVE_S
from diloco_tools.monitor.web.orders import read_order, steering_address
from diloco_tools.monitor.web.security import HEADERS, Policy, Refusal
from diloco_tools.monitor.web.serving import EventStream, Streams
from diloco_tools.monitor.web.source import ReplaySource
from diloco_tools.monitor.web.words import titles

LONGEST_BODY = 4096  # bytes: the longest order is a worker's name
BODY_S = 5.0  # seconds for a body of that size to arrive
MOST_ORDERS = 4  # at once; each holds a thread until the broker answers
SLOWEST_S, FASTEST_S = 30.0, 1.0  # refresh intervals
RECORDED = "This is a recorded run; nothing can be changed."
KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class Dashboard:
    """A feed or a recorded run, served to whom `policy` lets in; `control` is where it is steered, and
    `keys` what it shows there.
    """

    def __init__(
        self,
        policy: Policy,
        streams: Streams | None = None,
        replay: ReplaySource | None = None,
        control: str | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.policy, self.streams, self.replay, self.control = policy, streams, replay, control
        self._keys = keys
        self.feed = streams.source if streams is not None else None
        self._assets = _assets()
        self._orders = asyncio.Semaphore(MOST_ORDERS)
        # Made at the start: no request waits for it, or has it made again.
        self._outline = replay.outline() if replay else ""

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
                "live_below_s": LIVE_BELOW_S,
                "stale_above_s": STALE_ABOVE_S,
                "columns": titles(),
            }
        )

    async def state(self, _request: Request) -> Response:
        assert self.feed is not None
        body, _ = self.feed.state()
        return Response(body, media_type="application/json")

    async def events(self, request: Request) -> Response:
        assert self.streams is not None
        try:
            every_s = float(request.query_params.get("every", "1"))
        except ValueError:
            every_s = math.nan
        if not FASTEST_S <= every_s <= SLOWEST_S:
            raise Refusal(400, f"every= takes seconds from {FASTEST_S:g} to {SLOWEST_S:g}.")
        if self.streams.places.locked():
            text = f"{self.streams.most} pages look at this dashboard already; close one of them."
            raise Refusal(503, text)
        return EventStream(self.streams, every_s)

    async def outline(self, _request: Request) -> Response:
        return Response(self._outline, media_type="application/json")

    async def moment(self, request: Request) -> Response:
        assert self.replay is not None
        body = self.replay.moment(request.path_params["index"])
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
            raise Refusal(429, f"{MOST_ORDERS} orders wait for the broker already; try again.")
        async with self._orders:
            feed = self.feed
            if feed is None:
                raise Refusal(409, RECORDED)
            action, arguments = read_order(await _json_body(request), feed.model.snapshot)
            address = steering_address(self.control, feed.model.snapshot, feed.address)
            if address is None:
                text = "The broker has not said yet where it is steered; wait for its feed."
                raise Refusal(503, text)
            who = f"{this_user()}, dashboard"
            answer = await run_in_threadpool(
                ask_once, address, action, arguments, who=who, keys=self._keys
            )
        status = 200 if answer.error is None else 400
        if isinstance(answer.error, Unreachable):
            status = 504
        return JSONResponse({"ok": answer.ok, "text": answer.text}, status)


def application(dashboard: Dashboard) -> ASGIApp:
    """The page, with the policy around it: its refusals, and its headers on every answer."""
    routes = [
        Route("/", dashboard.asset),
        Route("/assets/{name}", dashboard.asset),
        Route("/api/session", dashboard.session),
        Route("/api/control", dashboard.order, methods=["POST"]),
    ]
    if dashboard.streams is not None:
        routes += [Route("/api/state", dashboard.state), Route("/api/events", dashboard.events)]
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
            if scope["path"] != "/api/session":  # which says itself what is wrong with a token
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
    """A refusal of ours, or what no route answers: 404, 405."""
    if isinstance(error, HTTPException):
        where = request.url.path[:80]
        error = Refusal(error.status_code, f"{request.method} {where!a}: {error.detail}.")
    assert isinstance(error, Refusal)
    # The body of a refused request may still be on its way: nothing else comes after it here.
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
    """What the page is made of, by name; read once, so that no request names a file."""
    folder = resources.files("diloco_tools.monitor.web") / "assets"
    return {
        item.name: (item.read_bytes(), KINDS[item.name.rpartition(".")[2]])
        for item in (*folder.iterdir(), *(folder / "uplot").iterdir())
        if item.name.rpartition(".")[2] in KINDS
    }
