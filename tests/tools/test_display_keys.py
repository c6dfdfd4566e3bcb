"""Displays at a broker that asks for keys: who may look, who may steer, and what the others read."""

import re
import select
import time
from functools import partial
from pathlib import Path

import pytest

from diloco_broker import Broker, BrokerConfig
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients import ask_once
from diloco_protocol.feed import FeedError, FeedRefusedError
from diloco_protocol.roles import Role
from diloco_tools.monitor.feed import listener
from diloco_tools.monitor.feed.listener import FeedSubscriber, Listener
from diloco_tools.monitor.metrics.cli import app as exporter_app
from diloco_tools.monitor.web.cli import app as dashboard_app
from diloco_tools.monitor.web.security import Policy
from diloco_tools.terminal import keys_of
from kit.dashboard_server import TOKEN, serving
from kit.exporter_scrapes import until
from kit.feed_snapshots import PATIENCE_S
from kit.keyed_broker import ALLOWED, file_of, forged, key, public_of
from kit.process_kit import LOCAL, wait_for
from kit.top_screen import ScreenPilot, snapshot
from kit.top_text import top
from kit.web_commands import refusal, started

pytest_plugins = ("kit.key_fixtures",)

OTHER = r"The peer closes the connection at once: it is a broker that requires a key or another"
WANTED = r"The broker requires a key; give the key file that diloco-broker keygen made"
REVOKED = r"The broker rejected the key: it was revoked, or made for another broker"


@pytest.mark.parametrize(
    ("whose", "sentence"),
    [("none", WANTED), ("an unauthenticated peer's", REVOKED), ("another broker's", OTHER)],
)
def test_feed_is_refused_at_once_with_a_sentence(
    keyed: Broker, folder: KeyFolder, tmp_path: Path, whose: str, sentence: str
) -> None:
    keys = None if whose == "none" else forged(folder, "display")
    if whose == "another broker's":
        other = KeyFolder.make(tmp_path / "other")
        other.add_all([ALLOWED["display"]])
        keys = key(other, "display")
    with FeedSubscriber(keyed.feed_address, keys=keys) as feed:
        with pytest.raises(FeedRefusedError, match=sentence):
            feed.receive(PATIENCE_S)
        began = time.monotonic()
        assert feed.receive(0.05) is None, "it is refused once for each time that it asks"
        assert time.monotonic() - began >= 0.05, "and waits until it asks again"


def test_key_is_refused_by_a_broker_that_asks_for_none(folder: KeyFolder) -> None:
    keys = key(folder, "display")
    with (
        Broker(BrokerConfig(**LOCAL)) as open_to_all,
        FeedSubscriber(open_to_all.feed_address, keys=keys) as feed,
        pytest.raises(FeedRefusedError, match="The broker uses no keys"),
    ):
        feed.receive(PATIENCE_S)


def test_revoked_key_is_said(
    keyed: Broker, folder: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "KNOCK_AGAIN_S", 0.1)
    monkeypatch.setattr(listener, "RENEW_AFTER_S", 1e9)  # so each complaint comes once
    public = public_of(folder, "display")
    complaints: list[FeedError] = []
    feed = FeedSubscriber(keyed.feed_address, keys=key(folder, "display"))
    with Listener(feed, lambda _: None, complaints.append) as watcher:
        for _ in range(2):
            wait_for(lambda: watcher.model.snapshot and not watcher.model.refusal)
            complaints.clear()
            kept = public.read_text()
            public.unlink()
            wait_for(lambda: watcher.model.refusal)
            read = watcher.read()
            assert read.model.verdict(read.now).reasons[0] == watcher.model.refusal
            assert re.match(REVOKED, watcher.model.refusal)
            wait_for(lambda: complaints)
            assert [str(each) for each in complaints] == [watcher.model.refusal], "once"
            assert read.unreadable == 0
            public.write_text(kept)


class TestCommands:
    @pytest.mark.parametrize("options", [("--once",), ("--json",), ("--once", "--follow")])
    def test_top_is_refused_at_once(self, keyed: Broker, options: tuple[str, ...]) -> None:
        result = top(keyed.feed_address, *options, "--timeout", "500", DILOCO_KEYS="")
        assert (result.exit_code, result.stdout) == (2, "")
        assert re.match(f"diloco-top: {WANTED}", result.stderr)

    def test_top_takes_key_file_folder_or_variable(self, keyed: Broker, folder: KeyFolder) -> None:
        file = str(file_of(folder, "display"))
        ways = ((("--keys", file), ""), (("--keys", str(folder.path)), ""), ((), file))
        for options, variable in ways:
            result = top(keyed.feed_address, "--once", *options, DILOCO_KEYS=variable)
            assert "round one needs 2" in result.stdout, result.stderr

    def test_a_folder_has_an_operator_s_key_for_those_that_steer(self, folder: KeyFolder) -> None:
        for steers, role in ((True, Role.OPERATOR), (False, Role.MONITOR)):
            found = keys_of(folder.path, steers=steers)
            assert found is not None
            assert found.peer.role is role

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("nowhere.key", "cannot be read: No such file or directory; give the key file that"),
            ("broker.key", "is not a key of a worker, operator or monitor: it is the broker's own"),
            ("allowed/monitor/display.pub", "is not a key of a worker, operator or monitor"),
            ("allowed", "has no key of a"),
        ],
    )
    def test_invalid_key_is_one_sentence(self, folder: KeyFolder, name: str, said: str) -> None:
        file = str(folder.path / name)
        assert said in refusal(dashboard_app, "--port", "0", "--keys", file)
        assert said in refusal(exporter_app, "--port", "0", "--keys", file)
        assert said in top("--once", "--keys", file).stderr

    def test_exporter_says_why_it_has_nothing(self, keyed: Broker) -> None:
        options = ("--feed", keyed.feed_address)
        with started("diloco_tools.monitor.metrics.cli", *options) as (process, url):
            assert process.stderr is not None
            assert select.select([process.stderr], [], [], PATIENCE_S)[0]
            assert re.match(f"diloco-exporter: {WANTED}", process.stderr.readline())
            assert until(url, "diloco_feed_up", 0)["diloco_run_healthy", ()] == 0
            process.terminate()
            assert process.communicate(timeout=PATIENCE_S) == ("", "")


class TestScreen:
    @pytest.mark.parametrize(
        ("name", "said"),
        [("anna", "No round closes: workers train"), ("display", "The monitor display may not")],
    )
    def test_key_that_pauses_the_run_is_an_operator_s(
        self, keyed: Broker, folder: KeyFolder, name: str, said: str
    ) -> None:
        keys = key(folder, name)
        feed = FeedSubscriber(keyed.feed_address, keys=keys)
        address, ask = keyed.feed_address, partial(ask_once, keys=keys)
        pilot = ScreenPilot(fill=False, address=address, feed=feed, ask=ask, clock=time.monotonic)

        async def script() -> None:
            await pilot.sees("no workers yet")
            await pilot.press("p", "y")
            await pilot.sees(said)

        pilot.play(script)

    def test_refusal_stands_where_the_run_would_until_it_is_taken_back(self) -> None:
        pilot = ScreenPilot(fill=False)
        said = "The broker asks for a key; give the file."

        async def script() -> None:
            pilot.app.cannot_read(FeedRefusedError(said))
            await pilot.sees(said)
            await pilot.waits(100)
            assert pilot.text().count(said) == 1, "it stays, and once"
            assert "Start diloco-broker serve" not in pilot.text()
            await pilot.hears(snapshot(1))
            assert said not in pilot.text()
            pilot.app.cannot_read(FeedRefusedError(said))
            await pilot.waits(100)
            assert said in pilot.lines()[-2], "in the status line, beside what is known"
            await pilot.hears(snapshot(2))
            assert said not in pilot.text()

        pilot.play(script)


class TestPage:
    def test_page_without_a_key_to_steer_says_so(self, keyed: Broker, folder: KeyFolder) -> None:
        policy = Policy("127.0.0.1", TOKEN, reader=ALLOWED["display"])
        with serving(keyed.feed_address, policy=policy, keys=key(folder, "display")) as site:
            site.await_state(security="keys")
            session = site.get("/api/session", Authorization=f"Bearer {TOKEN}").json
            assert (session["steering"], session["needs_token"]) == (False, False)
            assert "the key of the monitor display" in session["reason"]
            assert site.orders({"action": "pause"}).status == 403

    def test_page_that_is_refused_says_so(self, keyed: Broker) -> None:
        with serving(keyed.feed_address) as site:
            wait_for(lambda: site.get("/api/state").json["refusal"])
            said = site.get("/api/state").json["refusal"]
            assert re.match(WANTED, said)
            assert site.get("/api/state").json["reasons"] == [said]
