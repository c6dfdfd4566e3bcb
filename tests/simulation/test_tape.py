"""A tape of a simulated run, with all that goes wrong in it, replays effect for effect."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_broker.core.machine import Core
from diloco_broker.core.rounds import grants
from diloco_broker.core.tape import Draws, Step, replay
from diloco_broker.shell.effects import Executor
from diloco_broker.storage import tape_file
from diloco_broker.storage.tape_file import TapeWriter, read_tape
from simulation import broker
from simulation.scenarios import MODES, a_scenario
from simulation.simulator import Scenario, Simulation


def taped(scenario: Scenario, seed: int, folder: Path) -> tuple[Simulation, list[Path]]:
    """Simulate it; returns the run, and the tape of each incarnation of its broker."""
    tapes: dict[Path, TapeWriter] = {}

    def executor(core: Core, clock: Any, ports: Any) -> Executor:
        core.state.draw = Draws(b"life %d" % len(tapes))
        path = folder / str(len(tapes))
        tapes[path] = TapeWriter(path, core, "of this release")
        return Executor(core, clock, ports, tape=tapes[path])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker, "Executor", executor)
        patch.setattr(tape_file, "MOST_WAITING", math.inf)  # no disk keeps up with virtual time
        run = Simulation(scenario, seed).run()
        for tape in tapes.values():
            tape.close()
    return run, list(tapes)


def replayed(path: Path) -> list[Step]:
    with read_tape(path) as tape:
        return list(replay(tape.core, tape.entries))


def replayed_steps(path: Path) -> int:
    """Replay it; returns the number of steps."""
    steps = replayed(path)
    assert steps[-1].difference is None, f"{steps[-1].difference} at {steps[-1].entry.event}"
    return len(steps)


@pytest.mark.parametrize(
    ("mode", "streams"),
    [
        *((mode, False) for mode in ("streaming", "drop", "async")),
        *(pytest.param(mode, True, marks=pytest.mark.slow) for mode in MODES),
    ],
)
def test_run_replays_effect_for_effect(mode: str, streams: bool, tmp_path: Path) -> None:
    run, tapes = taped(a_scenario(mode, streams, seed=3), 3, tmp_path)
    assert sum(map(replayed_steps, tapes)) > 100 < run.broker.messages


@pytest.mark.slow
def test_run_with_adaptive_grace_replays_effect_for_effect(tmp_path: Path) -> None:
    """Here with restarts of the broker, after which it measures anew."""
    scenario = a_scenario("drop", True, seed=2)
    auto: dict[str, Any] = {"grace": "auto", "fragment_sync_delay": "auto", "quorum": 1}
    auto |= {"num_fragments": 2, "sync_every": 16, "fragment_max_delay": None, "min_workers": 1}
    scenario = replace(
        scenario,
        wants=({},),
        config=replace(scenario.config, **auto),
        troubles=replace(scenario.troubles, seconds=30.0),
    )
    run, tapes = taped(scenario, 2, tmp_path)
    assert len(tapes) > 1
    assert all(map(replayed_steps, tapes))
    assert run.broker.core.state.slack.grace_s > 0


def test_core_that_decides_in_another_way_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, tapes = taped(a_scenario("streaming", False, seed=3), 3, tmp_path)
    monkeypatch.setattr(grants, "counted", lambda *_: iter(()))
    monkeypatch.setattr(grants, "wait", lambda *_: iter(()))
    monkeypatch.setattr(grants, "acknowledge_work", lambda *_: ())
    (last,) = [step for step in replayed(tapes[0]) if step.difference is not None]
    assert last.difference is not None
    assert (last.difference.was, last.difference.became) == ("Ack", "")
