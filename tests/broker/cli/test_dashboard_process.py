"""The web page that the daemon starts beside itself: it is there, and gone when the daemon is."""

import json
import signal
import socket
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.roles import Peer, Role
from kit.process_kit import Processes, wait_for

pytest.importorskip("uvicorn", reason="the extra `dashboard` is not installed")


def read(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=5) as answer:
        return json.loads(answer.read())


def descendants(pid: int) -> list[str]:
    """Processes that this one has started, and those that they have."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return found + [each for child in found for each in descendants(int(child))]


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["told to end", "killed"])
def test_page_is_there_and_ends_with_the_broker(processes: Processes, end: signal.Signals) -> None:
    broker, _ = processes.serve("--dashboard", "0", "--no-save")
    address = broker.says("Dashboard: ").split()[-1]
    assert answers(address)
    broker.gets(end)
    broker.ends(20)
    wait_for(lambda: not answers(address))


def test_dashboard_of_a_broker_with_keys_only_reads(processes: Processes, tmp_path: Path) -> None:
    folder = KeyFolder.make(tmp_path / "keys")
    broker, _ = processes.serve("--dashboard", "0", "--no-save", "--keys", str(folder.path))
    said = broker.says("The dashboard is read-only")
    assert str(folder.path) in said
    address = broker.says("Dashboard: ").split()[-1]
    assert address.endswith("/"), "no token, since it cannot steer"
    wait_for(lambda: read(f"{address}api/state")["picture"] is not None)
    state, session = read(f"{address}api/state"), read(f"{address}api/session")
    assert state["picture"]["snapshot"]["security"] == "keys"
    assert "the key of the monitor dashboard" in session["reason"]
    secret = json.loads(folder.for_dashboard().read_text())["secret"]
    lines = [Path(f"/proc/{each}/cmdline").read_text() for each in descendants(broker.pid)]
    assert any("dashboard.key" in line for line in lines)
    seen = (*lines, json.dumps([state, session]), broker.output)
    assert not any(secret in text for text in seen)
    peers = KeyFolder(folder.path).allowed().by_key.values()
    assert list(peers) == [Peer(Role.MONITOR, "dashboard")]


def test_page_of_a_broker_without_keys_shows_it_none(processes: Processes, tmp_path: Path) -> None:
    other = KeyFolder.make(tmp_path / "keys").for_dashboard()
    broker, _ = processes.serve("--dashboard", "0", "--no-save", DILOCO_KEYS=str(other))
    address = broker.says("Dashboard: ").split()[-1].partition("?")[0]
    wait_for(lambda: read(f"{address}api/state")["picture"] is not None)


@pytest.mark.slow
def test_port_in_use_costs_the_page_and_nothing_else(processes: Processes) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        broker, _ = processes.serve("--dashboard", str(port), "--no-save")
        assert "--port" in broker.says("cannot listen on")
        broker.says("the run continues without it")
        broker.gets(signal.SIGTERM)
        assert broker.ends(20) == 0


def test_dashboard_takes_a_port_or_none(processes: Processes) -> None:
    """`--dashboard` alone means the usual port: another option behind it is not taken for one."""
    for words in (["--dashboard", "--workers", "x"], ["--dashboard", "70000"]):
        process = processes.run("-m", "diloco_broker", "serve", *words)
        assert process.ends(20) == 2
        named = "--workers" if "--workers" in words else "--dashboard"
        assert named in process.output
