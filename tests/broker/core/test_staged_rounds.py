"""Rounds over whole submissions: quorum, grace, late work, the order of merging."""

from collections.abc import Callable
from typing import Any

import pytest

from diloco_protocol.messages import Grant, Notice, Released, Standing
from kit.core_harness import Puppet, Stage, a_stage, alone


def three(**fields: Any) -> tuple[Stage, Puppet]:
    """A run of a, b and c past round one, in which all took part, and c."""
    stage = a_stage(workers=3, **{"quorum": 2, "grace": 5.0, **fields})
    puppets = stage.joined("a", "b", "c")
    stage.pushes(a=100, b=101, c=102)
    for puppet in puppets:
        puppet.pulls()
    assert stage.round.number == 1
    return stage, puppets[2]


def closes_with(stage: Stage) -> str:
    """Who is in the round once a and b have pushed."""
    stage.pushes(a=1, b=2)
    return stage.merged[-1]


def test_round_one_waits_for_all_workers_whatever_the_quorum() -> None:
    stage = a_stage(workers=3, quorum=2, grace=1.0)
    stage.joined("a", "b", "c")
    stage.pushes(a=1, b=2)
    stage.passes(10.0)
    assert stage.round.number == 0


def test_round_closes_when_the_grace_that_begins_with_the_quorum_is_over() -> None:
    stage, _ = three()
    stage.pushes(a=1)
    stage.passes(20.0)
    stage.pushes(b=2)
    stage.passes(4.5)
    assert stage.round.number == 1
    stage.passes(1.0)
    assert stage.round.number == 2
    assert stage.merged[-1] == "ab"


@pytest.mark.parametrize("after", [0.0, 3.0])
def test_what_arrives_within_the_grace_counts_and_the_last_closes_the_round(after: float) -> None:
    stage, _ = three()
    stage.pushes(b=1, a=2)
    stage.passes(after)
    stage.pushes(c=3)
    assert stage.round.number == 2
    assert stage.merged[-1] == "abc"


def test_quorum_is_capped_by_those_alive_and_never_below_the_floor() -> None:
    stage, c = three(quorum=3, min_workers=2)
    stage.pushes(a=1, b=2)
    stage.passes(60.0)
    stage.beats("a", "b", "c")
    assert stage.round.number == 1
    c.dies()
    assert stage.round.number == 2
    stage.puppets["b"].dies()
    stage.puppets["a"].pulls()
    stage.pushes(a=4)
    stage.passes(60.0)
    assert stage.round.number == 2, "one worker is below the floor of two"


def test_late_push_is_deferred_to_the_next_round_with_its_weight() -> None:
    stage, c = three()
    stage.pushes(a=1, b=2)
    c.begins(3, weight=7.0)
    c.delivers([0])
    stage.passes(6.0)
    assert stage.round.number == 2
    assert [n.round for n in c.all(Notice) if n.what == "deferred"] == [2]
    c.completes(1, 2)
    for name in "ab":
        stage.puppets[name].pulls()
    stage.pushes(a=4, b=5)
    assert stage.merged[-1] == "abc"
    assert [p.weight for p in stage.tensors.merges[-1].groups[0]] == [1.0, 1.0, 7.0]
    assert all(chunk["c", 3] == 1 for chunk in stage.counted())


def test_push_that_begins_after_its_round_closed_goes_into_the_open_one() -> None:
    stage, c = three()
    stage.pushes(a=1, b=2)
    stage.passes(6.0)
    grant = c.offers(3)
    assert (grant.standing, grant.round) == (Standing.NEW, 2)
    assert stage.row("c")["round"] == 2


def test_late_push_under_way_or_offered_later_is_dropped_and_its_worker_told() -> None:
    stage, c = three(late="drop")
    stage.pushes(a=1, b=2)
    c.begins(3)
    c.delivers([0, 1])
    stage.passes(6.0)
    error = c.error()
    assert (error.code, error.push_id, error.retry) == ("late", 3, False)
    c.completes(2)
    assert stage.round.number == 2
    assert not stage.round.pool
    before = c.all(Grant)
    c.begins(5)  # before a byte of it is sent
    assert (c.error().code, c.error().push_id) == ("late", 5)
    assert c.all(Grant) == before
    c.pulls()
    c.pushes(4)
    assert ("c", 4) in stage.round.pool


def is_whole_and_dies(c: Puppet) -> None:
    c.pushes(3)
    c.dies()


def dies_half_way(c: Puppet) -> None:
    c.begins(3)
    c.delivers([0, 1])
    c.dies()
    assert not c.stage.round.pool


def comes_back_with_the_missing_chunk(c: Puppet) -> None:
    c.begins(3)
    c.delivers([0, 2])
    c.loses_connection()
    c.joins()
    grant = c.offers(3)
    assert (grant.standing, grant.held) == (Standing.RESUME, b"\x05")
    c.completes(1)


def commits_before_its_chunks(c: Puppet) -> None:
    c.begins(3)
    c.commits()
    c.delivers([0, 1, 2])


def sends_some_of_it_twice(c: Puppet) -> None:
    c.pushes(3)
    c.completes(0, 1)
    c.begins(3)


def abandons_another_one_for_it(c: Puppet) -> None:
    c.begins(9)
    c.delivers([0, 1])
    c.begins(3)
    assert set(c.stage.round.pool) == {("c", 3)}
    c.completes()


@pytest.mark.parametrize(
    ("happens", "who"),
    [
        (is_whole_and_dies, "abc"),
        (dies_half_way, "ab"),
        (comes_back_with_the_missing_chunk, "abc"),
        (commits_before_its_chunks, "abc"),
        (sends_some_of_it_twice, "abc"),
        (abandons_another_one_for_it, "abc"),
    ],
)
def test_complete_push_counts_once(happens: Callable[[Puppet], None], who: str) -> None:
    stage, c = three()
    happens(c)
    assert closes_with(stage) == who
    for chunk in stage.counted():
        assert (chunk["c", 3], chunk["c", 9]) == (int("c" in who), 0)


def test_chunks_without_a_commit_do_not_count() -> None:
    stage, c = three()
    c.begins(3)
    c.delivers([0, 1, 2])
    stage.pushes(a=1, b=2)
    stage.passes(1.0)
    assert stage.round.number == 1
    c.commits()
    assert stage.merged[-1] == "abc"


def test_non_finite_chunk_voids_its_push_and_the_round_closes_without_it() -> None:
    stage, c = three()
    c.begins(3)
    c.delivers([0])
    c.delivers([1], is_finite=False)
    assert c.error().code == "non_finite"
    assert not stage.round.pool
    assert closes_with(stage) == "ab"
    for name in "ca":
        stage.puppets[name].pulls()
    stage.pushes(c=4, a=5)
    stage.passes(1.0)
    assert stage.round.number == 2, "in the next round it is waited for again"


def test_second_complete_push_of_a_worker_is_for_the_next_round() -> None:
    stage, c = three()
    c.pushes(3)
    grant = c.offers(4)
    assert (grant.standing, grant.round) == (Standing.WAIT, 2)
    assert closes_with(stage) == "abc"
    grant = c.got(Grant)
    assert (grant.standing, grant.push_id, grant.round) == (Standing.NEW, 4, 2)
    assert c.offers(3).standing is Standing.COUNTED


def test_inspection_of_an_earlier_incarnation_of_a_push_is_not_taken_for_this_one() -> None:
    stage, c = three()
    stage.by_hand = True
    c.begins(3)
    c.delivers([0])
    c.dies()
    c.joins(session=None)
    c.begins(3)
    stage.work()
    (submission,) = stage.round.pool.values()
    assert submission.squares == 0.0
    stage.by_hand = False
    c.completes()
    assert submission.squares == 3.0
    assert closes_with(stage) == "abc"


def test_push_that_waited_is_forgotten_once_a_newer_one_is_taken() -> None:
    stage, a = alone(deterministic=True)
    a.pulls(after=0)
    stage.by_hand = True
    a.pushes(1)
    stage.work(3)
    a.begins(2)
    a.begins(3)
    stage.by_hand = False
    stage.work()
    a.completes()
    assert [n for n in stage.counted()[0] if n[1] == 2] == []
    assert stage.counted()[0]["a", 3] == 1


@pytest.mark.parametrize(
    "how", [{}, {"deterministic": True}, {"quorum": 2}], ids=["streaming", "ordered", "quorum"]
)
def test_refused_push_does_not_hold_the_others_up(how: dict[str, Any]) -> None:
    stage = a_stage(workers=2, weight_by="tokens", **how)
    a, b = stage.joined("a", "b")
    a.pushes(1, tokens=10)
    b.begins(2)
    assert b.error().code == "bad_push"
    stage.passes(1.0)
    assert stage.round.missing == set()
    assert stage.round.number == 0, "round one needs both"
    b.pushes(3, tokens=5)
    assert stage.round.number == 1
    for puppet in (a, b):
        puppet.pulls(after=0)
    a.pushes(4, tokens=10)
    b.begins(5)
    assert stage.round.number == 2
    assert stage.reports[-1].averaged == 1


@pytest.mark.parametrize("order", ["bca", "acb", "cab"])
def test_deterministic_rounds_merge_in_the_order_of_worker_ids(order: str) -> None:
    stage = a_stage(workers=3, deterministic=True)
    puppets = stage.joined("b", "c", "a")
    stage.pushes(**{name: push_id for push_id, name in enumerate(order, start=1)})
    assert stage.merged == ["abc"]
    assert all(r.averaged == 3 for p in puppets for r in p.all(Released) if r.version.counter == 1)
    first, *others = stage.tensors.merges
    assert all(merge.wholes is first.wholes for merge in others), "made as they are needed"


def test_norm_of_the_push_goes_with_each_of_its_chunks() -> None:
    stage = a_stage(workers=2, aggregate="clip-median-norm")
    a, b = stage.joined("a", "b")
    a.pushes(1, squares=3.0)
    b.pushes(2, squares=12.0)
    assert [[p.norm for p in m.groups[0]] for m in stage.tensors.merges] == [[3.0, 6.0]] * 3


@pytest.mark.parametrize(
    ("by", "told", "weights"),
    [
        ("tokens", ({"tokens": 300}, {"tokens": 100}), [300.0, 100.0]),
        ("samples", ({"samples": 300}, {"samples": 100}), [300.0, 100.0]),
        (
            "tokens2-per-step",
            ({"tokens": 300, "steps": 30}, {"tokens": 10**9, "steps": 500}),
            [3000.0, 2e15],
        ),
    ],
)
def test_contributions_weigh_by_what_they_report(
    by: str, told: tuple[dict[str, int], ...], weights: list[float]
) -> None:
    stage = a_stage(workers=2, deterministic=True, weight_by=by)
    a, b = stage.joined("a", "b")
    a.pushes(1, **told[0])
    b.pushes(2, **told[1])
    assert [p.weight for p in stage.tensors.merges[0].groups[0]] == weights
    assert stage.reports[-1].weight == sum(weights)


@pytest.mark.parametrize("lacks", ["tokens", "steps"])
def test_push_without_tokens_or_steps_has_no_weight_by_both(lacks: str) -> None:
    stage = a_stage(workers=1, weight_by="tokens2-per-step")
    (a,) = stage.joined("a")
    a.begins(1, **{"tokens": 64, "steps": 4} | {lacks: 0})
    assert a.error().code == "bad_push"
    assert f"reports 0 {lacks}" in a.error().text
    a.pushes(2, tokens=64, steps=4)
    assert stage.reports[-1].weight == 1024.0
