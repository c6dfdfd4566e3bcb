"""A hub and its standby as processes: killed, stopped, promoted. One of them has the run."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diloco_protocol.clients import Operator
from kit.process_kit import Child, Processes, a_free_address, wait_for

pytestmark = pytest.mark.slow

# Longer than a process waits for the CPU on a machine that is busy with other tests: a hub that is
# stopped for longer loses the run, as it should. The times themselves are tested in the core.
LEASE_S = 6.0
ANYWHERE = "tcp://127.0.0.1:*"
WARMUP = ("--outer-momentum-warmup", "constant")
OPTIONS = ("--workers", "2", "--sync-every", "5", "--relays", *WARMUP)


@dataclass
class Pair:
    """A hub, its standby, and two workers that know both."""

    processes: Processes
    folder: Path
    hub: Child
    hub_at: str
    standby: Child
    standby_at: str
    workers: list[Child]

    def asks(self, address: str, action: str, **arguments: Any) -> Any:
        with Operator(address, timeout=5.0) as operator:
            return operator.ask(action, **arguments)

    def is_ready(self) -> bool:
        """Whether the standby has a checkpoint, and knows both workers as voters."""
        status = self.asks(self.standby_at, "status").data
        return status["checkpoint"] is not None and status["voters"] == 2


def hub_of(processes: Processes, folder: Path, address: str) -> Child:
    options = ("--standby", "--lease", str(LEASE_S), "--save-dir", str(folder / "hub"))
    return processes.serve(*OPTIONS, *options, bind=address)[0]


def standby_of(processes: Processes, folder: Path, hub: str, address: str) -> Child:
    where = ("--bind", address, "--feed", ANYWHERE, "--save-dir", str(folder / "standby"))
    return processes.run("-m", "diloco_broker", "standby", "--of", hub, *OPTIONS, *where)


@pytest.fixture
def pair(processes: Processes, tmp_path: Path, request: pytest.FixtureRequest) -> Pair:
    """Parametrized with True the workers are behind a relay."""
    hub_at, standby_at = a_free_address(), a_free_address()
    hub = hub_of(processes, tmp_path, hub_at)
    standby = standby_of(processes, tmp_path, hub_at, standby_at)
    both = f"{hub_at},{standby_at}"
    if getattr(request, "param", False):
        where = ("--parent", both, "--name", "north", "--bind", ANYWHERE, "--feed", ANYWHERE)
        both = processes.run("-m", "diloco_broker", "relay", *where).address()
    workers = [processes.train(name, both, 400, pause=0.02) for name in ("a", "b")]
    made = Pair(processes, tmp_path, hub, hub_at, standby, standby_at, workers)
    hub.says("Round 3 closed")
    wait_for(made.is_ready)
    return made


def rounds_of(child: Child) -> list[int]:
    return [int(number) for number in re.findall(r"Round (\d+) closed", child.output)]


def check_the_end(pair: Pair) -> None:
    assert [worker.ends() for worker in pair.workers] == [0, 0]
    a, b = (pair.processes.result(name) for name in ("a", "b"))
    assert a["weights"] == b["weights"]


def test_a_standby_has_the_run_of_a_hub_that_was_killed_and_keeps_it(pair: Pair) -> None:
    pair.hub.kill()
    pair.standby.says("Taking over with term 1")
    pair.standby.says("2 of 2 expected workers averaged")
    last, first = rounds_of(pair.hub)[-1], rounds_of(pair.standby)[0]
    assert first in (last, last + 1), "only a version that no worker had may be lost"
    # The hub comes back to a run that is not its own any more.
    hub = hub_of(pair.processes, pair.folder, pair.hub_at)
    hub.says("this hub releases no more versions")
    # The standby is the hub, also when it is started again.
    pair.standby.kill()
    again = standby_of(pair.processes, pair.folder, pair.hub_at, pair.standby_at)
    again.says("has taken over the run")
    again.says("2 of 2 expected workers averaged")
    assert pair.asks(pair.standby_at, "status").data["term"] == 1
    check_the_end(pair)
    assert not rounds_of(hub)


@pytest.mark.nightly
@pytest.mark.parametrize("pair", [True], ids=["relay"], indirect=True)
def test_workers_behind_a_relay_let_the_standby_take_over_and_follow_it(pair: Pair) -> None:
    pair.hub.kill()
    pair.standby.says("Taking over with term 1")
    pair.standby.says("2 of 2 expected workers averaged")
    workers = pair.asks(pair.standby_at, "status").data["workers"]
    assert {each["via"] for each in workers} == {"north"}
    check_the_end(pair)


def test_a_hub_that_was_stopped_releases_nothing_when_it_goes_on(pair: Pair) -> None:
    pair.hub.gets(signal.SIGSTOP)
    pair.standby.says("Taking over with term 1")
    pair.standby.says("2 of 2 expected workers averaged")
    pair.hub.gets(signal.SIGCONT)
    pair.hub.says("this hub releases no more versions")
    last = rounds_of(pair.hub)[-1]
    state = pair.asks(pair.hub_at, "status").data
    assert state["standby"]["is_replaced"] and not state["workers"]
    pair.standby.says(f"Round {last + 3} closed")
    assert rounds_of(pair.hub)[-1] == last


def test_a_planned_takeover_loses_nothing(pair: Pair) -> None:
    # A standby that is started again stays one, and nothing else serves its folder.
    pair.standby.kill()
    folder = str(pair.folder / "standby")
    other = pair.processes.run("-m", "diloco_broker", "serve", "--save-dir", folder)
    assert other.ends() == 2
    assert "folder of a standby" in other.output
    again = standby_of(pair.processes, pair.folder, pair.hub_at, pair.standby_at)
    again.says("Connected to the hub at")
    assert "lost its lease" not in pair.hub.output
    assert pair.processes.asks("promote", "--address", pair.standby_at) == 0
    goes_on = again.says("continues with round")
    last = rounds_of(pair.hub)[-1]
    assert f"continues with round {last + 1}, from the checkpoint before" in goes_on
    assert "Recovered the parameters" not in again.output  # nor is the momentum lost
    again.says(f"Round {last + 1} closed")
    check_the_end(pair)
