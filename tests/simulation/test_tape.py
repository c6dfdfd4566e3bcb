"""A tape of a simulated run, with all that goes wrong in it, replays effect for effect."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from diloco_broker.core.effects import Effect
from diloco_broker.core.events import Event, Now
from diloco_broker.core.machine import Core
from diloco_broker.core.rounds import grants
from diloco_broker.core.tape import Codec, Draws, Entry, Step, noted, replay, written
from diloco_broker.shell.effects import Executor
from simulation import broker
from simulation.scenarios import MODES, a_scenario
from simulation.simulator import Simulation


class Reel:
    """A tape in memory, through msgpack as in a file."""

    def __init__(self, core: Core, incarnation: int) -> None:
        self.core = core
        core.state.draw = Draws(b"life %d" % incarnation)
        self._codec = Codec()
        state = self._codec.freeze(core.state)
        self._values = [msgpack.packb([self._codec.new_shapes(), state])]

    def note(self, event: Event, now: Now, asked_for: Sequence[Effect] | None) -> None:
        said, marks = noted(event, asked_for)
        self._values.append(msgpack.packb(written(said, now, marks, self._codec)))

    def replayed(self) -> Iterator[Step]:
        codec = Codec()
        shapes, state = msgpack.unpackb(self._values[0], strict_map_key=False)
        codec.know(shapes)
        core = Core.with_state(codec.thaw(state))
        plain = (msgpack.unpackb(each, strict_map_key=False) for each in self._values[1:])
        return replay(core, (Entry.read(each, codec) for each in plain))


@contextmanager
def taped() -> Iterator[list[Reel]]:
    """Each incarnation of the simulated broker makes one."""
    reels: list[Reel] = []

    def executor(core: Core, clock: Any, ports: Any) -> Executor:
        reels.append(Reel(core, len(reels)))
        return Executor(core, clock, ports, tape=reels[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker, "Executor", executor)
        yield reels


def replayed_steps(reel: Reel) -> int:
    """Replay it; returns the number of steps."""
    steps = list(reel.replayed())
    assert steps[-1].difference is None, f"{steps[-1].difference} at {steps[-1].entry.event}"
    return len(steps)


@pytest.mark.parametrize(
    ("mode", "streams"),
    [
        *((mode, False) for mode in ("streaming", "drop", "async")),
        *(pytest.param(mode, True, marks=pytest.mark.slow) for mode in MODES),
    ],
)
def test_run_replays_effect_for_effect(mode: str, streams: bool) -> None:
    with taped() as reels:
        run = Simulation(a_scenario(mode, streams, seed=3), 3).run()
    assert sum(map(replayed_steps, reels)) > 100 < run.broker.messages


@pytest.mark.slow
def test_run_with_adaptive_grace_replays_effect_for_effect() -> None:
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
    with taped() as reels:
        Simulation(scenario, 2).run()
    assert len(reels) > 1
    assert all(map(replayed_steps, reels))
    assert any(reel.core.state.slack.grace_s > 0 for reel in reels)


def test_core_that_decides_in_another_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with taped() as reels:
        Simulation(a_scenario("streaming", False, seed=3), 3).run()
    monkeypatch.setattr(grants, "counted", lambda *_: iter(()))
    monkeypatch.setattr(grants, "wait", lambda *_: iter(()))
    monkeypatch.setattr(grants, "acknowledge_work", lambda *_: ())
    (last,) = [step for step in reels[0].replayed() if step.difference is not None]
    assert last.difference is not None
    assert (last.difference.was, last.difference.became) == ("Ack", "")
