"""Rounds, in the core alone: who is waited for, what is counted, what a death changes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from diloco_broker.core.effects import Finish
from diloco_broker.core.events import Stop
from diloco_broker.core.rounds.uploads import FIRST_WINDOW, UPLOAD_WINDOW
from diloco_protocol import messages
from diloco_protocol.version import VersionId
from kit.core_harness import Puppet, Stage, a_run, a_stage, alone

two = partial(a_run, "a", "b", rounds=0, chunks=3)


def contents(stage: Stage) -> list[str]:
    """The pushes in each chunk of the current version: "a1 b2" has one of each of two workers."""
    return [
        " ".join(sorted(f"{name}{push_id}" for name, push_id in chunk.elements()))
        for chunk in stage.counted()
    ]


def test_newcomer_is_expected_from_the_next_round_otherwise_and_counts_in_this_one() -> None:
    stage = a_stage(workers=1)
    stage.joined("a")
    (b,) = stage.joined("b")
    assert b.got(messages.Welcome).first_round == 1
    b.pushes(5)
    assert stage.version().counter == 0
    stage.pushes(a=1)
    assert contents(stage)[0] == "a1 b5"
    assert stage.expected == {"a", "b"}


@pytest.mark.parametrize(("goes", "deaths"), [(Puppet.dies, 1), (Puppet.leaves, 0)])
def test_round_closes_when_the_last_expected_worker_goes(
    goes: Callable[[Puppet], None], deaths: int
) -> None:
    stage, (a, b) = two()
    stage.pushes(a=1, b=2)
    a.pulls()
    a.pushes(3)
    goes(b)
    assert stage.version().counter == 2
    assert stage.shown()["totals"]["deaths"] == deaths


def test_missing_chunk_keeps_its_value() -> None:
    stage, (a, b) = two(chunks=2)
    for worker in (a, b):
        worker.begins(1)
        worker.delivers([0])
    a.dies()
    b.dies()
    assert [step.weight for step in stage.tensors.steps] == [2.0, 0.0]
    assert stage.version().counter == 1


def test_push_offered_again_resumes_at_the_missing_chunks_and_each_counts_once() -> None:
    stage, a = alone()
    a.begins(1)
    a.delivers([0, 0, 2, 0])
    a.loses_connection()
    a.joins()
    grant = a.offers(1)
    assert (grant.standing, grant.held) == (messages.Standing.RESUME, bytes([0b101]))
    a.delivers([2, 1])
    assert contents(stage) == ["a1"] * 3


def test_another_push_id_abandons_the_unfinished_push() -> None:
    stage, (a, b) = two()
    a.begins(1)
    a.delivers([0])
    a.pushes(2)
    a.begins(1)
    assert a.error().code == "bad_push"
    b.pushes(3)
    assert contents(stage) == ["a1 b3", "a2 b3", "a2 b3"]
    assert stage.reports[-1].averaged == 2


@pytest.mark.parametrize("is_folded", [True, False])
def test_worker_killed_in_its_upload_has_one_vote_on_each_chunk(is_folded: bool) -> None:
    stage, (a, b) = two(by_hand=not is_folded)
    a.begins(1)
    a.delivers([0, 2])
    a.dies()
    a = stage.worker("a").joins()
    grant = a.offers(2)  # the next incarnation makes the same steps again
    assert (grant.standing, grant.held) == (messages.Standing.RESUME, bytes([0b101]))
    a.delivers([1])
    b.pushes(3)
    stage.work()
    assert contents(stage) == ["a1 b3", "a2 b3", "a1 b3"]
    ledger = stage.ledger
    assert ledger.names_whole("a", 2) and not ledger.names_whole("a", 1)
    added = {each.push.push_id: list(each.added) for each in stage.audits[-1].pushes}
    assert added == {1: [0, 2], 2: [1], 3: [0, 1, 2]}


def test_received_push_that_is_not_added_yet_is_the_vote_of_its_worker() -> None:
    stage, (a, b) = two(by_hand=True)
    a.begins(1)
    a.delivers([0, 1, 2])
    a.dies()
    assert stage.worker("a").joins().offers(2).standing is messages.Standing.WAIT
    b.pushes(3)
    stage.work()
    assert contents(stage) == ["a1 b3"] * 3


def test_chunk_of_an_abandoned_push_that_was_under_way_is_ignored() -> None:
    stage, (a, b) = two()
    a.begins(1)
    b.begins(3)
    a.begins(2)  # the round is closing: this one waits
    a.push_id = 1
    a.delivers([0])
    b.delivers([0, 1, 2])
    assert contents(stage) == ["b3"] * 3
    assert not a.all(messages.Error)


def test_second_complete_push_of_a_worker_waits_for_the_next_round() -> None:
    stage, (a, b) = two()
    a.pushes(1)
    assert a.offers(2).standing is messages.Standing.WAIT
    b.pushes(3)
    assert stage.version().counter == 1
    assert a.got(messages.Grant).standing is messages.Standing.NEW
    a.delivers([0, 1, 2])
    b.pulls()
    b.pushes(4)
    assert contents(stage)[0] == "a1 a2 b3 b4"


def test_chunks_are_handed_out_while_later_ones_still_arrive() -> None:
    stage, (a, b) = two()
    a.pulls(after=0)
    already = len(a.chunks)
    a.begins(1)
    b.begins(2)
    a.delivers([0])
    b.delivers([0])
    assert [chunk.index for chunk, _ in a.chunks[already:]] == [0]
    assert stage.version().counter == 0, "the version is not whole yet"
    assert all(m.version.counter == 0 for m in a.all(messages.Released))
    a.delivers([1, 2])
    b.delivers([1, 2])
    assert a.holds() == stage.version()


def test_worker_of_a_refused_push_learns_which_chunks_of_its_pushes_count() -> None:
    """The refusal says which may count, the ledger which did: each chunk counts of one of two pushes."""
    stage, (a, _) = two()
    a.begins(1)
    a.delivers([0, 2])
    a.delivers([1], is_finite=False)
    assert a.error().counted == b"\x05"
    assert a.offers(11).held == b"\x05"
    a.delivers([1])
    stage.pushes(b=2)
    assert contents(stage) == ["a1 b2", "a11 b2", "a1 b2"]
    ledger = stage.ledger
    for push_id, own in ((1, [0, 2]), (11, [1]), (2, [0, 1, 2])):
        worker_id = "b" if push_id == 2 else "a"
        assert list(ledger.own_chunks(worker_id, push_id, 3)) == own
    assert ledger.names_whole("a", 11)


@pytest.mark.parametrize(
    "fields",
    [
        {"weight": float("nan")},
        {"weight": 0.0},
        {"weight": 5e-324},
        {"weight": 1e308},
        {"fragment": 5},
        {"wire_dtype": "int3"},
        {"base": None},
        {"base": VersionId("f" * 16, 0, 1)},
    ],
    ids=str,
)
def test_bad_push_is_refused_and_changes_nothing(fields: dict[str, Any]) -> None:
    stage, a = alone()
    a.begins(9, **fields)
    assert (a.error().code, a.error().push_id) == ("bad_push", 9)
    a.pushes(1)
    assert contents(stage) == ["a1"] * 3


def test_chunk_of_a_wrong_length_or_place_is_refused_and_changes_nothing() -> None:
    stage, a = alone()
    a.begins(1)
    a.delivers([0], size=12)
    a.delivers([7])
    a.fragment = 3
    a.delivers([0])
    assert [error.code for error in a.all(messages.Error)] == ["bad_chunk"] * 3
    a.fragment = 0
    a.delivers([0, 1, 2])
    assert contents(stage) == ["a1"] * 3


def test_chunk_without_credit_is_refused() -> None:
    stage, a = alone(chunks=20, by_hand=True)
    credit = a.offers(1).credit
    a.delivers(range(credit))
    assert not a.all(messages.Error)
    a.delivers([credit])
    assert len(a.all(messages.Error)) == 1
    stage.work(1)
    a.delivers([credit])
    assert len(a.all(messages.Error)) == 1


def on_top(worker: Puppet) -> list[int]:
    """What each acknowledgement of pushes 1 and 2 gave besides the credit of its chunks."""
    return [ack.credit for ack in worker.all(messages.Ack) if ack.push_id in (1, 2)]


def test_window_is_doubled_where_chunks_never_wait_and_the_next_push_begins_with_it() -> None:
    stage, a = alone(chunks=60)
    assert a.offers(1).credit == FIRST_WINDOW == 6
    a.delivers(range(6))
    assert on_top(a) == [0, 0, 0, 0, 0, 6]
    a.delivers(range(6, 18))
    assert on_top(a)[6:] == [0] * 11 + [UPLOAD_WINDOW - 12]
    a.delivers(range(18, 60))
    assert on_top(a)[18:] == [0] * 42
    assert a.offers(2).credit == UPLOAD_WINDOW
    a.delivers(range(60))
    assert on_top(a)[60:] == [0] * 60
    assert contents(stage) == ["a1 a2"] * 60


def test_window_does_not_grow_while_any_chunk_waits() -> None:
    stage = a_stage(workers=3, chunks=60, by_hand=True)
    a, b, _ = stage.joined("a", "b", "c")
    a.begins(1)
    b.begins(1)
    b.delivers(range(2))
    for index in range(30):
        a.delivers([index])
        stage.tensors.queue.rotate(1)  # the last comes first, so those of b wait all the time
        stage.work(1)
    assert on_top(a) == [0] * 30
    stage.work()
    a.delivers(range(30, 36))
    stage.work()
    assert sum(on_top(a)) == 0, "five of the six had to wait for another"


def test_stop_finishes_a_closing_round_and_tells_the_workers() -> None:
    stage, (a, b) = two()
    a.pushes(1)
    b.begins(2)
    stage.happens(Stop("it was asked to"))
    assert not stage.finishes
    b.delivers([0, 1, 2])
    assert stage.finishes == [Finish(None)]
    assert stage.version().counter == 1
    assert "shutdown" in a.notices
    late = stage.worker("c").joins()
    assert (late.error().code, late.error().retry) == ("stopping", True)


@pytest.mark.parametrize(("restarting", "what"), [(False, "shutdown"), (True, "restarting")])
def test_worker_that_rejoins_a_stopping_broker_is_told(restarting: bool, what: str) -> None:
    """Its connection had broken when the others were told."""
    stage, (a, b) = two(disconnect_grace=9.0)
    a.pushes(1)
    b.begins(2)
    a.loses_connection()
    stage.happens(Stop("it was asked to", restarting=restarting))
    a.joins()
    assert a.error().code == "stopping"
    assert [notice.what for notice in a.all(messages.Notice)] == [what]


def test_stop_waits_for_a_closing_round_for_five_seconds() -> None:
    stage, (a, b) = two(save_dir="folder")
    a.pushes(1)
    b.begins(2)
    stage.happens(Stop("it was asked to"))
    stage.passes(4.9)
    assert not stage.finishes
    stage.passes(0.2)
    assert stage.finishes == [Finish(None)], "half a version is not saved"


@pytest.mark.parametrize("pushes", [{"a": 1, "b": 2}, {}, {"a": 1}], ids=["lacks", "has", "open"])
def test_stop_abandons_an_open_round_and_saves_what_is_not_saved(pushes: dict[str, int]) -> None:
    stage, *_ = two(save_dir="folder", save_every=5)
    stage.is_saved()
    stage.pushes(**pushes)
    stage.happens(Stop("it was asked to"))
    (finish,) = stage.finishes
    assert (finish.save.number if finish.save else None) == (1 if "b" in pushes else None)
    assert stage.version().counter == int("b" in pushes)
    assert stage.saves == [0]


@pytest.mark.parametrize(
    "is_dead", [False, True], ids=["killed and started again", "dead for a while"]
)
def test_new_push_enters_the_round_once_what_came_of_an_earlier_one_is_void(is_dead: bool) -> None:
    """All of the earlier one was received, and not inspected yet: the new one was to wait."""
    stage = a_stage(2, chunks=2, min_workers=2)
    a, b = stage.joined("a", "b")
    stage.by_hand = True
    a.begins(11)
    a.delivers(range(2), is_finite=False)
    if is_dead:
        a.dies()
        a.joins(session=None)
    else:
        a.joins()
    assert a.offers(12).standing is messages.Standing.WAIT
    stage.by_hand = False
    stage.work()
    assert a.got(messages.Grant).standing in (messages.Standing.NEW, messages.Standing.RESUME)
    a.completes()
    b.pushes(21)
    assert stage.version().counter == 1
    assert all(chunk["a", 12] == chunk["b", 21] == 1 for chunk in stage.counted())
