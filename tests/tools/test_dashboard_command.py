"""diloco-dashboard as a command: what it prints, when it ends, and a recorded run."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer

from diloco_tools.monitor.feed.listener import FeedSubscriber
from diloco_tools.monitor.feed.replay import History, read_history
from diloco_tools.monitor.metrics.cli import app as exporter_app
from diloco_tools.monitor.web.cli import app
from diloco_tools.monitor.web.source import moment_of, outline_of
from kit.dashboard_server import Publisher, serving
from kit.feed_snapshots import PATIENCE_S
from kit.past_runs import write_run
from kit.web_commands import NOBODY, refusal, started

MODULE = "diloco_tools.monitor.web.cli"


@pytest.fixture(autouse=True)
def _signals_of_pytest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def fetch(address: str, token: str | None = None) -> Any:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(address, headers=headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())


class TestStart:
    def test_it_prints_one_address_that_steers(self, publisher: Publisher) -> None:
        with started(MODULE, "--feed", publisher.address) as (process, address):
            base, token = address.split("/?token=")
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+", base)
            assert len(token) >= 40
            publisher.says()
            session = fetch(f"{base}/api/session", token)
            assert (session["steering"], session["feed"]) == (True, publisher.address)
            assert fetch(f"{base}/api/session")["steering"] is False
            process.terminate()
            out, err = process.communicate(timeout=PATIENCE_S)
            assert (out, err, process.returncode) == ("", "", 0)

    def test_readonly_prints_no_token_and_standard_input_means_nothing(self) -> None:
        with started(MODULE, "--feed", NOBODY, "--readonly") as (process, address):
            assert address.endswith("/")
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
            assert "--readonly" in fetch(f"{address}api/session")["reason"]
            assert process.poll() is None

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--host", "0.0.0.0"), "--insecure"),
            (("--feed", "localhost:"), "--feed"),
            (("--replay", "x", "--server", NOBODY), "--server"),
            (("--replay", "/no/such"), "/no/such"),
        ],
    )
    def test_bad_options_are_refused(self, arguments: tuple[str, ...], said: str) -> None:
        assert said in refusal(app, *arguments)

    @pytest.mark.parametrize("app", [app, exporter_app], ids=["dashboard", "exporter"])
    def test_port_in_use_is_one_sentence(
        self, app: typer.Typer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed: list[None] = []
        close = FeedSubscriber.close
        monkeypatch.setattr(FeedSubscriber, "close", lambda feed: closed.append(close(feed)))
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            sentence = refusal(app, "--feed", NOBODY, "--port", port)
        assert f"cannot listen on '127.0.0.1' port {port} (Address already in use)" in sentence
        assert len(closed) == 1

    @pytest.mark.parametrize("package", ["starlette", "uvicorn"])
    def test_missing_packages_are_named(self, package: str) -> None:
        script = f"import sys; sys.modules[{package!r}] = None; from {MODULE} import app; app()"
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (
            2,
            f"diloco-dashboard: {package} is not installed: "
            "pip install 'diloco-broker[dashboard]'\n",
        )


class TestEnd:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_ends_it_with_0_though_a_page_is_open(self, number: signal.Signals) -> None:
        with started(MODULE, "--feed", NOBODY) as (process, address):
            host, port = address.split("/")[2].split(":")
            page = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
            with closing(page):
                page.request("GET", "/api/state")
                assert page.getresponse().read()
                process.send_signal(number)
                out, err = process.communicate(timeout=5)
            assert (out, err, process.returncode) == ("", "", 0)

    def test_lifeline_ends_it_with_the_program_that_started_it(self) -> None:
        with started(MODULE, "--feed", NOBODY, "--lifeline") as (process, _):
            out, err = process.communicate(timeout=PATIENCE_S)  # closes its standard input
            assert (out, err, process.returncode) == ("", "", 0)


class TestReplay:
    @pytest.fixture
    def past(self, tmp_path: Path) -> History:
        return read_history(write_run(tmp_path, rounds=30))

    def test_outline_has_the_whole_run(self, past: History) -> None:
        outline = json.loads(outline_of(past))
        assert outline["moments"] == 33
        assert outline["last_at"] - outline["first_at"] == pytest.approx(1202.0)
        rounds = outline["series"]["rounds"]
        assert [point[1] for point in rounds] == list(range(30))
        assert rounds[0][0] == pytest.approx(40.0), "seconds since the start"
        assert outline["series"]["speeds"].keys() == {"a", "b"}

    def test_a_long_run_is_thinned(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("diloco_tools.monitor.web.source.REPLAY_POINTS", 10)
        past = read_history(write_run(tmp_path, rounds=95))
        rounds = json.loads(outline_of(past))["series"]["rounds"]
        assert len(rounds) <= 11
        assert rounds[-1][1] == 94

    def test_moments_are_as_they_were(self, past: History) -> None:
        body = moment_of(past, 11)
        assert body is not None
        moment = json.loads(body)
        assert moment["marker"]["number"] == 10
        assert [worker["id"] for worker in moment["words"]["workers"]] == ["a", "b"]
        assert moment_of(past, -1) is None
        assert moment_of(past, 33) is None

    def test_it_is_served_and_nothing_can_be_changed(self, past: History) -> None:
        with serving(replay=past) as site:
            session = site.get("/api/session").json
            assert (session["mode"], session["steering"]) == ("replay", False)
            assert "recorded run" in session["reason"]
            assert site.get("/api/replay").json["moments"] == 33
            assert site.get("/api/replay/3").json["index"] == 3
            assert site.get("/api/replay/33").status == 404
            assert site.get("/api/replay/x").status == 404
            assert site.get("/api/state").status == 404
            assert site.orders({"action": "pause"}).status == 409
