"""Each worker has a share of the data for itself, and keeps it while others come and go."""

from __future__ import annotations

from diloco_protocol.messages import Welcome
from kit.core_harness import Stage, a_run, a_stage


def share(stage: Stage, worker_id: str) -> tuple[int | None, int | None]:
    welcome = stage.puppets[worker_id].got(Welcome)
    return welcome.shard, welcome.num_shards


def test_workers_get_the_lowest_free_slots_of_as_many_as_the_run_is_planned_for() -> None:
    stage = a_stage(3)
    stage.joined("a", "b")
    assert [share(stage, "a"), share(stage, "b")] == [(0, 3), (1, 3)]


def test_a_worker_that_was_away_has_its_own_slot_again() -> None:
    stage, (a, _) = a_run("a", "b", min_workers=1)
    a.dies()
    stage.joined("a")
    assert share(stage, "a") == (0, 2)


def test_a_newcomer_takes_the_slot_of_who_has_been_away_longest() -> None:
    stage, (a, b, _) = a_run("a", "b", "c", min_workers=1)
    b.dies()
    a.dies()
    stage.joined("d", "e")
    assert [share(stage, "d"), share(stage, "e")] == [(1, 3), (0, 3)]


def test_one_more_than_planned_gets_a_slot_of_its_own_while_all_are_here() -> None:
    stage, _ = a_run("a", "b")
    stage.joined("c")
    assert share(stage, "c") == (2, 3)


def test_slots_are_the_same_after_a_restart_whoever_comes_first() -> None:
    stage, _ = a_run("a", "b", save_dir="run")
    held = stage.holdings()
    later = stage.restarted()
    later.worker("b").comes_with(held)
    later.worker("a").comes_with(held)
    assert [share(later, "a"), share(later, "b")] == [(0, 2), (1, 2)]
