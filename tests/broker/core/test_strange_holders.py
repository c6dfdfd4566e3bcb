"""Workers that claim to hold what cannot be, before there are parameters: the run begins whole."""

from __future__ import annotations

import pytest

from diloco_protocol.messages import Error, Welcome
from diloco_protocol.version import VersionId
from kit.core_harness import RUN, Stage, a_stage

HELD = VersionId(RUN, 7, 77)


def a_broker_without_parameters() -> Stage:
    return a_stage(workers=2, num_fragments=2, sync_every=8)


def is_whole(stage: Stage) -> bool:
    return all(each.version is not None for each in stage.state.versions.trained)


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
    assert stage.state.round is not None and is_whole(stage)


def test_part_of_a_run_is_taken_once_and_a_new_run_begins_with_another_worker() -> None:
    stage = a_broker_without_parameters()
    stage.worker("b").joins()
    c = stage.worker("c").joins(versions=(None, HELD))
    c.held = (None, None)
    stage.passes(30.0)
    assert stage.state.seeding.worker_id == "c"
    c.stage.kicks("c")
    c.session = None
    c.joins(versions=(None, None, HELD))  # the run has no such fragment
    stage.passes(11.0)
    assert stage.state.seeding.worker_id == "b"
    stage.provide()
    assert stage.state.round is not None and is_whole(stage)


@pytest.mark.parametrize(
    "unsound", [VersionId("\x1b[2J", 1, 1), VersionId("", 1, 1), VersionId(RUN, 2**63, 1)]
)
def test_name_that_no_version_has_is_refused(unsound: VersionId) -> None:
    stage = a_broker_without_parameters()
    a = stage.worker("a").joins(versions=(unsound, None))
    assert a.last(Welcome) is None and a.got(Error)
    assert stage.state.model.run is None and not len(stage.here)
