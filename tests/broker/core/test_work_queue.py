"""Units of a data set: each goes to one worker in an epoch, and is in the global parameters once."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from diloco_broker.core.data import data_sets, units
from diloco_broker.core.data.data_sets import DataSet
from diloco_protocol.data.spans import Spans
from diloco_protocol.messages import Error, Lot, Result, Standing, Take
from kit.core_harness import a_run, a_stage
from kit.unit_workers import NAME, UnitWorker, a_unit_round, free, times_contained


def a_pair(**options: object) -> tuple[UnitWorker, UnitWorker]:
    stage = a_stage(2, 2, min_workers=1, **options)  # type: ignore[arg-type]
    first = UnitWorker(stage, "a", pulls=False)
    second = UnitWorker(stage, "b")
    first.puppet.pulls()
    return first, second


def test_units_are_handed_out_in_order_and_count_with_their_version() -> None:
    a, b = a_pair()
    a.takes(3)
    b.takes(1)
    assert (a.in_hand, b.in_hand) == ([0, 1, 2], [3])
    a.trains()
    a.begins(1)
    a.completes()
    assert shown(a)["counted"] == 0
    b.begins(2)
    b.completes()
    assert shown(a)["counted"] == 3, "b has not trained on its own"
    assert a.stage.state.data.sets[NAME].oldest == 3


def shown(worker: UnitWorker) -> dict[str, Any]:
    """What displays show of the data set."""
    (row,) = worker.stage.shown()["data_sets"]
    return dict(row)


def is_dead(a: UnitWorker, _: UnitWorker) -> None:
    a.puppet.dies()


def is_dead_after_a_part_of_its_push(a: UnitWorker, b: UnitWorker) -> None:
    a.begins(1)
    a.puppet.delivers([0])
    a.puppet.dies()
    b.begins(2)
    b.completes()


def has_its_push_refused(a: UnitWorker, _: UnitWorker) -> None:
    a.begins(1)
    a.blunders()


@pytest.mark.parametrize("event", [is_dead, is_dead_after_a_part_of_its_push, has_its_push_refused])
def test_lost_units_go_out_last(event: Callable[[UnitWorker, UnitWorker], None]) -> None:
    a, b = a_pair()
    a.takes(3)
    a.trains()
    event(a, b)
    assert free(a.stage) == Spans((0, 3))
    b.takes(9)
    assert b.in_hand == [0, 1, *range(3, 10)]


def test_complete_push_counts_though_its_worker_died() -> None:
    a, b = a_pair()
    a.takes(3)
    a.trains()
    a.begins(1)
    a.completes()
    a.puppet.dies()
    assert not free(a.stage)
    b.begins(2)
    b.completes()
    assert shown(a)["counted"] == 3


def test_worker_that_was_away_keeps_units_not_given_to_others() -> None:
    a, b = a_pair()
    a.takes(3)
    a.trains()
    a.puppet.dies()
    b.takes(7)  # the rest of the epoch: returned units go out last
    a.comes_to(a.stage)
    assert not free(a.stage)
    a.begins(1)
    a.completes()
    b.trains()
    b.begins(2)
    b.completes()
    assert times_contained(a.stage, [a, b]) == dict.fromkeys(range(10), 1)


def test_units_of_a_counted_push_are_not_checked() -> None:
    _, (a,) = a_run("a")
    a.pushes(71)
    grant = a.offers(71, lots=(Lot((71,), {"no such data": (0, 3)}),))
    assert grant.standing is Standing.COUNTED


def test_the_next_epoch_begins_when_nothing_of_this_one_is_free() -> None:
    a, b = a_pair()
    a.takes(8)
    b.takes(4)
    assert b.in_hand == [8, 9, 10, 11]
    a.puppet.dies()
    b.takes(7)
    assert b.in_hand[4:] == list(range(12, 19)), "the epoch that has begun goes out first"
    b.takes(30)
    assert b.in_hand[11:] == [*range(8), 19]


def test_end_of_a_data_set_is_told_when_all_units_count() -> None:
    a, b = a_pair()
    a_unit_round([a, b], 1, 10)
    answer = a.takes(1)
    assert answer is not None and answer.data == {"units": (), "is_over": True}


@pytest.mark.parametrize(
    "fields",
    [
        {"size": 11},
        {"epochs": 3},
        {"seed": 1},
        {"holds": (3, 1)},
        {"name": "", "size": 1},
        {"name": "other", "size": 0},
        {"name": "other", "size": 1, "epochs": -1},
    ],
)
def test_impossible_data_set_is_refused(fields: dict[str, object]) -> None:
    a, _ = a_pair()
    a.takes(1)
    before = shown(a)["held"]
    asked: dict[str, object] = {"name": NAME, "size": 10, "epochs": 2, **fields}
    a.puppet.sends(Take(a.puppet.token(), 99, **asked))  # type: ignore[arg-type]
    result = a.puppet.got(Result)
    assert (result.request, result.ok) == (99, False)
    assert shown(a)["held"] == before


def test_a_push_cannot_name_units_of_another_worker_or_data_set() -> None:
    a, b = a_pair()
    a.takes(3)
    b.puppet.begins(5, lots=(Lot((5,), {NAME: (0, 1)}),))
    assert b.puppet.got(Error).code == "stale"
    b.puppet.begins(6, lots=(Lot((5,), {NAME: (4, 5)}),))
    assert b.puppet.got(Error).code == "bad_push"
    b.puppet.begins(7, lots=(Lot((7,), {"photos": (0, 1)}),))
    assert (b.puppet.got(Error).code, "photos" in b.puppet.got(Error).text) == ("stale", True)


def test_units_that_two_pushes_of_a_worker_name_count_with_the_first() -> None:
    a, b = a_pair()
    a.takes(2)
    b.takes(1)
    for push_id in (1, 2):
        a.puppet.begins(push_id, lots=(Lot((push_id,), {NAME: (0, 2)}),))
    a.puppet.completes()
    b.trains()
    b.begins(3)
    b.completes()
    assert shown(a)["counted"] == 3, "two of these, and one of b"


def test_number_of_data_sets_is_bounded() -> None:
    a, _ = a_pair()
    for number in range(70):
        a.puppet.sends(Take(a.puppet.token(), number, f"set {number}", 5))
    assert not a.puppet.got(Result).ok and "64" in a.puppet.got(Result).text
    assert len(a.stage.shown()["data_sets"]) == 64


FEW, WORKERS = 4, ("a", "b")
REQUESTS = st.tuples(
    st.sampled_from(WORKERS),
    st.sampled_from(["takes", "counts", "stands for"]),
    st.integers(-20, 20),  # the first ticket, from the one that goes out next
    st.integers(2, FEW),  # rows
    st.integers(1, 3),  # tickets in each, and between them
)


@patch.multiple(data_sets, MOST_RANGES=FEW, MOST_FREE_RANGES=2 * FEW)
@settings(max_examples=15)
@given(requests=st.lists(REQUESTS, min_size=40, max_size=60))
def test_few_ranges_of_units_lie_free(requests: list[tuple[str, str, int, int, int]]) -> None:
    data = DataSet(10_000, 0, None)
    for who, what, first, rows, length in requests:
        start = max(0, data.next + first)
        some = Spans(*((start + 2 * i * length, start + (2 * i + 1) * length) for i in range(rows)))
        if what == "takes":
            data.take(who, rows)
        elif what == "counts":
            data.count(who, some)
        else:
            data.give_back(who, data.of(who) - some)
            data.claim(who, some)
            assert data.of(who) == some & data.of(who)
        data.check_invariants()
        assert data.free.ranges <= 2 * FEW * (1 + len(WORKERS)) + 2 * FEW * len(WORKERS)


def test_rows_of_units_under_way_are_bounded() -> None:
    a, _ = a_pair()
    a.takes(10)
    with patch.object(units, "MOST_ROWS", 2):
        a.puppet.begins(5, lots=(Lot((5,), {NAME: (0, 1, 2, 3)}), Lot((5,), {NAME: (4, 5)})))
        assert a.puppet.got(Error).push_id == 5
        a.puppet.begins(6, lots=(Lot((6,), {NAME: (0, 1, 2, 3)}),))
    assert [lot.push.push_id for lot in a.stage.state.data.lots["a"]] == [6]
