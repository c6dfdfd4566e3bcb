"""The dashboard without a browser: who may ask for what, what is sent, and how it ends."""

import json
import math
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diloco_broker import Broker
from diloco_protocol.clients.operator import ask_once
from diloco_protocol.feed import TOPIC, Snapshot, parse_snapshot
from diloco_protocol.monitor.fields import columns
from diloco_tools.monitor.feed.model import Freshness
from diloco_tools.monitor.feed.series import Rate, RunSeries
from diloco_tools.monitor.web import app
from diloco_tools.monitor.web.app import read_order, steering_address
from diloco_tools.monitor.web.security import HEADERS, Policy, Refusal
from diloco_tools.monitor.web.source import FeedSource, encoded, picture
from diloco_tools.monitor.web.words import BELOW, titles, words
from kit.dashboard_server import TOKEN, Publisher, Site, a_status, a_worker, serving
from kit.feed_snapshots import PATIENCE_S, frame
from kit.process_kit import wait_for
from kit.web_commands import NOBODY
from kit.whole_run import an_mlp, make_config
from kit.whole_run import run as train

BEARER = {"Authorization": f"Bearer {TOKEN}"}
JSON = {"Content_Type": "application/json"}


def snapshot(**keys: Any) -> Snapshot:
    return parse_snapshot(frame(a_status(**keys)))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A dashboard that has heard one snapshot, and whose control address does not answer."""
    with closing(Publisher()) as publisher, serving(publisher.address, control=NOBODY) as made:
        publisher.says()
        made.await_state(sequence=7)
        yield made


class TestPolicy:
    @pytest.mark.parametrize(
        ("bound", "own", "foreign"),
        [
            (
                "127.0.0.1",
                ["127.0.0.1:8514", "localhost:9999", "LocalHost.", "[::1]:8514"],
                [
                    *("evil.example:8514", "127.0.0.1.evil.example", "localhost.evil.example"),
                    *("evil.example@localhost", "localhost:x", "10.0.0.5:8514", ""),
                ],
            ),
            ("10.0.0.5", ["10.0.0.5:8514"], ["10.0.0.6:8514"]),
            ("0.0.0.0", ["10.0.0.5:8514"], ["evil.example"]),
            ("gpu-box", ["GPU-box:8514"], ["evil.example"]),
        ],
    )
    def test_other_hosts_are_refused(self, bound: str, own: list[str], foreign: list[str]) -> None:
        policy = Policy(bound)
        let_in = [host for host in own + foreign if policy.of_request({"host": host}) is None]
        assert let_in == own

    def test_only_the_own_page_may_ask(self) -> None:
        def may_ask(headers: dict[str, str]) -> bool:
            return Policy("127.0.0.1").of_api({"host": "localhost:8514"} | headers) is None

        assert may_ask({})
        origins = ("localhost:8514", "localhost:8515", "evil.example")
        assert [may_ask({"origin": f"http://{name}"}) for name in origins] == [True, False, False]
        assert not any(may_ask({"origin": each}) for each in ("", "null", "file://localhost:8514"))
        sites = ("same-origin", "none", "same-site", "cross-site")
        assert [may_ask({"sec-fetch-site": site}) for site in sites] == [True, True, False, False]

    def test_steering_takes_the_token(self) -> None:
        def may_steer(token: str | None, given: str) -> bool:
            return Policy("127.0.0.1", token).of_steering({"authorization": given}) is None

        assert may_steer("secret", "Bearer secret") and may_steer("secret", "bearer secret")
        for wrong in ("Bearer secret2", "Bearer ", "Bearer", "secret", "Basic secret", "Bearer ï"):
            assert not may_steer("secret", wrong), wrong
        for given in ("Bearer ", "Bearer None", "Bearer null"):
            assert not may_steer(None, given), "a dashboard without a token accepts none"


class TestOrders:
    @pytest.mark.parametrize(
        ("document", "why"),
        [
            ([], "not a JSON object"),
            ({}, "'None'"),
            ({"action": 3}, "'3'"),
            ({"action": "reboot"}, "'reboot'"),
            ({"action": "manifest"}, "'manifest'"),
            ({"action": "save", "folder": "/etc"}, "'save' has no argument 'folder'"),
            ({"action": "kick"}, "'kick' needs worker"),
            ({"action": "set"}, "'set' needs a setting"),
            ({"action": "set", "who": "me", "outer_lr": 1}, "'set' has no argument 'who'"),
            ({"action": "shutdown"}, "'shutdown' needs confirm"),
            ({"action": "shutdown", "confirm": "another"}, "not the name of this run"),
        ],
        ids=str,
    )
    def test_what_is_no_order_is_refused_by_name(self, document: object, why: str) -> None:
        with pytest.raises(Refusal, match=re.escape(why)):
            read_order(document, snapshot())

    def test_the_end_of_a_run_is_confirmed_by_its_name(self) -> None:
        for run, confirm in (("3fa2c1d09b11", "3fa2c1d0"), (None, "shutdown")):
            document = {"action": "shutdown", "confirm": confirm}
            assert read_order(document, snapshot(run=run)) == ("shutdown", {})

    def test_broker_is_steered_where_its_feed_says(self) -> None:
        said, feed = snapshot(control="tcp://*:8512"), "tcp://gpu-box:8513"
        assert steering_address(None, said, feed) == "tcp://gpu-box:8512"
        assert steering_address("tcp://here:1", said, feed) == "tcp://here:1"
        assert steering_address(None, snapshot(control=""), feed) is None
        assert steering_address(None, None, feed) is None


class TestPicture:
    def test_numbers_that_are_not_finite_are_null(self) -> None:
        document = json.loads(encoded(snapshot(workers=[a_worker("a", loss=math.nan)])))
        assert document["workers"][0]["loss"] is None

    def test_what_nobody_shows_is_not_sent(self) -> None:
        said = snapshot(workers=[a_worker("a", extra={"gpu": "x" * 9999})], weather="fine")
        document = json.loads(picture(said, RunSeries()))["snapshot"]
        assert "raw" not in document
        assert "extra" not in document["workers"][0]


class TestWords:
    def test_each_column_of_the_catalogue_has_a_place_in_the_table(self) -> None:
        shown = {each["key"] for each in titles()} | set(BELOW.values())
        assert shown == {field.path for field in columns("dashboard")}

    def test_cells_have_what_a_row_is_sorted_by(self) -> None:
        crew = [a_worker("b", steps_per_s=2.0, host="desk"), a_worker("a", health="lost")]
        said = words(snapshot(workers=crew), Freshness.LIVE, lambda _: Rate(0.0, 5e6, 1e6))
        by_key = [
            dict(zip([each["key"] for each in titles()], zip(*row, strict=True), strict=True))
            for row in ((each["cells"], each["sort"]) for each in said["workers"])
        ]
        assert by_key[0]["id"] == (("b", "", "desk"), "b")
        assert by_key[0]["rate_up"] == (("5.0 MB", "", "1.0 MB"), 6e6)
        assert by_key[1]["health"] == (("lost", "bad", ""), 1)

    def test_of_a_recorded_moment_nothing_is_said_that_was_not_recorded(self) -> None:
        said = words(snapshot(), None, lambda _: None)
        assert not {"Rejected", "Checkpoint"} & {label for label, _ in said["rows"]}
        keys = [each["key"] for each in titles()]
        (health, *_), (heard, *_) = (
            said["workers"][0]["cells"][keys.index(key)] for key in ("health", "beat_age_s")
        )
        assert (health, heard) == ("—", "—")


class TestPage:
    def test_page_is_served_whole_from_its_package(self, site: Site) -> None:
        page = site.get("/")
        assert page.status == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        html = page.body.decode()
        named = re.findall(r'(?:src|href)="([^"#]+)"', html)
        assert {"/assets/app.js", "/assets/style.css"} <= set(named)
        for path in named:
            assert site.get(path).status == 200, path
        script = site.get("/assets/app.js")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        for module in re.findall(r'from "\./([a-z]+\.js)"', script.body.decode()):
            assert site.get(f"/assets/{module}").status == 200, module

    def test_vendored_library_comes_with_its_version_and_licence(self) -> None:
        folder = Path(app.__file__).parent / "assets" / "uplot"
        version = re.search(r"\(v([\d.]+)\)", (folder / "uPlot.iife.min.js").read_text()[:200])
        assert version is not None
        assert f"uPlot {version[1]} " in (folder / "VERSION.txt").read_text()
        assert "The MIT License" in (folder / "LICENSE").read_text()

    def test_no_other_file_is_served(self, site: Site) -> None:
        files = ("no.js", "../app.py", "%2e%2e/app.py", "")
        for path in ("/nothing", "/api/", *(f"/assets/{file}" for file in files)):
            assert site.get(path).status == 404, path

    def test_every_answer_has_the_headers_that_protect_it(self, site: Site) -> None:
        for path in ("/", "/api/state", "/api/session", "/nothing"):
            headers = site.get(path).headers
            assert HEADERS.items() <= headers.items()
            assert "set-cookie" not in headers
            assert not any(name.startswith("access-control-") for name in headers)


class TestReading:
    def test_state_is_one_object_for_programs(self, site: Site) -> None:
        answer = site.get("/api/state")
        assert answer.headers["content-type"] == "application/json"
        state = answer.json
        assert state["picture"]["snapshot"]["round"]["missing"] == ["mac", "rtx", "xeon"]
        assert state["missed"] == 0
        assert 0 <= state["age_s"] < PATIENCE_S
        assert state["series"]["rounds"][-1][1] == 411

    @pytest.mark.parametrize(
        ("headers", "of_api", "of_page"),
        [
            ({"Host": "evil.example:8514"}, 421, 421),
            ({"Sec_Fetch_Site": "cross-site"}, 403, 200),  # a link may lead to the page
            ({"Origin": "http://127.0.0.1:1"}, 403, 200),
        ],
        ids=str,
    )
    def test_foreign_names_and_pages_of_other_sites_are_refused_token_or_not(
        self, site: Site, headers: dict[str, str], of_api: int, of_page: int
    ) -> None:
        assert site.get("/", **headers).status == of_page
        for path in ("/api/state", "/api/session"):
            assert site.get(path, **headers).status == of_api, path
        assert site.orders({"action": "pause"}, **headers).status == of_api

    def test_where_others_can_look_looking_takes_the_token(self, publisher: Publisher) -> None:
        with serving(publisher.address, policy=Policy("0.0.0.0", TOKEN)) as site:
            publisher.says()
            assert site.get("/").status == 200, "there are no figures in the page"
            assert site.get("/api/state").status == 401
            assert site.get("/api/session").json["reading"] is False
            assert site.get("/api/state", **BEARER).status == 200


class TestSteering:
    def test_nobody_steers_without_the_token(self, site: Site) -> None:
        order = {"action": "pause"}
        missing = site.orders(order, token=None)
        assert (missing.status, missing.json["ok"]) == (401, False)
        wrong = site.orders(order, token="a" + TOKEN)
        assert wrong.status == 401
        assert wrong.json["text"] != missing.json["text"]
        in_address = f"/api/control?token={TOKEN}"
        assert site.request("POST", in_address, json.dumps(order), **JSON).status == 401
        assert site.orders(order, token=None, Cookie=f"token={TOKEN}").status == 401

    def test_session_says_what_a_token_is_good_for(self, site: Site) -> None:
        good = site.get("/api/session", **BEARER).json
        assert (good["steering"], good["needs_token"], good["reason"]) == (True, False, None)
        bad = site.get("/api/session", Authorization="Bearer guess").json
        assert (bad["steering"], bad["needs_token"]) == (False, True)
        assert "Wrong token" in bad["reason"]

    def test_orders_are_posts_of_json_and_not_what_a_form_sends(self, site: Site) -> None:
        for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data"):
            assert site.orders({"action": "pause"}, Content_Type=kind).status == 415, kind
        for method in ("GET", "PUT", "DELETE", "OPTIONS"):
            assert site.request(method, "/api/control", **BEARER).status == 405, method

    def test_a_long_body_is_refused(self, site: Site) -> None:
        long = {"action": "kick", "worker": "a" * app.LONGEST_BODY}
        assert site.orders(long).status == 413
        parts = (b" " * 1024 for _ in range(5))  # no length is announced
        assert site.request("POST", "/api/control", parts, **BEARER, **JSON).status == 413

    def test_a_missing_body_times_out(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(app, "BODY_S", 0.05)
        head = (
            f"POST /api/control HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
            "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        with socket.create_connection(("127.0.0.1", site.port), PATIENCE_S) as client:
            client.sendall(head.encode())
            assert client.recv(100).startswith(b"HTTP/1.1 408 ")

    @pytest.mark.parametrize("body", [b"", b"{", b"[" * 4000, b'{"action": "reboot"}', b"\xff"])
    def test_what_is_no_order_is_refused(self, site: Site, body: bytes) -> None:
        answer = site.request("POST", "/api/control", body, **BEARER, **JSON)
        assert (answer.status, answer.json["ok"]) == (400, False)

    def test_readonly_steers_nothing(self, publisher: Publisher) -> None:
        policy = Policy("127.0.0.1", TOKEN, readonly=True)
        with serving(publisher.address, policy=policy) as site:
            publisher.says()
            assert site.orders({"action": "save"}).status == 403
            session = site.get("/api/session", **BEARER).json
            assert (session["steering"], session["needs_token"]) == (False, False)
            assert "--readonly" in session["reason"]

    def test_silent_broker_is_a_sentence(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(app, "ask_once", partial(ask_once, timeout=0.05))
        answer = site.orders({"action": "pause"})
        assert answer.status == 504
        assert "No answer from tcp://127.0.0.1:1" in answer.json["text"]

    def test_only_so_many_orders_wait_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(app, "MOST_ORDERS", 0)
        with serving(NOBODY) as site:
            assert site.orders({"action": "pause"}).status == 429

    def test_orders_reach_the_broker_and_its_sentences_come_back(self) -> None:
        config = make_config(workers=2, save_dir=None)
        with Broker(config) as broker, serving(broker.feed_address) as site:
            site.await_state(mode="sync")
            done = site.orders({"action": "set", "outer_lr": 0.5})
            assert (done.status, done.json["ok"]) == (200, True)
            assert "uter learning rate 0.7 -> 0.5" in done.json["text"]
            refused = site.orders({"action": "save"})
            assert (refused.status, refused.json["ok"]) == (200, False)
            assert "--save-dir" in refused.json["text"]
            unknown = site.orders({"action": "kick", "worker": "w9"})
            assert unknown.json["ok"] is False and "'w9'" in unknown.json["text"]
            assert site.orders({"action": "shutdown", "confirm": "no"}).status == 400
            paused = site.orders({"action": "pause"})
            assert paused.json["ok"] is True
            state = site.await_state(state="paused")
            assert state["picture"]["snapshot"]["outer"]["lr"] == 0.5


class TestPolling:
    def test_first_the_whole_then_what_is_new(self, publisher: Publisher) -> None:
        with serving(publisher.address) as site:
            publisher.says(sequence=7, uptime_s=10.0)
            site.await_state(sequence=7)
            first = site.get("/api/state?after=0").json
            assert first["whole"] is True and "picture" not in first
            assert len(first["series"]["rounds"]) == 1
            publisher.says(sequence=9, uptime_s=11.0, last_round={"number": 412})
            site.await_state(sequence=9)
            second = site.get(f"/api/state?after={first['clock']}").json
            assert second["whole"] is False
            assert [point[1] for point in second["series"]["rounds"]] == [412]
            assert second["missed"] == 1

    def test_words_go_on_while_the_broker_is_silent(self, publisher: Publisher) -> None:
        with serving(publisher.address) as site:
            publisher.says()
            first = site.await_state(sequence=7)
            before = first["words"]["facts"]
            wait_for(lambda: site.get("/api/state").json["words"]["facts"] != before)
            assert site.get("/api/state").json["age_s"] > first["age_s"]

    def test_clock_that_is_none_is_refused(self, site: Site) -> None:
        for after in ("often", ""):
            assert site.get(f"/api/state?after={after}").status == 400, after

    def test_page_is_told_that_nothing_was_ever_heard(self) -> None:
        with serving(NOBODY) as site:
            state = site.get("/api/state").json
            assert (state["age_s"], state["picture"]) == (None, None)
            assert state["words"]["badge"][1] == "STALE"

    @pytest.mark.parametrize(
        ("payload", "said"),
        [(frame(a_status(feed=9)), "feed version 9"), (TOPIC + b"{", "1 unreadable snapshots")],
    )
    def test_unreadable_feed_is_said(self, publisher: Publisher, payload: bytes, said: str) -> None:
        with serving(publisher.address) as site:
            publisher.await_subscriber()
            publisher.send(payload)
            assert said in wait_for(lambda: site.get("/api/state").json["problem"])
            publisher.send(frame(a_status()))
            assert site.await_state(sequence=7)["problem"] is None, "it is not the end"


class TestEnd:
    def test_server_ends_at_once_though_a_page_reads_nothing(self, publisher: Publisher) -> None:
        with ExitStack() as after:
            with serving(publisher.address) as site:
                publisher.says(workers=[a_worker(f"w{n}", host="h" * 500) for n in range(500)])
                site.await_state(sequence=7)
                silent = socket.create_connection(("127.0.0.1", site.port), PATIENCE_S)
                asked = b"GET /api/state HTTP/1.1\r\nHost: localhost\r\n\r\n"
                after.enter_context(silent).sendall(asked)
                began = time.monotonic()
            assert time.monotonic() - began < PATIENCE_S / 2, "it waits for no page"


def plotted(source: FeedSource) -> list[int]:
    """The rounds sent to a page that asks for everything."""
    return [number for _, number, *_ in json.loads(source.state())["series"]["rounds"]]


def test_dashboard_that_is_opened_late_shows_the_rounds_before(tmp_path: Path) -> None:
    config = make_config(workers=1, sync_every=2, save_dir=str(tmp_path))
    with Broker(config) as broker:
        train(broker, [an_mlp(0)], steps=6)
        late = FeedSource(broker.feed_address)
        with late:
            wait_for(lambda: plotted(late) == [0, 1, 2])
            train(broker, [an_mlp(0)], steps=2)
            wait_for(lambda: plotted(late) == [0, 1, 2, 3])


def test_history_of_another_run_is_not_shown(tmp_path: Path, publisher: Publisher) -> None:
    with Broker(make_config(workers=1, sync_every=2, save_dir=str(tmp_path))) as broker:
        train(broker, [an_mlp(0)], steps=6)
    source = FeedSource(publisher.address)
    with source:
        publisher.says(checkpoint={"folder": str(tmp_path)}, unix_s=time.time())
        wait_for(lambda: source.read().received)
        assert plotted(source) == [411]
