"""The records of the feed: snapshots of brokers of any release, and values that are not snapshots."""

import json
import math
from typing import Any

import pytest

from diloco_protocol.feed import (
    FEED_VERSION,
    MAX_DEPTH,
    TOPIC,
    FeedVersionError,
    MalformedFeedError,
    parse_snapshot,
)
from diloco_protocol.records import to_plain
from kit.feed_snapshots import bare_frame, bare_snapshot, bare_worker


def test_nested_records_become_typed() -> None:
    read = bare_snapshot(
        round={"number": 7, "arrived": ["a"], "expected": ["a", "b"], "floor": 2},
        workers=[bare_worker("a", loss=2.5, round=None, extra={"gpu": "A100"})],
        last_round={"number": 6, "seconds": 4},
    )
    assert read.round is not None
    assert read.round.expected == ("a", "b")
    assert read.workers[0].loss == 2.5
    assert read.workers[0].round is None
    assert read.workers[0].extra == {"gpu": "A100"}
    assert read.last_round is not None
    assert (read.last_round.seconds, type(read.last_round.seconds)) == (4.0, float)


def test_missing_keys_and_null_take_the_defaults() -> None:
    read = parse_snapshot(TOPIC + b'{"feed": 1, "sequence": 3, "epoch": "a0"}')
    assert (read.sequence, read.round, read.model, read.workers) == (3, None, None, ())
    assert read.counts.alive == 0
    assert bare_snapshot(counts=None, loop={"rss_bytes": None}, workers=None) == bare_snapshot()


def test_keys_of_a_newer_broker_are_kept_only_in_raw() -> None:
    read = bare_snapshot(weather="fine", raw="not a key of ours", counts={"alive": 2, "asleep": 1})
    assert read == bare_snapshot(counts={"alive": 2})
    assert read.raw["weather"] == "fine"
    assert read.raw["raw"] == "not a key of ours"


def test_raw_is_strict_json_while_records_keep_non_finite_numbers() -> None:
    read = bare_snapshot(workers=[bare_worker("a", loss=math.nan)])
    assert read.workers[0].loss is not None
    assert math.isnan(read.workers[0].loss)
    assert json.loads(json.dumps(read.raw, allow_nan=False))["workers"][0]["loss"] is None


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"status", b"statusquo {}", TOPIC, TOPIC + b"\xff\xfe", TOPIC + b"[1, 2]"),
        *(TOPIC + b"null", TOPIC + b'{"feed": 1, "sequence": 1', TOPIC + b"[" * 200_000),
        TOPIC + b'{"sequence": 1, "epoch": "a0"}',
        TOPIC + b'{"feed": true, "sequence": 1, "epoch": "a0"}',
        TOPIC + b'{"feed": 1, "sequence": ' + b"9" * 5000 + b', "epoch": "a0"}',
        bare_frame(x=json.loads("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))),
    ],
    ids=lambda payload: repr(payload[:32]),
)
def test_malformed_snapshot_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedFeedError):
        parse_snapshot(payload)


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"epoch": None}, "snapshot.epoch is missing"),
        ({"epoch": 5}, "snapshot.epoch is 5; it must be a text"),
        ({"sequence": 1.5}, "snapshot.sequence is 1.5; it must be a whole number"),
        ({"sequence": 1 << 64}, "snapshot.sequence is"),
        ({"uptime_s": "long"}, "snapshot.uptime_s is 'long'; it must be a number"),
        ({"counts": [1]}, "snapshot.counts is of type list; it must be a map"),
        ({"workers": {}}, "snapshot.workers is of type dict; it must be an array"),
        ({"workers": [bare_worker("a"), {}]}, r"snapshot.workers\[1\].id is missing"),
        ({"round": {"number": 1, "missing": [1]}}, r"snapshot.round.missing\[0\] is 1"),
    ],
)
def test_a_wrong_type_is_refused_by_name(keys: dict[str, Any], where: str) -> None:
    with pytest.raises(MalformedFeedError, match=where):
        bare_snapshot(**keys)


@pytest.mark.parametrize("version", [0, FEED_VERSION + 1])
def test_another_feed_version_is_refused_with_both_named(version: int) -> None:
    with pytest.raises(FeedVersionError, match=rf"version {version} .* version {FEED_VERSION}"):
        bare_snapshot(feed=version)


def test_published_snapshot_is_read_back_unchanged() -> None:
    read = bare_snapshot(
        run=None,
        outer={"lr": None, "groups": [{"lr": 0.5, "momentum": None}]},
        workers=[bare_worker("a", loss=None, extra={"gpu": None})],
        totals={"refused": {"late": 2}},
    )
    plain = to_plain(read, with_none=True)
    assert "raw" not in plain
    assert (plain["run"], plain["workers"][0]["extra"]) == (None, {"gpu": None})
    assert parse_snapshot(TOPIC + json.dumps(plain).encode()) == read
