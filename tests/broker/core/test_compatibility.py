"""What a worker may have for itself, and what it is refused; in the core alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import Error, Notice, Welcome
from kit.core_harness import Stage, a_stage, alone, layered


def steps_shown(stage: Stage) -> dict[str, int]:
    """H of each worker, as displays show it."""
    return {worker["id"]: worker["sync_every"] for worker in stage.shown()["workers"]}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_worker_may_have_a_smaller_h_of_its_own(mode: str) -> None:
    fields: dict[str, Any] = {"num_fragments": 2, "fragment_sync_delay": 3}
    stage = a_stage(workers=2, mode=mode, sync_every=100, **fields)
    a = stage.worker("a").joins(wants={"sync_every": 8})
    assert a.last(Welcome) is not None
    stage.worker("b").joins()
    assert steps_shown(stage) == {"a": 8, "b": 100}
    c = stage.worker("c").joins(wants={"sync_every": 7})
    assert c.error().code == "config_differs"


def test_larger_h_is_refused_where_the_others_would_wait() -> None:
    stage = a_stage(workers=2, sync_every=100)
    a = stage.worker("a").joins(wants={"sync_every": 101})
    assert a.error().code == "config_differs"
    assert "101" in a.error().text and "100" in a.error().text
    free = a_stage(workers=2, mode="async", sync_every=100)
    assert free.worker("a").joins(wants={"sync_every": 101}).last(Welcome) is not None
    assert steps_shown(free) == {"a": 101}


@pytest.mark.parametrize("asked", [0, -1, 2.5, True, "8", 1e300, 2**62])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_h_that_is_no_number_of_steps_is_refused(mode: str, asked: Any) -> None:
    stage = a_stage(workers=2, mode=mode, sync_every=100)
    assert stage.worker("a").joins(wants={"sync_every": asked}).error().code == "config_differs"


def test_shorter_cycle_that_counts_like_a_whole_one_gets_a_word() -> None:
    stage = a_stage(workers=2, sync_every=100)
    a = stage.worker("a").joins(wants={"sync_every": 40})
    (said,) = stage.said("--weight-by")
    assert "40" in said and "100" in said
    a.loses_connection()
    a.joins(wants={"sync_every": 40}, session=a.session)
    assert len(stage.said("--weight-by")) == 1
    weighed = a_stage(workers=2, sync_every=100, weight_by="tokens")
    weighed.worker("a").joins(wants={"sync_every": 40})
    assert not weighed.said("--weight-by")


# H and the floor are changed while the run goes on.


def test_new_h_is_told_to_every_worker_and_to_those_who_join() -> None:
    stage = a_stage(workers=2, sync_every=100)
    stage.worker("own").joins(wants={"sync_every": 40})
    a = stage.worker("a").joins()
    stage.provide()
    result = stage.asks("set", sync_every=60)
    assert result.ok and "own" in result.text
    told = [notice.sync_every for notice in a.all(Notice) if notice.what == "sync_every"]
    assert told == [60]
    welcome = stage.worker("late").joins().last(Welcome)
    assert welcome is not None and welcome.config.sync_every == 60
    assert steps_shown(stage) == {"own": 40, "a": 60, "late": 60}
    stage.asks("set", sync_every=20)
    assert steps_shown(stage)["own"] == 20, "the others would wait for it"


def test_worker_whose_h_became_the_larger_one_may_come_back() -> None:
    stage, a = alone(sync_every=100)
    a.loses_connection()
    a.joins(wants={"sync_every": 80})
    stage.asks("set", sync_every=50)
    a.loses_connection()
    a.joins(wants={"sync_every": 80})
    assert a.last(Error) is None
    assert steps_shown(stage) == {"a": 50}


def test_floor_that_is_lowered_lets_the_open_round_close() -> None:
    stage = a_stage(workers=3, min_workers=3)
    a, b, c = stage.joined("a", "b", "c")
    for number, puppet in enumerate((a, b, c), start=1):
        puppet.pushes(number)
    assert stage.version().counter == 1
    c.dies()
    stage.pushes(a=11, b=12)
    assert stage.version().counter == 1, "two are too few"
    assert stage.asks("set", min_workers=2).ok
    assert stage.version().counter == 2
    assert not stage.asks("set", min_workers=4).ok, "more than --workers"


def test_floor_that_is_raised_holds_from_the_open_round_on() -> None:
    stage = a_stage(workers=2)
    a, b = stage.joined("a", "b")
    stage.pushes(a=1, b=2)
    b.leaves()
    assert stage.asks("set", min_workers=2).ok
    a.pushes(11)
    assert stage.version().counter == 1
    b = stage.worker("b").joins()
    b.pushes(12, base=stage.version())
    assert stage.version().counter == 2


def test_names_of_wrappers_make_no_other_model() -> None:
    """A run whose first workers were of an earlier release, which kept them, goes on with newer ones."""
    plain = layered(2)
    named = [replace(each, name=f"module.{each.name}") for each in plain.entries]
    stage = a_stage(workers=2)
    assert stage.worker("a").joins(manifest=Manifest(tuple(named))).last(Welcome) is not None
    assert stage.worker("b").joins(manifest=plain).last(Welcome) is not None
    other = Manifest(tuple(reversed(plain.entries)))
    assert stage.worker("c").joins(manifest=other).error().code == "model_differs"
