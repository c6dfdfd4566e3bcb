"""Whatever a checkpoint contains belongs to one moment: a run goes on from it as if never killed."""

from __future__ import annotations

from dataclasses import asdict, replace
from random import Random
from typing import Any

import pytest

from diloco_broker.core.effects import RoundReport
from kit.core_harness import Stage, a_stage

WORKERS = ("a", "b", "c")
FRAGMENTS = {"num_fragments": 2, "sync_every": 8}
MODES: dict[str, dict[str, Any]] = {
    "streaming": {},
    "staged": {"deterministic": True},
    "quorum": {"quorum": 2, "grace": 5.0},
    "streaming fragments": FRAGMENTS,
    "staged fragments": {"deterministic": True} | FRAGMENTS,
    "async": {"mode": "async"},
    "async window": {"mode": "async", "grace": 1.0},
    "async fragments": {"mode": "async"} | FRAGMENTS,
}
# The run is killed after each of the first versions; then every worker pushes every fragment once more.
KILLED_AFTER, VERSIONS = 3, 12
IS_SPOILED = 1  # in this round one of the pushes is not finite


def makes_a_version(stage: Stage, number: int) -> None:
    """Workers push what depends on the number alone, until there is a version."""
    dice, config = Random(number), stage.config
    has_rounds = config.mode == "sync" or config.fixed_grace > 0
    fragment = number % config.num_fragments
    base = stage.version(fragment)
    for place, name in enumerate(WORKERS):
        push_id, squares = 100 * number + place, dice.random()
        told: dict[str, Any] = {"fragment": fragment, "base": base, "loss": dice.random()}
        told |= {"steps": dice.randint(1, 9), "tokens": dice.randint(1, 99)}
        if not (has_rounds or place == number % len(WORKERS)):
            continue
        if has_rounds and number == IS_SPOILED and place == 2:
            stage.puppets[name].begins(push_id, **told)
            stage.puppets[name].delivers([0], is_finite=False)
        else:
            stage.puppets[name].pushes(push_id, squares=squares, **told)
    stage.passes(config.fixed_grace + 0.2)


def is_written(stage: Stage) -> None:
    """The checkpoint that a durable version waits for."""
    if stage.config.durable:
        stage.is_saved()


def shown(reports: list[RoundReport]) -> list[RoundReport]:
    return [replace(each, seconds=0.0) for each in reports]


def counted(stage: Stage) -> tuple[dict[str, int], dict[str, Any]]:
    """The totals of the run and of its workers, but for times and what workers read."""
    workers = {m.worker_id: m.counters() | {"bytes_down": 0} for m in stage.state.members}
    return asdict(stage.state.totals) | {"open_s": 0}, workers


def norms(stage: Stage) -> dict[str, dict[int, float]]:
    return {member.worker_id: member.figures.norms for member in stage.state.members}


@pytest.mark.parametrize("durable", [False, True], ids=["usual", "durable"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_tells_after_a_kill_what_it_would_have_told(mode: str, durable: bool) -> None:
    options: dict[str, Any] = {"save_dir": "run", "durable": durable, "heartbeat_timeout": 0.0}
    whole = a_stage(workers=len(WORKERS), chunks=2, **options, **MODES[mode])
    whole.joined(*WORKERS)
    crashed, came = [], []
    for number in range(VERSIONS):
        makes_a_version(whole, number)
        if number < KILLED_AFTER:
            # Killed when the checkpoint has just been asked for: a durable version waits for it.
            crashed.append((whole.checkpoints[-1], whole.holdings()))
        is_written(whole)
        came.append((counted(whole), len(whole.reports)))
    assert came[-1][0][0]["rounds"] == sum(whole.counters) == VERSIONS
    for last, (saved, held) in enumerate(crashed):
        stage = whole.restarted(saved)
        for name in WORKERS:
            stage.worker(name).comes_with(held)
        stage.passes(0.2)
        assert stage.round.number == last + 1
        assert counted(stage) == came[last][0]
        for number in range(last + 1, VERSIONS):
            makes_a_version(stage, number)
            is_written(stage)
        assert counted(stage) == counted(whole)
        assert shown(stage.reports) == shown(whole.reports[came[last][1] :])
        assert norms(stage) == norms(whole)
