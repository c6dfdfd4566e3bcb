"""What a broker that came back does once it has its parameters: rounds, optimizer, counters."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_broker.core.effects import ForgetBuffer
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.messages import Standing
from kit.core_harness import Held, Stage, a_config, a_round, a_stage
from kit.noted_tensors import CHUNK_ELEMENTS
from kit.restarts import MODES, a_saved_run, ahead, next_life

# The first round of the new life.


def test_first_round_waits_for_all_workers_and_then_goes_on_with_those_that_came() -> None:
    crashed = a_saved_run("a", "b", "c", rounds=1)
    stage, (a, b) = next_life(crashed, "a", "b", recover_wait=5.0)
    stage.passes(5.2)
    assert stage.round.number == 1
    a_round([a, b], 1)
    assert stage.version().counter == 2
    assert stage.reports[-1].averaged == 2


def test_workers_that_left_before_the_checkpoint_are_not_waited_for() -> None:
    crashed = a_saved_run("a", "b", "c")
    a, b, c = (crashed.puppets[name] for name in "abc")
    a_round([a, b, c], 0)
    c.leaves()
    a_round([a, b], 1)
    stage, (a, b) = next_life(crashed, "a", "b")
    stage.passes(0.2)
    a_round([a, b], 2)
    assert stage.version().counter == 3, "all that the checkpoint knows are back: no wait"


def test_round_one_waits_for_all_workers_after_a_restart_too() -> None:
    """The first checkpoint has the parameters of the first worker: no worker has trained."""
    crashed = a_stage(workers=2, chunks=2, save_dir="run")
    crashed.joined("a")
    assert crashed.saves == [0]
    stage, (a,) = next_life(crashed, "a", recover_wait=2.0)
    stage.passes(5.0)
    a.pushes(1)
    stage.passes(5.0)
    assert stage.version().counter == 0
    stage.worker("b").joins().pushes(2)
    assert stage.version().counter == 1


def test_floor_of_the_run_holds_after_a_restart() -> None:
    crashed = a_saved_run("a", "b", "c", rounds=1, min_workers=2)
    stage, (a,) = next_life(crashed, "a", recover_wait=5.0)
    stage.passes(5.2)
    a.pushes(11)
    for _ in range(5):
        a.beats()
        stage.passes(20.0)
    assert stage.version().counter == 1
    b = stage.worker("b").comes_with(crashed.holdings())
    b.pushes(12)
    assert stage.version().counter == 2


# Deltas of the life before.


@pytest.mark.parametrize("mode", MODES)
def test_delta_frozen_for_another_wire_dtype_counts_after_the_restart(mode: str) -> None:
    crashed = a_saved_run("a", "b", rounds=1, **MODES[mode])
    stage, (a, b) = next_life(crashed, "a", "b", wire_dtype="bf16")
    a.pushes(11, wire_dtype="fp32")
    b.begins(12, wire_dtype="bf16")
    b.delivers([0, 1], size=2 * CHUNK_ELEMENTS)
    b.commits()
    assert stage.shown()["totals"]["rejected"] == 0
    assert [(chunk["a", 11], chunk["b", 12]) for chunk in stage.counted()] == [(1, 1), (1, 1)]


# What the outer optimizer remembers.


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("lost", [1, 2, 3, 5])
@pytest.mark.parametrize("had", [1, 2, 3, 4])
def test_buffer_is_thrown_away_exactly_when_it_was_applied_in_what_is_adopted(
    had: int, lost: int, size: int
) -> None:
    crashed = a_saved_run("a", rounds=had, outer="dn", dn_buffer=size)
    stage = crashed.restarted()
    a = stage.worker("a").comes_with(ahead(crashed.holdings(), f0=lost))
    a.donates()
    crossed = any(count % size == 0 for count in range(had + 1, had + lost + 1))
    assert (stage.tensors.reverted == [ForgetBuffer(0)]) == crossed
    assert bool(stage.tensors.reverted) == crossed
    assert stage.shown()["fragments"][0]["gradients"] == had + lost
    a.pushes(999, base=stage.version())
    assert stage.tensors.steps[-1].count == had + lost


def test_buffer_of_a_fragment_that_nobody_has_newer_is_kept() -> None:
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
    a.donates(1)
    assert stage.tensors.reverted == [ForgetBuffer(1)]


@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_counts_the_gradients_of_the_versions_in_it_and_no_more(mode: str) -> None:
    """Whatever the next round has begun with by the time the checkpoint is taken."""
    crashed = a_saved_run("a", "b", pieces=2, **MODES[mode])
    crashed.by_hand = True
    for puppet in crashed.puppets.values():
        for fragment in range(2):
            grant = puppet.offers(10 + fragment, fragment=fragment)
            if grant.standing is Standing.NEW:
                puppet.completes()
    while crashed.tensors.queue:
        crashed.work()
    assert crashed.saves, "a round has closed"
    for saved in crashed.checkpoints:
        for each in saved.record.fragments.values():
            made = each.version.counter  # one gradient for each version, in all these modes
            assert each.gradients == made, f"checkpoint {saved.number}"


def test_what_was_recovered_and_what_was_lost_is_said() -> None:
    crashed = a_saved_run("a", "b", rounds=4, pieces=2)
    held = crashed.holdings()
    stage = crashed.restarted()
    a = stage.worker("a").comes_with(ahead(held, f0=1))
    b = stage.worker("b").comes_with(ahead(held, f1=2))
    a.donates(0)
    b.donates(1)
    assert stage.said("a is ahead", "fragment 0") and stage.said("b is ahead", "fragment 1")
    assert stage.said("lost", "1 of fragment 0")
    assert stage.said("lost", "2 of fragment 1")


# What goes on.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("adopts", [False, True])
def test_contribution_counts_exactly_once_across_a_restart(mode: str, adopts: bool) -> None:
    """Two are in the checkpoint, one is in what a worker has newer, one is in neither."""
    crashed = a_saved_run("a", "b", workers=1, **MODES[mode])
    a, b = (crashed.puppets[name] for name in "ab")
    a.pushes(1)
    b.pushes(2)
    b.pushes(12)
    a.pushes(11)
    saved = crashed.checkpoints[-1]
    assert saved.number == crashed.round.number
    crashed.pushes(a=21, b=22)
    newer = crashed.holdings()
    assert newer[0] is not None
    assert newer[0].version.counter > saved.record.fragments[0].version.counter
    stage = crashed.restarted(saved)
    older = tuple(
        Held(each.version, each.ledger, tuple(saved.tensors[fragment].chunks))  # type: ignore[arg-type]
        for fragment, each in saved.record.fragments.items()
    )
    b = stage.worker("b").comes_with(older)
    a = stage.worker("a").comes_with(newer if adopts else older)
    if adopts:
        a.donates()
    # Everything is offered again, as after a lost answer.
    for puppet, offers in ((a, (1, 11, 21)), (b, (2, 12, 22))):
        for push_id in offers:
            grant = puppet.offers(push_id)
            is_there = adopts or push_id < 20
            assert (grant.standing is Standing.COUNTED) == is_there, push_id
    if not adopts:
        a.pushes(21)
        b.pushes(22)
    everything = {("a", 1), ("b", 2), ("b", 12), ("a", 11), ("a", 21), ("b", 22)}
    for chunk in stage.counted():
        assert dict(chunk) == dict.fromkeys(everything, 1)


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
    a.donates()
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
