"""Fragments in the core: one sequence of rounds, each with the versions of its own fragment."""

from functools import partial
from typing import Any

import pytest

from diloco_protocol import messages
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from kit import core_harness
from kit.core_harness import a_stage

a_run = partial(core_harness.a_run, rounds=0, num_fragments=3, sync_every=12)


def test_push_before_its_round_waits_and_is_told_its_number() -> None:
    stage, (a, b) = a_run("a", "b")
    a.pushes(1, fragment=0)
    grant = a.offers(2, fragment=1)
    assert (grant.standing, grant.round) == (messages.Standing.WAIT, 1)
    a.begins(3, fragment=2)
    grant = a.offers(9, fragment=0)
    assert (grant.standing, grant.round) == (messages.Standing.WAIT, 3)
    b.pushes(4, fragment=0)
    numbers = [(g.push_id, g.standing, g.round) for g in a.all(messages.Grant) if g.push_id < 9]
    assert numbers == [
        (1, messages.Standing.NEW, 0),
        (2, messages.Standing.WAIT, 1),
        (3, messages.Standing.WAIT, 2),
        (2, messages.Standing.NEW, 1),
    ]
    assert stage.round.number == 1


def test_joiner_is_told_its_first_round_and_the_plan() -> None:
    stage, (a, b) = a_run("a", "b")
    for number in range(4):
        a.pushes(10 + number, fragment=number % 3)
        b.pushes(50 + number, fragment=number % 3)
    late = stage.worker("c").joins()
    welcome = late.got(messages.Welcome)
    assert (welcome.config, welcome.epoch) == (stage.config.run_config, stage.state.epoch)
    assert (welcome.first_round, welcome.plan) == (5, (0, 1, 2))
    assert [v.counter for v in welcome.versions if v] == [2, 1, 1]
    stage.pushes(1, a=80, b=81)
    assert stage.expected == {"a", "b", "c"}
    assert stage.round.number == 5


def test_version_of_one_fragment_is_pulled_while_another_is_being_made() -> None:
    _, (a, b) = a_run("a", "b")
    a.pushes(1, fragment=0)
    b.begins(2, fragment=0)
    b.delivers([0])
    a.sends(messages.Pull(1, -1, a.token()))
    a.sends(messages.Pull(0, 0, a.token()))
    assert a.got(messages.Released).fragment == 1
    b.completes(1)
    released = a.got(messages.Released)
    assert (released.fragment, released.version.counter) == (0, 1)


def test_model_with_too_few_tensors_for_the_fragments_is_refused_with_both_numbers() -> None:
    stage = a_stage(workers=1, num_fragments=3, sync_every=12)
    stage.manifest = Manifest(
        tuple(TensorEntry(name, (4,), "float32", Kind.TRAINABLE) for name in ("a", "b"))
    )
    error = stage.worker("a").joins().error()
    assert (error.code, "3" in error.text, "2" in error.text) == ("model_differs", True, True)


@pytest.mark.parametrize("how", [{}, {"deterministic": True}], ids=["streaming", "staged"])
def test_round_that_falls_below_its_floor_needs_late_joiners(how: dict[str, Any]) -> None:
    stage, (_, b) = a_run("a", "b", num_fragments=2, **how)
    (c,) = stage.joined("c")
    assert c.got(messages.Welcome).first_round == 1
    b.dies()
    assert stage.expected == {"a", "c"}
    assert c.last(messages.Rejoin) is not None
    c.joins()
    assert c.got(messages.Welcome).first_round == 0
    stage.pushes(0, a=1, c=2)
    assert stage.round.number == 1


def test_feed_shows_how_long_after_its_slot_each_worker_merges() -> None:
    stage, (a, b, _) = a_run("a", "b", "c")
    for worker, told in ((a, 2), (b, 3), (a, None)):
        worker.sends(messages.Heartbeat(worker.token(), 5, merge_delay=told))
    shown = stage.shown()
    assert [each["merge_delay"] for each in shown["workers"]] == [2, 3, None]
    assert (shown["fragment_delay_auto"], shown["fragment_max_delay"]) == (True, 4)
    assert shown["fragment_sync_delay"] == 0
