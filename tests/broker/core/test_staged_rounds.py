"""Rounds over whole submissions: quorum, grace, late work, the order of merging."""

from __future__ import annotations

import pytest

from diloco_protocol.messages import Error, Grant, Notice, Released, Standing
from kit.core_harness import Puppet, Stage, a_stage


def ids(stage: Stage) -> list[list[str]]:
    """Workers in each merge of chunk 0, in the order in which they are added."""
    return [
        [part.worker_id for group in merge.groups for part in group]
        for merge in stage.tensors.merges
        if merge.index == 0
    ]


def three(**fields: object) -> tuple[Stage, list[Puppet]]:
    """A run of three workers past round one, in which all took part."""
    stage = a_stage(workers=3, **{"quorum": 2, "grace": 5.0, **fields})  # type: ignore[arg-type]
    puppets = stage.joined("a", "b", "c")
    for number, puppet in enumerate(puppets):
        puppet.pushes(100 + number)
    for puppet in puppets:
        puppet.pulls()
    assert stage.round.number == 1
    return stage, puppets


def test_round_one_waits_for_all_workers_whatever_the_quorum() -> None:
    stage = a_stage(workers=3, quorum=2, grace=1.0)
    a, b, _ = stage.joined("a", "b", "c")
    a.pushes(1)
    b.pushes(2)
    stage.passes(10.0)
    assert stage.round.number == 0


def test_round_closes_when_the_grace_after_the_quorum_is_over() -> None:
    stage, (a, b, _) = three()
    a.pushes(1)
    b.pushes(2)
    stage.passes(4.5)
    assert stage.round.number == 1
    stage.passes(1.0)
    assert stage.round.number == 2
    assert ids(stage)[-1] == ["a", "b"]


def test_round_closes_at_once_when_everyone_is_in() -> None:
    stage, (a, b, c) = three()
    for push_id, puppet in enumerate((c, a, b)):
        puppet.pushes(push_id + 1)
    assert stage.round.number == 2
    assert ids(stage)[-1] == ["a", "b", "c"]


def test_what_arrives_within_the_grace_counts_too() -> None:
    stage, (a, b, c) = three()
    a.pushes(1)
    b.pushes(2)
    stage.passes(3.0)
    c.pushes(3)
    assert ids(stage)[-1] == ["a", "b", "c"]


def test_grace_begins_with_the_quorum_and_not_with_the_first() -> None:
    stage, (a, b, _) = three()
    a.pushes(1)
    stage.passes(20.0)
    b.pushes(2)
    stage.passes(4.5)
    assert stage.round.number == 1


def test_late_push_is_carried_into_the_next_round_with_its_weight() -> None:
    stage, (a, b, c) = three()
    a.pushes(1)
    b.pushes(2)
    c.begins(3, weight=7.0)
    c.delivers([0])
    stage.passes(6.0)
    assert stage.round.number == 2
    assert [n.round for n in c.all(Notice) if n.what == "carried"] == [2]
    c.delivers([1, 2])
    c.commits()
    a.pulls()
    a.pushes(4)
    b.pulls()
    b.pushes(5)
    assert ids(stage)[-1] == ["a", "b", "c"]
    assert [p.weight for p in stage.tensors.merges[-1].groups[0]] == [1.0, 1.0, 7.0]
    assert all(chunk["c", 3] == 1 for chunk in stage.counted())


def test_push_that_begins_after_its_round_closed_goes_into_the_open_one() -> None:
    stage, (a, b, c) = three()
    a.pushes(1)
    b.pushes(2)
    stage.passes(6.0)
    grant = c.begins(3)
    assert grant is not None
    assert (grant.standing, grant.round) == (Standing.NEW, 2)
    assert stage.state.members.named("c").figures.last_round == 2


def test_late_push_under_way_is_dropped_and_its_worker_told() -> None:
    stage, (a, b, c) = three(late="drop")
    a.pushes(1)
    b.pushes(2)
    c.begins(3)
    c.delivers([0, 1])
    stage.passes(6.0)
    error = c.error()
    assert (error.code, error.push_id, error.retry) == ("late", 3, False)
    assert "Round 1 closed without c" in error.text
    c.delivers([2])
    c.commits()
    assert stage.round.number == 2
    assert not stage.round.pool


def test_late_push_that_begins_after_its_round_is_refused_before_a_byte_is_sent() -> None:
    stage, (a, b, c) = three(late="drop")
    a.pushes(1)
    b.pushes(2)
    stage.passes(6.0)
    before = c.all(Grant)
    c.begins(3)
    assert c.error().code == "late"
    assert c.all(Grant) == before
    c.pulls()
    c.pushes(4)
    assert ("c", 4) in stage.round.pool


def test_quorum_is_capped_by_those_alive_and_never_below_the_floor() -> None:
    stage, (a, b, c) = three(quorum=3, min_workers=2)
    a.pushes(1)
    b.pushes(2)
    stage.passes(60.0)
    for puppet in (a, b, c):
        puppet.beats()
    assert stage.round.number == 1
    c.dies()
    assert stage.round.number == 2
    b.dies()
    a.pulls()
    a.pushes(4)
    stage.passes(60.0)
    assert stage.round.number == 2, "one worker is below the floor of two"


def test_whole_submission_counts_although_its_worker_died_a_second_later() -> None:
    stage, (a, b, c) = three()
    c.pushes(3)
    c.dies()
    a.pushes(1)
    b.pushes(2)
    assert ids(stage)[-1] == ["a", "b", "c"]


def test_unfinished_submission_of_a_dead_worker_is_forgotten() -> None:
    stage, (a, b, c) = three()
    c.begins(3)
    c.delivers([0, 1])
    c.dies()
    assert not stage.round.pool
    a.pushes(1)
    b.pushes(2)
    assert ids(stage)[-1] == ["a", "b"]


def test_connection_that_broke_resumes_at_the_missing_chunks() -> None:
    stage, (a, b, c) = three()
    c.begins(3)
    c.delivers([0, 2])
    c.loses_connection()
    c.joins()
    grant = c.begins(3)
    assert grant is not None
    assert grant.standing is Standing.RESUME
    assert grant.held == b"\x05"
    c.delivers([1])
    c.commits()
    a.pushes(1)
    b.pushes(2)
    assert ids(stage)[-1] == ["a", "b", "c"]


def test_chunks_without_a_commit_do_not_count() -> None:
    stage, (a, b, c) = three()
    c.begins(3)
    c.delivers([0, 1, 2])
    a.pushes(1)
    b.pushes(2)
    stage.passes(1.0)
    assert stage.round.number == 1
    c.commits()
    assert ids(stage)[-1] == ["a", "b", "c"]


def test_commit_may_overtake_the_chunks() -> None:
    stage, (a, b, c) = three()
    c.begins(3)
    c.commits()
    c.delivers([0, 1, 2])
    a.pushes(1)
    b.pushes(2)
    assert ids(stage)[-1] == ["a", "b", "c"]


def test_non_finite_chunk_voids_the_whole_submission_and_nobody_waits_for_it() -> None:
    stage, (a, b, c) = three()
    c.begins(3)
    c.delivers([0])
    c.delivers([1], is_finite=False)
    assert c.error().code == "non_finite"
    assert not stage.round.pool
    a.pushes(1)
    b.pushes(2)
    assert ids(stage)[-1] == ["a", "b"]
    c.pulls()
    c.pushes(4)
    a.pulls()
    a.pushes(5)
    stage.passes(1.0)
    assert stage.round.number == 2, "in the next round it is waited for again"


def test_another_push_id_abandons_the_unfinished_submission() -> None:
    stage, (a, b, c) = three()
    c.begins(3)
    c.delivers([0, 1])
    c.begins(4)
    assert set(stage.round.pool) == {("c", 4)}
    c.delivers([0, 1, 2])
    c.commits()
    a.pushes(1)
    b.pushes(2)
    assert all(chunk["c", 4] == 1 and not chunk["c", 3] for chunk in stage.counted())


def test_second_whole_submission_of_a_worker_is_for_the_next_round() -> None:
    stage, (a, b, c) = three()
    c.pushes(3)
    grant = c.begins(4)
    assert grant is not None
    assert (grant.standing, grant.round) == (Standing.WAIT, 2)
    a.pushes(1)
    b.pushes(2)
    assert ids(stage)[-1] == ["a", "b", "c"]
    grant = c.last(Grant)
    assert grant is not None
    assert (grant.standing, grant.push_id, grant.round) == (Standing.NEW, 4, 2)


def test_duplicate_chunks_and_commits_change_nothing() -> None:
    stage, (a, b, c) = three()
    c.pushes(3)
    c.delivers([0, 1])
    c.commits()
    c.begins(3)
    a.pushes(1)
    b.pushes(2)
    assert all(chunk["c", 3] == 1 for chunk in stage.counted())


def test_push_in_a_version_is_answered_with_counted() -> None:
    _, (a, b, c) = three()
    for push_id, puppet in enumerate((a, b, c)):
        puppet.pushes(push_id + 1)
    grant = c.begins(3)
    assert grant is not None
    assert grant.standing is Standing.COUNTED


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_deterministic_rounds_merge_in_the_order_of_worker_ids(order: tuple[int, ...]) -> None:
    stage = a_stage(workers=3, deterministic=True)
    puppets = stage.joined("b", "c", "a")
    for index in order:
        puppets[index].pushes(index + 1)
    assert ids(stage) == [["a", "b", "c"]]
    assert all(r.averaged == 3 for p in puppets for r in p.all(Released) if r.version.counter == 1)


def test_deterministic_round_waits_for_whole_submissions() -> None:
    stage = a_stage(workers=2, deterministic=True)
    a, b = stage.joined("a", "b")
    a.pushes(1)
    b.begins(2)
    b.delivers([0, 1])
    stage.passes(60.0)
    assert not stage.tensors.merges
    b.delivers([2])
    b.commits()
    assert ids(stage) == [["a", "b"]]


def test_norm_of_the_whole_submission_goes_with_each_of_its_chunks() -> None:
    stage = a_stage(workers=2, aggregate="clip-median-norm")
    a, b = stage.joined("a", "b")
    a.pushes(1, squares=3.0)
    b.pushes(2, squares=12.0)
    assert [[p.norm for p in m.groups[0]] for m in stage.tensors.merges] == [[3.0, 6.0]] * 3


@pytest.mark.parametrize(
    ("options", "why"),
    [({"quorum": 1}, "--quorum"), ({"aggregate": "clip-median-norm"}, "--aggregate clip-median")],
)
def test_log_says_what_keeping_whole_submissions_costs(
    options: dict[str, object], why: str
) -> None:
    stage = a_stage(workers=2, **options)  # type: ignore[arg-type]
    stage.joined("a")
    (said,) = [line for line in stage.logs if "whole submissions" in line]
    assert said.startswith(why)
    assert "2 workers x 0.0 kB" in said


@pytest.mark.parametrize("by", ["tokens", "samples"])
def test_contributions_weigh_by_what_they_report(by: str) -> None:
    stage = a_stage(workers=2, deterministic=True, weight_by=by)
    a, b = stage.joined("a", "b")
    a.pushes(1, **{by: 300})
    b.pushes(2, **{by: 100})
    assert [p.weight for p in stage.tensors.merges[0].groups[0]] == [300.0, 100.0]
    assert stage.state.last_report.weight == 400.0


def test_inspection_of_an_earlier_life_of_a_push_is_not_taken_for_this_one() -> None:
    stage, (a, b, c) = three()
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
    c.delivers([0, 1, 2])
    c.commits()
    assert submission.squares == 3.0
    a.pushes(1)
    b.pushes(2)
    assert ids(stage)[-1] == ["a", "b", "c"]


def test_push_that_waited_is_forgotten_once_a_newer_one_is_taken() -> None:
    stage = a_stage(workers=1, deterministic=True)
    (a,) = stage.joined("a")
    a.pulls(after=0)
    stage.by_hand = True
    a.pushes(1)
    stage.work(3)
    a.begins(2)
    a.begins(3)
    stage.by_hand = False
    stage.work()
    a.delivers([0, 1, 2])
    a.commits()
    assert [n for n in stage.counted()[0] if n[1] == 2] == []
    assert stage.counted()[0]["a", 3] == 1


@pytest.mark.parametrize(
    "how", [{}, {"deterministic": True}, {"quorum": 2}], ids=["streaming", "ordered", "quorum"]
)
def test_refused_push_does_not_hold_the_others_up(how: dict[str, object]) -> None:
    stage = a_stage(workers=2, weight_by="tokens", **how)  # type: ignore[arg-type]
    a, b = stage.joined("a", "b")
    a.pushes(1, tokens=10)
    assert stage.round.number == 0
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
    assert stage.state.last_report.averaged == 1


def test_closing_a_round_of_many_workers_makes_parts_only_as_they_are_needed() -> None:
    stage = a_stage(workers=3, deterministic=True)
    puppets = stage.joined("a", "b", "c")
    for number, puppet in enumerate(puppets):
        puppet.pushes(number + 1)
    first, *others = stage.tensors.merges
    assert all(merge.wholes is first.wholes for merge in others)


def test_commit_for_a_fragment_that_does_not_exist_leaves_no_trace() -> None:
    stage, (a, *_) = three()
    before = len(stage.state.submissions.pools)
    for fragment in range(50, 100):
        a.fragment = fragment
        a.commits()
    assert len(stage.state.submissions.pools) == before


def test_push_without_the_count_it_weighs_by_is_refused_with_what_to_call() -> None:
    stage = a_stage(workers=1, weight_by="tokens")
    (a,) = stage.joined("a")
    a.begins(1)
    assert a.last(Error) is not None
    assert "report(tokens=...)" in a.error().text
