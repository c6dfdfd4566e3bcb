"""The web page that the daemon starts beside itself: it is there, and gone when the daemon is."""

from __future__ import annotations

import signal
import socket
import urllib.error
import urllib.request
from contextlib import closing

import pytest

from kit.process_kit import Processes
from kit.uniform_model import until

pytest_plugins = ("kit.process_fixtures",)
pytest.importorskip("uvicorn", reason="the extra `dashboard` is not installed")


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["told to end", "killed"])
def test_page_is_there_and_ends_with_the_broker(processes: Processes, end: signal.Signals) -> None:
    broker, _ = processes.serve("--dashboard", "0", "--no-save")
    address = broker.says("Dashboard: ").split()[-1]
    assert answers(address)
    broker.gets(end)
    broker.ends(20)
    until(lambda: not answers(address))


def test_port_in_use_costs_the_page_and_nothing_else(processes: Processes) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        broker, _ = processes.serve("--dashboard", str(port), "--no-save")
        assert "another --port" in broker.says("cannot listen on")
        broker.says("the run goes on without it")
        broker.gets(signal.SIGTERM)
        assert broker.ends(20) == 0


def test_dashboard_takes_a_port_or_none(processes: Processes) -> None:
    """`--dashboard` alone means the usual port: another option behind it is not taken for one."""
    for words in (["--dashboard", "--workers", "x"], ["--dashboard", "70000"]):
        process = processes.run("-m", "diloco_broker", "serve", *words)
        assert process.ends(20) == 2
        named = "--workers" if "--workers" in words else "--dashboard"
        assert named in process.output
