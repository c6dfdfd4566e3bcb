"""The freshness of the broker's feed, and the verdict on its run."""

import math
from typing import Any

import pytest

from diloco_protocol.feed import Snapshot, parse_snapshot
from diloco_tools.monitor.feed.model import FeedModel, Freshness
from kit.feed_snapshots import frame


def snapshot(**keys: Any) -> Snapshot:
    document = {"feed": 1, "sequence": 1, "epoch": "a0", "state": "training"}
    return parse_snapshot(frame(document | keys))


def worker(name: str, **keys: Any) -> dict[str, Any]:
    return {"id": name, "health": "ok", "beat_age_s": 0.5, **keys}


@pytest.mark.parametrize(
    ("age", "expected"),
    [(0.0, "LIVE"), (2.9, "LIVE"), (3.0, "LATE"), (10.0, "LATE"), (10.1, "STALE")],
)
def test_freshness_follows_the_age_of_the_newest_snapshot(age: float, expected: str) -> None:
    model = FeedModel(snapshot(sequence=5), 100.0)
    assert model.freshness(100.0 + age).name == expected
    for old in (5, 4):
        assert model.update(snapshot(sequence=old), now=160.0) is False
    assert model.freshness(160.0) is Freshness.STALE
    model.update(snapshot(sequence=61), now=160.0)
    assert model.freshness(160.0) is Freshness.LIVE


def test_a_feed_never_heard_is_stale() -> None:
    model = FeedModel()
    assert model.freshness(0.0) is Freshness.STALE
    assert model.at(0.0) is None
    assert not model.verdict(0.0).healthy


def test_missed_snapshots_and_restarts_are_counted() -> None:
    """Those before the first are not missed, neither at all nor of another life of the broker."""
    model = FeedModel()
    for epoch, sequence, missed, restarts in (
        *(("a0", 5000, 0, 0), ("a0", 5001, 0, 0), ("a0", 5004, 2, 0), ("a0", 5006, 3, 0)),
        *(("b1", 3, 3, 1), ("b1", 5, 4, 1)),
    ):
        assert model.update(snapshot(epoch=epoch, sequence=sequence), now=float(sequence)) is True
        assert (model.missed, model.restarts) == (missed, restarts)
    assert model.snapshot is not None
    assert model.snapshot.epoch == "b1"


def test_ages_go_on_counting_between_snapshots_and_never_back() -> None:
    model = FeedModel()
    ages = {
        "round": {"number": 1, "age_s": 4.0},
        "checkpoint": {"age_s": 8.0},
        "workers": [worker("a", beat_age_s=0.5, sync_age_s=3.0, inner_age_s=1.0), worker("b")],
        "rejections": [{"age_s": 7.0}],
        "events": [{"sequence": 1, "age_s": 9.0, "text": "joined"}],
    }
    model.update(snapshot(uptime_s=50.0, paused_for_s=1.0, **ages), now=1000.0)
    assert model.at(999.0) == model.snapshot
    later = model.at(1002.0)
    assert later is not None and later.round is not None and later.checkpoint is not None
    assert (later.uptime_s, later.paused_for_s, later.round.age_s) == (50.0, 3.0, 6.0)
    assert (later.checkpoint.age_s, later.rejections[0].age_s) == (10.0, 9.0)
    assert later.events[0].age_s == 11.0
    assert [(w.beat_age_s, w.sync_age_s, w.inner_age_s) for w in later.workers] == [
        (2.5, 5.0, 3.0),
        (2.5, None, None),
    ]


NOT_SAVED = {"folder": "run", "round": 3, "age_s": 7.0, "error": "No space left on device"}
UNWELL = [
    worker("d", health="stalled"),
    worker("b", health="lost", beat_age_s=41.2, host="cellar", pid=12),
    worker("a"),
    worker("c", health="slow", beat_age_s=3.1),
    worker("e", loss=math.inf),
]
PAUSED = {"state": "paused", "paused_for_s": 3.0}
BUSY = {
    "waiting_for": "a, b to finish round 3",
    "round": {"number": 3, "floor": 2, "missing": ["a", "b"]},
    "counts": {"alive": 2},
    "workers": [worker("a", loss=2.0), worker("b")],
    "totals": {"rejected": 4, "deaths": 1},
}
BELOW_FLOOR = {"round": {"number": 3, "floor": 2}, "counts": {"alive": 1}}


@pytest.mark.parametrize(
    ("news", "after_s", "reasons"),
    [
        (BUSY, 0, ""),
        ({"state": "waiting", "waiting_for": "for b to join"}, 0, "the run waits for b to join"),
        ({"state": "waiting"}, 0, "the run waits for workers"),
        (BELOW_FLOOR, 0, "the run waits for workers: 1 present, the round needs 2"),
        ({"state": "stopping"}, 0, "the broker is stopping"),
        (PAUSED, 2, "the run is paused, for 5.0 s"),
        (
            PAUSED | {"waiting_for": "for workers: 1 here"},
            2,
            "the run is paused, for 5.0 s; the run waits for workers: 1 here",
        ),
        ({"checkpoint": NOT_SAVED}, 0, "no checkpoint can be written: No space left on device"),
        (
            {"workers": UNWELL},
            1,
            "b is lost, last heard 42 s ago; c is slow, last heard 4.1 s ago; "
            "d is stalled, last heard 1.5 s ago; the loss of e is not finite",
        ),
        ({}, 9, ""),  # late
        ({}, 12, "the broker has sent nothing for 12 s"),
    ],
)
def test_verdict_and_its_reasons(news: dict[str, Any], after_s: float, reasons: str) -> None:
    model = FeedModel()
    model.update(snapshot(**news), now=0.0)
    verdict = model.verdict(after_s)
    assert "; ".join(verdict.reasons) == reasons
    assert verdict.healthy == (not reasons)
