"""What a broker that came back does once it has its parameters: rounds, optimizer, counters."""

from dataclasses import asdict, replace
from random import Random
from typing import Any

import pytest

from diloco_broker.core.effects import ForgetBuffer, RoundReport
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.messages import Progress, Standing
from kit.core_harness import Stage, a_config, a_round, a_stage
from kit.noted_tensors import CHUNK_ELEMENTS
from kit.restarts import MODES, a_saved_run, ahead, next_incarnation


def test_workers_that_left_before_the_checkpoint_are_not_waited_for() -> None:
    crashed = a_saved_run("a", "b", "c")
    a, b, c = (crashed.puppets[name] for name in "abc")
    a_round([a, b, c], 0)
    c.leaves()
    a_round([a, b], 1)
    stage, (a, b) = next_incarnation(crashed, "a", "b")
    stage.passes(0.2)
    assert stage.shown()["waiting_for"] is None
    a_round([a, b], 2)
    assert stage.version().counter == 3, "all that the checkpoint knows are back: no wait"


def test_round_one_waits_for_all_workers_after_a_restart_too() -> None:
    """The first checkpoint has the parameters of the first worker: no worker has trained."""
    crashed = a_stage(workers=2, chunks=2, save_dir="run")
    crashed.joined("a")
    assert crashed.saves == [0]
    stage, (a,) = next_incarnation(crashed, "a", recover_wait=2.0)
    stage.passes(5.0)
    a.pushes(1)
    stage.passes(5.0)
    assert stage.version().counter == 0
    stage.worker("b").joins().pushes(2)
    assert stage.version().counter == 1


def test_floor_of_the_run_holds_after_a_restart() -> None:
    crashed = a_saved_run("a", "b", "c", rounds=1, min_workers=2)
    stage, (a,) = next_incarnation(crashed, "a", recover_wait=5.0)
    stage.passes(5.2)
    a.pushes(11)
    for _ in range(5):
        a.beats()
        stage.passes(20.0)
    assert stage.version().counter == 1
    b = stage.worker("b").comes_with(crashed.holdings())
    b.pushes(12)
    assert stage.version().counter == 2


@pytest.mark.parametrize("mode", MODES)
def test_delta_frozen_for_another_wire_dtype_counts_after_the_restart(mode: str) -> None:
    crashed = a_saved_run("a", "b", rounds=1, **MODES[mode])
    stage, (a, b) = next_incarnation(crashed, "a", "b", wire_dtype="bf16")
    a.pushes(11, wire_dtype="fp32")
    b.begins(12, wire_dtype="bf16")
    b.delivers([0, 1], size=2 * CHUNK_ELEMENTS)
    b.commits()
    assert stage.shown()["totals"]["rejected"] == 0
    assert [(chunk["a", 11], chunk["b", 12]) for chunk in stage.counted()] == [(1, 1), (1, 1)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lost", [1, 2, 5])
@pytest.mark.parametrize("had", [1, 2])
def test_buffer_is_dropped_where_the_adopted_version_has_it(had: int, lost: int, size: int) -> None:
    crashed = a_saved_run("a", rounds=had, outer="dn", dn_buffer=size)
    stage = crashed.restarted()
    a = stage.worker("a").comes_with(ahead(crashed.holdings(), f0=lost))
    a.seeds()
    crossed = any(count % size == 0 for count in range(had + 1, had + lost + 1))
    assert (stage.tensors.reverted == [ForgetBuffer(0)]) == crossed
    assert bool(stage.tensors.reverted) == crossed
    assert stage.shown()["fragments"][0]["gradients"] == had + lost
    a.pushes(999, base=stage.version())
    assert stage.tensors.steps[-1].count == had + lost


def test_buffer_of_a_fragment_that_is_not_adopted_is_kept() -> None:
    """With a grace period a version has several gradients, so crossing is not known: only there."""
    options: dict[str, Any] = {"mode": "async", "grace": 1.0, "outer": "dn", "dn_buffer": 4}
    crashed = a_saved_run("a", pieces=2, **options)
    a = crashed.puppets["a"]
    for number in range(2):
        a.pushes(number, fragment=number)
        crashed.passes(1.5)
        a.beats()
    assert crashed.counters == [1, 1]
    stage = crashed.restarted()
    a = stage.worker("a").comes_with(ahead(crashed.holdings(), f1=1))
    a.seeds(1)
    assert stage.tensors.reverted == [ForgetBuffer(1)]


def test_part_of_a_push_that_a_checkpoint_has_is_not_asked_for_again() -> None:
    """Its worker died half-way, the round counted what it had sent; the same delta comes back."""
    crashed = a_saved_run("a", "b")
    a, b = (crashed.puppets[name] for name in "ab")
    a.begins(1)
    b.begins(2)
    a.delivers([0])
    a.dies()
    b.delivers([0, 1])
    assert crashed.version().counter == 1
    stage = crashed.restarted()
    b = stage.worker("b").comes_with(crashed.holdings())
    a = stage.worker("a").comes_with(crashed.holdings())
    grant = a.offers(1)
    assert (grant.standing, grant.held) == (Standing.RESUME, b"\x01")
    a.delivers([1])
    b.pushes(12)
    assert [chunk["a", 1] for chunk in stage.counted()] == [1, 1]


def test_frozen_parameters_come_from_the_checkpoint() -> None:
    frozen = TensorEntry("table", (CHUNK_ELEMENTS,), "float32", Kind.FROZEN)
    trained = TensorEntry("weight", (CHUNK_ELEMENTS,), "float32", Kind.TRAINABLE)
    crashed = Stage(a_config(1, save_dir="run"), Manifest((trained, frozen)))
    (a,) = crashed.joined("a")
    a.pushes(1)
    stage = crashed.restarted()
    fresh = stage.worker("new").joins()
    a = stage.worker("a").comes_with(ahead(crashed.holdings(), f0=1))
    assert a.asked_for == [0]
    a.seeds()
    assert stage.version(1) == crashed.version(1)
    fresh.pulls(fragment=1)
    assert {chunk.fragment for chunk, _ in fresh.chunks} == {1}


def test_counters_that_are_shown_begin_together_with_the_broker() -> None:
    """A checkpoint has the run's totals, but not how often work was refused for which reason."""
    crashed = a_saved_run("a", "b", rounds=3)
    assert crashed.shown()["totals"]["contributions"] == 6
    after = crashed.restarted()
    assert after.state.totals.contributions == 6
    shown = after.shown()["totals"]
    assert shown.pop("refused") == {}
    assert set(shown.values()) == {0}


# Whatever a checkpoint contains belongs to one moment: a run goes on from it as if never killed.

WORKERS = ("a", "b", "c")
FRAGMENTS = {"num_fragments": 2, "sync_every": 8}
ALL_MODES: dict[str, dict[str, Any]] = {
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
KILLED_AFTER, VERSIONS = 3, 9
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


def told(stage: Stage) -> Progress:
    """How far the run is, as readers are told, but for times."""
    progress: Progress = stage.state.versions.progress
    return replace(progress, seconds=0)


def norms(stage: Stage) -> dict[str, dict[int, float]]:
    return {member.worker_id: member.figures.norms for member in stage.state.members}


@pytest.mark.parametrize("durable", [False, True], ids=["usual", "durable"])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_run_reports_the_same_after_a_kill(mode: str, durable: bool) -> None:
    options: dict[str, Any] = {"save_dir": "run", "durable": durable, "heartbeat_timeout": 0.0}
    whole = a_stage(workers=len(WORKERS), chunks=2, **options, **ALL_MODES[mode])
    whole.joined(*WORKERS)
    crashed, came = [], []
    for number in range(VERSIONS):
        makes_a_version(whole, number)
        if number < KILLED_AFTER:
            # Killed when the checkpoint has just been asked for: a durable version waits for it.
            crashed.append((whole.checkpoints[-1], whole.holdings()))
        is_written(whole)
        came.append((counted(whole), told(whole), len(whole.reports)))
    assert came[-1][0][0]["rounds"] == sum(whole.counters) == VERSIONS
    for last, (saved, held) in enumerate(crashed):
        stage = whole.restarted(saved)
        for name in WORKERS:
            stage.worker(name).comes_with(held)
        stage.passes(0.2)
        assert stage.round.number == last + 1
        assert (counted(stage), told(stage)) == came[last][:2]
        for number in range(last + 1, VERSIONS):
            makes_a_version(stage, number)
            is_written(stage)
        assert counted(stage) == counted(whole)
        assert shown(stage.reports) == shown(whole.reports[came[last][2] :])
        assert norms(stage) == norms(whole)
