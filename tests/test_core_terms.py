"""What a worker may have for itself, and what it is refused; in the core alone."""

from __future__ import annotations

from typing import Any

import pytest
from stage import Stage, a_stage

from diloco_broker.feed import EventLog, LoopFigures, snapshot
from diloco_protocol.messages import Welcome


def steps_shown(stage: Stage) -> dict[str, int]:
    """H of each worker, as displays show it."""
    figures = LoopFigures("tcp://x:1", 0.0, 0.0, 0)
    workers = snapshot(stage.state, EventLog(), figures, 1, stage.now)["workers"]
    return {worker["id"]: worker["sync_every"] for worker in workers}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_worker_may_have_a_smaller_h_of_its_own(mode: str) -> None:
    fields: dict[str, Any] = {"num_fragments": 2, "fragment_sync_delay": 3}
    stage = a_stage(workers=2, mode=mode, sync_every=100, **fields)
    a = stage.worker("a").joins(wants={"sync_every": 8})
    assert a.last(Welcome) is not None
    stage.worker("b").joins()
    assert steps_shown(stage) == {"a": 8, "b": 100}
    c = stage.worker("c").joins(wants={"sync_every": 7})
    assert "sync_every=7" in c.error().text
    assert "at least 8" in c.error().text


def test_larger_h_is_refused_where_the_others_would_wait() -> None:
    stage = a_stage(workers=2, sync_every=100)
    a = stage.worker("a").joins(wants={"sync_every": 101})
    assert "sync_every=101, the run has sync_every=100" in a.error().text
    assert "the others would wait" in a.error().text
    free = a_stage(workers=2, mode="async", sync_every=100)
    assert free.worker("a").joins(wants={"sync_every": 101}).last(Welcome) is not None
    assert steps_shown(free) == {"a": 101}


@pytest.mark.parametrize("asked", [0, -1, 2.5, True, "8", 1e300])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_h_that_is_no_number_of_steps_is_refused(mode: str, asked: Any) -> None:
    stage = a_stage(workers=2, mode=mode, sync_every=100)
    assert stage.worker("a").joins(wants={"sync_every": asked}).error().code == "config_differs"


def test_shorter_cycle_that_counts_like_a_whole_one_gets_a_word() -> None:
    stage = a_stage(workers=2, sync_every=100)
    a = stage.worker("a").joins(wants={"sync_every": 40})
    (said,) = [text for text in stage.logs if "--weight-by" in text]
    assert "a makes 40 steps a cycle, the run has 100" in said
    a.loses_connection()
    a.joins(wants={"sync_every": 40}, session=a.session)
    assert len([text for text in stage.logs if "--weight-by" in text]) == 1
    weighed = a_stage(workers=2, sync_every=100, weight_by="tokens")
    weighed.worker("a").joins(wants={"sync_every": 40})
    assert not [text for text in weighed.logs if "--weight-by" in text]
