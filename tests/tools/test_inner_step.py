"""Inner steps between two reports: how old the last report is, and what displays make of it."""

import json
from typing import Any

import pytest

from diloco_protocol.feed import parse_snapshot
from diloco_protocol.messages import Heartbeat
from diloco_tools.monitor.feed.model import FeedModel, inner_step_now
from kit.core_harness import Stage, a_run
from kit.feed_snapshots import Publisher, frame, status, worker
from kit.scripted_broker import ScriptedBroker
from kit.scripted_training import ScriptedTraining
from kit.top_screen import shown
from kit.top_text import drawn, top_of

pytest_plugins = ("kit.worker_fixtures",)


# The worker reports when training goes on.


@pytest.mark.parametrize("delay", [0, 2])
def test_worker_tells_at_once_that_it_trains_on_from_a_new_version(
    training: ScriptedTraining, broker: ScriptedBroker, delay: int
) -> None:
    """Half a minute may pass until its next heartbeat, and a round may be over by then."""
    training.begins(config={"fragment_sync_delay": delay, "heartbeat_timeout": 600.0})
    training.steps(3 + delay)
    training.round(1, 1)
    while (told := broker.hears(Heartbeat)).inner_step != delay:
        pass
    assert (told.step, told.state) == (4 + delay, "training")


# The broker tells how old the report is.


def told(stage: Stage, name: str = "a") -> tuple[int, float | None]:
    (found,) = (each for each in stage.shown()["workers"] if each["id"] == name)
    return found["inner_step"], found["inner_age_s"]


def test_report_ages_and_what_the_broker_concludes_is_not_a_report() -> None:
    stage, (a, b) = a_run("a", "b")
    assert told(stage) == (0, None), "a version is being sent; it is unknown when it is merged"
    a.sends(Heartbeat(a.token(), 7, inner_step=7))
    assert told(stage) == (7, 0.0)
    stage.passes(12.0)
    assert told(stage) == (7, 12.0)
    a.begins(11, steps=10)
    assert told(stage) == (10, None), "it waits for the round"
    a.sends(Heartbeat(a.token(), 10, inner_step=10, state="waiting"))
    a.delivers([0, 1])
    b.pushes(12)
    assert told(stage) == (0, None)


def test_worker_that_trains_while_its_push_is_under_way_keeps_its_count() -> None:
    stage, (a, b) = a_run("a", "b")
    a.pushes(11)
    a.sends(Heartbeat(a.token(), 13, inner_step=3))
    b.pushes(12)
    assert stage.version().counter == 2
    assert told(stage) == (3, 0.0)


# Displays move it by the worker's own pace.


def told_of(**keys: Any) -> dict[str, Any]:
    """A worker at 5 steps a second that reported step 212 of 500 ten seconds ago."""
    one = {"inner_step": 212, "inner_age_s": 10.0, "steps_per_s": 5.0, "beat_age_s": 10.0, **keys}
    return status(workers=[worker("a", **one)], liveness={"heartbeat_timeout_s": 120.0})


def estimate(after_s: float = 0.0, timeout: float = 120.0, **keys: Any) -> int | None:
    model = FeedModel()
    news = told_of(**keys) | {"liveness": {"heartbeat_timeout_s": timeout}}
    model.update(parse_snapshot(frame(news)), 100.0)
    snapshot = model.at(100.0 + after_s)
    assert snapshot is not None
    return inner_step_now(snapshot, snapshot.workers[0], model.freshness(100.0 + after_s))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 262),
        ({"after_s": 2.1}, 272),  # time goes on between two snapshots
        ({"steps_per_s": 0.01}, None),  # no step since: the report is as good
        ({"steps_per_s": 1000.0}, 500),  # never past the boundary
        ({"inner_step": 499, "steps_per_s": 1e308, "inner_age_s": 40.0}, 500),
        # A worker that may not train.
        *(({"state": state}, None) for state in ("waiting", "pushing")),
        *(({"health": health}, None) for health in ("lost", "stalled", "slow")),
        *(({"steps_per_s": pace}, None) for pace in (None, float("inf"), float("nan"), -1.0)),
        *(({"inner_age_s": age}, None) for age in (None, -5.0, 46.0)),
        ({"beat_age_s": 46.0}, None),
        ({"sync_every": 0}, None),
    ],
    ids=str,
)
def test_steps_since_a_report_are_estimated(keys: dict[str, Any], expected: int | None) -> None:
    assert estimate(**keys) == expected


@pytest.mark.parametrize(("timeout", "silent"), [(120.0, 45.0), (30.0, 15.0), (0.0, 45.0)])
def test_silence_beyond_the_usual_interval_ends_the_estimate(timeout: float, silent: float) -> None:
    """Heartbeats come every 30 s, or every third of what the broker tolerates."""
    for age, is_known in ((silent - 1, True), (silent + 1, False)):
        made = estimate(timeout=timeout, inner_age_s=age, steps_per_s=1.0)
        assert (made is not None) == is_known


def test_screens_mark_an_estimate() -> None:
    for news, inner in (
        (told_of(), " ~262/500 "),
        (told_of(state="waiting"), " 212/500 "),
        (told_of(inner_age_s=None), " 212/500 "),
    ):
        assert inner in drawn(news, width=120)
        assert inner in shown(news, (100, 24))
    assert " 212/500 " in drawn(told_of(), width=120, later_s=11.0), "a stale feed"


def test_json_keeps_the_report_and_has_the_estimate_beside_it(publisher: Publisher) -> None:
    document = json.loads(top_of(publisher, told_of(), "--json").stdout)
    assert document["workers"][0]["inner_step"] == 212
    assert document["monitor"]["inner_steps"] == {"a": 262}
    document = json.loads(top_of(publisher, told_of(state="waiting"), "--json").stdout)
    assert document["monitor"]["inner_steps"] == {}
