"""Whose parameters a run begins with.

A run that exists comes before a new one, and a seed worker that is slow is better than none.
"""

from typing import Any

import pytest

from diloco_broker.core.members.seeding import RETURN_WITHIN_S
from diloco_broker.core.members.start import SEED_PATIENCE_S
from diloco_broker.core.versions.record import InitialModel
from diloco_protocol.messages import Error, Push, Welcome
from diloco_protocol.version import VersionId
from diloco_worker.session.connection import LONGEST_BACKOFF_S
from kit.core_harness import RUN, Stage, a_stage, layered
from kit.restarts import holding

# Where workers of an earlier incarnation of the broker look for it.
KNOWN = "tcp://127.0.0.1:8512"


def a_broker(workers: int = 1, **options: Any) -> Stage:
    """One without a checkpoint, at an address that workers know, started a moment ago."""
    return a_stage(workers, chunks=2, **{"bind": KNOWN, **options})


def with_a_file(workers: int = 1, *, by_hand: bool = False, bind: str = KNOWN) -> Stage:
    config = a_broker(workers, bind=bind).config
    return Stage(config, layered(1, 2), by_hand, initial=InitialModel({"layers.0.weight": (8,)}))


@pytest.mark.parametrize("has_file", [False, True])
def test_newcomer_does_not_replace_a_run_whose_holder_returns(has_file: bool) -> None:
    stage = with_a_file() if has_file else a_broker()
    new = stage.worker("new").joins()
    stage.passes(LONGEST_BACKOFF_S + 0.5)
    assert not new.asked_for
    a = stage.worker("a").comes_with(holding(10))
    assert (a.asked_for, new.asked_for) == ([0], [])
    a.seeds()
    assert stage.version() == VersionId(RUN, 10, 5_010)
    new.pulls()
    assert new.holds() == stage.version()


def test_longest_back_off_and_joining_fit_into_the_time_that_is_given() -> None:
    assert RETURN_WITHIN_S >= LONGEST_BACKOFF_S + 0.5


@pytest.mark.parametrize("has_file", [False, True])
def test_new_run_begins_once_no_holder_can_be_returning(has_file: bool) -> None:
    stage = with_a_file() if has_file else a_broker()
    new = stage.worker("new").joins()
    assert stage.shown()["waiting_for"]
    stage.passes(RETURN_WITHIN_S + 0.1)
    assert (new.asked_for == [0]) is not has_file
    stage.provide()
    assert stage.round.number == 0


@pytest.mark.parametrize("are_missing", [False, True])
def test_new_run_waits_for_its_workers_no_longer_than_recover_wait(are_missing: bool) -> None:
    stage = a_broker(workers=3, recover_wait=8.0)
    first, _ = stage.worker("a").joins(), stage.worker("b").joins()
    assert "3 workers" in stage.shown()["waiting_for"]
    stage.passes(7.8)
    assert not first.asked_for, "a holder's return would have come"
    if are_missing:
        stage.passes(0.3)
    else:
        stage.worker("c").joins()
    assert first.asked_for == [0]


@pytest.mark.parametrize("options", [{"recover_wait": 0.0}, {"bind": "tcp://127.0.0.1:0"}], ids=str)
def test_run_begins_at_once_where_no_holder_can_return(options: dict[str, Any]) -> None:
    stage = a_broker(**options)
    assert stage.worker("new").joins().asked_for == [0]


def test_holder_that_comes_while_the_model_file_is_loaded_comes_first() -> None:
    stage = with_a_file(by_hand=True, bind="tcp://127.0.0.1:*")
    stage.worker("new").joins()
    stage.work(1)
    a = stage.worker("a").comes_with(holding(10))
    assert a.asked_for == [0]
    a.seeds()
    stage.work()
    assert stage.version() == VersionId(RUN, 10, 5_010)
    assert [chunk["lost", 10] for chunk in stage.counted()] == [1, 1]


@pytest.mark.parametrize("is_back", [True, False])
def test_holder_whose_connection_broke_is_given_recover_wait_to_come_back(is_back: bool) -> None:
    stage = a_broker(recover_wait=10.0)
    stage.passes(RETURN_WITHIN_S)
    a = stage.worker("a").comes_with(holding(10))
    a.seeds(indexes=[0])
    new = stage.worker("new").joins()
    a.dies()
    assert "a" not in stage.here
    stage.passes_with(8, "new")
    assert not new.asked_for
    if is_back:
        stage.worker("a").comes_with(holding(10)).seeds()
    else:
        stage.passes_with(4, "new")
        stage.provide()
    assert (stage.version().run == RUN) == is_back


def test_feed_names_the_source_of_the_first_parameters() -> None:
    stage = with_a_file(by_hand=True)
    assert "join" in stage.shown()["waiting_for"]
    stage.worker("new").joins()
    assert "earlier run" in stage.shown()["waiting_for"]
    assert stage.shown()["why"]["left_s"] == RETURN_WITHIN_S
    stage.passes(RETURN_WITHIN_S + 0.1)
    assert stage.shown()["why"]["left_s"] is None
    assert "file" in stage.shown()["waiting_for"]
    stage.worker("gpu-0").comes_with(holding(10))
    assert "gpu-0" in stage.shown()["waiting_for"]


def test_seed_worker_without_another_that_pauses_half_way_loses_nothing_of_it() -> None:
    stage = a_stage(workers=1, chunks=2)
    a = stage.worker("a").joins()
    a.seeds(indexes=[0])
    stage.passes_with(round(5 * SEED_PATIENCE_S), "a")
    a.seeds(indexes=[1])
    assert stage.version().counter == 0


def test_slow_seed_worker_is_told_that_another_one_is_asked_and_may_be_asked_again() -> None:
    stage = a_stage(workers=2, chunks=2)
    a, b = stage.worker("a").joins(), stage.worker("b").joins()
    a.seeds(indexes=[0])
    stage.passes_with(round(SEED_PATIENCE_S + 1), "a", "b")
    error = a.got(Error)
    assert (error.push_id, error.retry) == (a.push_id, False)
    assert b.asked_for == [0]
    a.seeds(indexes=[])
    assert (a.error().code, a.error().about) == ("not_allowed", Push.kind)
    b.leaves()
    assert a.asked_for == [0, 0]
    a.seeds()
    assert stage.version().counter == 0


def test_seed_workers_that_are_all_slow_are_asked_again_with_more_patience() -> None:
    """Copying takes each of them longer than the first patience, and shorter than the second."""
    stage = a_stage(workers=2, chunks=2)
    a, b = stage.worker("a").joins(), stage.worker("b").joins()
    stage.passes_with(round(2 * SEED_PATIENCE_S + 2), "a", "b")
    assert (a.asked_for, b.asked_for) == ([0], [0])
    stage.passes_with(round(SEED_PATIENCE_S * 1.5), "a", "b")
    b.seeds()
    assert stage.version().counter == 0


def test_seed_worker_with_values_that_are_not_finite_is_asked_again_once_it_rejoins() -> None:
    stage = a_stage(workers=1, chunks=2)
    a = stage.worker("a").joins()
    a.seeds(is_finite=False)
    stage.passes_with(round(2 * SEED_PATIENCE_S), "a")
    assert a.asked_for == [0], "not while it is the same"
    a.loses_connection()
    a.joins()
    assert a.asked_for == [0]
    a.seeds()
    assert stage.version().counter == 0


# Workers that claim to hold what cannot be: the run begins with all of its fragments.

HELD = VersionId(RUN, 7, 77)


def a_broker_without_parameters() -> Stage:
    return a_stage(workers=2, num_fragments=2, sync_every=8)


def test_holder_that_comes_back_with_nothing_does_not_begin_a_run_with_a_part() -> None:
    stage = a_broker_without_parameters()
    b, c = stage.worker("b").joins(), stage.worker("c")
    c.joins(versions=(None, HELD))
    stage.passes(30.0)
    assert c.asked_for == [1]
    c.joins(versions=())
    stage.provide()
    stage.passes(0.2)
    b.pulls()
    assert (stage.counters, stage.round.number) == ([0, 0], 0)


def test_part_of_a_run_is_taken_once_and_a_new_run_begins_with_another_worker() -> None:
    stage = a_broker_without_parameters()
    b = stage.worker("b").joins()
    c = stage.worker("c").joins(versions=(None, HELD))
    c.held = (None, None)
    stage.passes(30.0)
    assert c.asked_for == [1]
    asked = len(b.asked_for)
    stage.kicks("c")
    c.session = None
    c.joins(versions=(None, None, HELD))  # the run has no such fragment
    stage.passes(11.0)
    assert len(b.asked_for) > asked
    stage.provide()
    assert (stage.counters, stage.round.number) == ([0, 0], 0)


@pytest.mark.parametrize(
    "unsound", [VersionId("\x1b[2J", 1, 1), VersionId("", 1, 1), VersionId(RUN, 2**63, 1)]
)
def test_name_that_no_version_has_is_refused(unsound: VersionId) -> None:
    stage = a_broker_without_parameters()
    a = stage.worker("a").joins(versions=(unsound, None))
    assert a.last(Welcome) is None and a.got(Error)
    assert stage.shown()["run"] is None and not stage.here
