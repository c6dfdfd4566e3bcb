"""How much of the broker's feed to believe, and how its run is."""

import json
import math
from typing import Any

import pytest

from diloco_protocol.feed import (
    FEED_VERSION,
    TOPIC,
    Snapshot,
    parse_snapshot,
)
from diloco_tools.feed.model import FeedModel, Freshness


def frame(**keys: Any) -> bytes:
    document = {"feed": FEED_VERSION, "sequence": 1, "epoch": "a0", "state": "training"}
    return TOPIC + json.dumps(document | keys).encode()


def snapshot(**keys: Any) -> Snapshot:
    return parse_snapshot(frame(**keys))


def worker(name: str, **keys: Any) -> dict[str, Any]:
    return {"id": name, "health": "ok", "beat_age_s": 0.5, **keys}


class TestFreshness:
    @pytest.mark.parametrize(
        ("age", "expected"),
        [
            (0.0, Freshness.LIVE),
            (2.9, Freshness.LIVE),
            (3.0, Freshness.LATE),
            (10.0, Freshness.LATE),
            (10.1, Freshness.STALE),
        ],
    )
    def test_follows_the_age_of_the_newest_snapshot(self, age: float, expected: Freshness) -> None:
        model = FeedModel()
        model.update(snapshot(), now=100.0)
        assert model.freshness(100.0 + age) is expected

    def test_a_feed_never_heard_is_stale(self) -> None:
        model = FeedModel()
        assert model.freshness(0.0) is Freshness.STALE
        assert model.at(0.0) is None
        assert not model.verdict(0.0).healthy

    def test_a_snapshot_makes_a_stale_feed_live_again(self) -> None:
        model = FeedModel()
        model.update(snapshot(sequence=1), now=0.0)
        assert model.freshness(60.0) is Freshness.STALE
        model.update(snapshot(sequence=61), now=60.0)
        assert model.freshness(60.0) is Freshness.LIVE

    def test_a_repeated_snapshot_is_no_sign_of_life(self) -> None:
        model = FeedModel()
        model.update(snapshot(sequence=5), now=0.0)
        assert model.update(snapshot(sequence=5), now=60.0) is False
        assert model.update(snapshot(sequence=4), now=60.0) is False
        assert model.freshness(60.0) is Freshness.STALE


class TestSequence:
    def test_missed_snapshots_are_counted(self) -> None:
        model = FeedModel()
        for now, sequence in enumerate([10, 11, 14, 15, 16, 18]):
            model.update(snapshot(sequence=sequence), float(now))
        assert model.missed == 3

    def test_those_before_the_first_are_not_missed(self) -> None:
        model = FeedModel()
        model.update(snapshot(sequence=5000), now=0.0)
        assert model.missed == 0

    def test_a_restarted_broker_is_noticed_and_counts_anew(self) -> None:
        model = FeedModel()
        model.update(snapshot(epoch="a0", sequence=900), now=0.0)
        assert model.update(snapshot(epoch="b1", sequence=3), now=1.0) is True
        assert (model.restarts, model.missed) == (1, 0)
        assert model.snapshot is not None
        assert model.snapshot.epoch == "b1"
        model.update(snapshot(epoch="b1", sequence=5), now=2.0)
        assert (model.restarts, model.missed) == (1, 1)


class TestAges:
    def test_go_on_counting_between_snapshots(self) -> None:
        model = FeedModel()
        model.update(
            snapshot(
                uptime_s=50.0,
                round={"number": 1, "age_s": 4.0},
                workers=[worker("a", beat_age_s=0.5)],
                events=[{"sequence": 1, "age_s": 9.0, "text": "joined"}],
            ),
            now=1000.0,
        )
        later = model.at(1002.0)
        assert later is not None
        assert later.round is not None
        ages = (later.round.age_s, later.workers[0].beat_age_s, later.events[0].age_s)
        assert ages == (6.0, 2.5, 11.0)
        assert later.uptime_s == 50.0

    def test_do_not_run_backwards(self) -> None:
        model = FeedModel()
        model.update(snapshot(round={"number": 1, "age_s": 4.0}), now=1000.0)
        earlier = model.at(999.0)
        assert earlier is not None
        assert earlier.round is not None
        assert earlier.round.age_s == 4.0


class TestVerdict:
    def reasons(self, after_s: float = 0.0, **keys: Any) -> tuple[str, ...]:
        model = FeedModel()
        model.update(snapshot(**keys), now=0.0)
        verdict = model.verdict(after_s)
        assert verdict.healthy == (not verdict.reasons)
        return verdict.reasons

    def test_a_run_at_work_is_healthy(self) -> None:
        assert (
            self.reasons(
                waiting_for="a, b to finish round 3",
                round={"number": 3, "floor": 2, "missing": ["a", "b"]},
                counts={"alive": 2},
                workers=[worker("a", loss=2.0), worker("b")],
                totals={"rejected": 4, "deaths": 1},
            )
            == ()
        )

    def test_waiting_says_what_for(self) -> None:
        sentence = "for workers to join; round one needs 2"
        assert self.reasons(state="waiting", waiting_for=sentence) == (f"the run waits {sentence}",)
        assert self.reasons(state="waiting") == ("the run waits for workers",)

    def test_fewer_alive_than_the_floor_of_the_round(self) -> None:
        (reason,) = self.reasons(round={"number": 3, "floor": 2}, counts={"alive": 1})
        assert reason == "the run waits for workers: 1 here, the round needs 2"

    def test_stopping(self) -> None:
        assert self.reasons(state="stopping") == ("the broker is stopping",)

    def test_each_troubled_worker_by_id(self) -> None:
        several = [
            worker("d", health="stalled"),
            worker("b", health="lost", beat_age_s=41.2),
            worker("a"),
            worker("c", health="slow", beat_age_s=3.1),
            worker("e", loss=math.inf),
        ]
        assert self.reasons(after_s=1.0, workers=several) == (
            "b is lost, last heard 42 s ago",
            "c is slow, last heard 4.1 s ago",
            "d is stalled, last heard 1.5 s ago",
            "the loss of e is not finite",
        )

    def test_workers_of_one_host_are_told_apart_by_their_ids(self) -> None:
        """Two processes on a machine with two GPUs: one of them has trouble."""
        model = FeedModel()
        pair = [
            worker("gpu-0", host="cellar", pid=11, bytes_up=100),
            worker("gpu-1", host="cellar", pid=12, bytes_up=900, health="lost", beat_age_s=5.0),
        ]
        model.update(snapshot(workers=pair), now=0.0)
        assert model.verdict(1.0).reasons == ("gpu-1 is lost, last heard 6.0 s ago",)
        aged = model.at(2.0)
        assert aged is not None
        assert [(w.id, w.beat_age_s, w.bytes_up) for w in aged.workers] == [
            ("gpu-0", 2.5, 100),
            ("gpu-1", 7.0, 900),
        ]

    def test_paused_run_says_for_how_long(self) -> None:
        (reason,) = self.reasons(after_s=2.0, state="paused", paused_for_s=3.0)
        assert reason == "the run is paused, for 5.0 s"

    def test_checkpoint_that_cannot_be_written_is_a_reason(self) -> None:
        wrong = {"folder": "run", "round": 3, "age_s": 7.0, "error": "No space left on device"}
        (reason,) = self.reasons(checkpoint=wrong)
        assert reason == "no checkpoint can be written: No space left on device"

    def test_a_late_feed_is_still_healthy_and_a_stale_one_not(self) -> None:
        assert self.reasons(after_s=9.0) == ()
        assert self.reasons(after_s=12.0) == ("the broker has sent nothing for 12 s",)
