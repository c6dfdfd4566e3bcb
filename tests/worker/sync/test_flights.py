"""Deltas in flight: when each is waited for, which H is in use, and the log.

With H = 12 and P = 3 fragment 0 has its slot after step 4; with H = 6, after step 2.
"""

from typing import Any

import pytest

from diloco_protocol import Ledger, RunConfig
from diloco_protocol.messages import Push, Released
from diloco_worker.session.compatibility import gives_way
from diloco_worker.session.news import Arrival
from diloco_worker.sync import boundary
from diloco_worker.sync.metrics import SyncLines
from diloco_worker.sync.state import Options
from kit.boundary_harness import H, Trainer, trainer, version


def streaming(**changes: Any) -> Trainer:
    return trainer(None, **{"sync_every": 6, "num_fragments": 3, **changes})


AUTO: dict[str, Any] = {"sync_every": 12, "num_fragments": 3, "fragment_delay_auto": True}


@pytest.mark.parametrize("on_the_way", [1, 2, 3])
def test_training_goes_on_until_the_reply_is_here(on_the_way: int) -> None:
    training = trainer(None, **AUTO).steps(4)
    (push,) = training.pushes
    assert (push.fragment, push.steps) == (0, 4)
    training.steps(on_the_way - 1)
    training.receives(1, counted=push)
    assert training.outcomes == [], "between two steps the model is the script's"
    training.steps(1)
    assert training.outcomes == ["counted"]
    metrics = training.metrics
    assert (metrics.pushes, metrics.merge_delay, metrics.late_merges) == (1, on_the_way, 0)
    assert metrics.seconds_waited == 0
    assert "Synchronised: version 1 (round 0, fragment 0) has 4 steps" in training.said
    assert f"merged {on_the_way} step" in training.said


@pytest.mark.parametrize(
    ("changes", "own_h", "slot", "waits_after"),
    [
        (AUTO, None, 4, 4),  # H/P
        (AUTO | {"fragment_max_delay": 2}, None, 4, 2),
        (AUTO | {"num_fragments": 1}, None, 12, 6),  # half of H
        (AUTO | {"num_fragments": 1, "mode": "async"}, None, 12, 6),
        (AUTO | {"mode": "async"}, 6, 2, 2),
        ({"fragment_sync_delay": 1}, None, H, 1),
        ({"fragment_sync_delay": 1, "fragment_max_delay": 3}, None, H, 3),
    ],
    ids=str,
)
def test_training_waits_for_a_reply_that_takes_longer_than_the_longest_delay(
    changes: dict[str, Any], own_h: int | None, slot: int, waits_after: int
) -> None:
    training = trainer(Options(sync_every=own_h), **changes).steps(slot + waits_after - 1)
    (push,) = training.pushes
    assert not training.waits()
    training.steps(1)
    assert training.waits()
    training.passes(2.5).receives(1, counted=push)
    assert training.outcomes == ["counted"]
    assert (training.metrics.merge_delay, training.metrics.seconds_waited) == (waits_after, 2.5)


def test_slot_of_a_fragment_in_flight_waits_for_it() -> None:
    training = trainer(sync_every=2, fragment_max_delay=100).steps(3)
    assert not training.waits()
    training.steps(1)
    assert training.waits()
    (push,) = training.pushes
    training.receives(1, counted=push)
    again = training.pushes[-1]
    assert (again.base, again.steps) == (version(1), 2)


@pytest.mark.parametrize(("first_round", "next_fragment"), [(3, 1), (4, 1), (5, 2), (2, 2)])
def test_welcome_moves_the_cursor_past_flights(first_round: int, next_fragment: int) -> None:
    training = streaming(fragment_max_delay=100).steps(2)
    training.is_welcome(first_round).steps(2)
    assert [push.fragment for push in training.pushes] == [0, next_fragment]


@pytest.mark.parametrize("delay", [0, 1])
def test_deferred_push_is_not_awaited_before_its_round(delay: int) -> None:
    """In its later round it has the delay of a push frozen there."""
    training = streaming(fragment_sync_delay=delay).steps(2)
    (push,) = training.pushes
    training.is_put_off(push, 3)  # rounds 1 and 2 still need pushes of this worker
    for fragment in (1, 2):
        training.steps(2)
        other = training.pushes[-1]
        assert other.fragment == fragment
        training.is_granted(other, fragment)
        training.receives(fragment + 1, fragment=fragment, counted=other)
    training.steps(2 + delay - 1)
    assert not training.waits()
    training.steps(1)
    assert training.waits()
    training.is_granted(push, 3).receives(2, counted=push).steps(2 - delay)
    following = training.pushes[-1]
    assert (following.fragment, following.steps) == (1, 6)
    assert training.said.count("deferred to round 3") == 1


def test_notice_of_a_deferred_push_ends_the_wait() -> None:
    training = streaming().steps(2)
    assert training.waits()
    training.is_deferred(0, 3)
    assert not training.waits()
    assert "trouble" not in training.calls, "it is expected"


def test_version_made_meanwhile_moves_the_turn_past_its_round() -> None:
    training = streaming(fragment_sync_delay=2).steps(2)
    training.is_refused(training.pushes[0], "late").steps(1)
    training.receives(4).steps(1)
    assert training.pushes[-1].fragment == 1, "made in round 3: round 4 comes next"


def test_leaving_does_not_wait_for_a_round_that_waits_for_this_worker() -> None:
    training = streaming(fragment_sync_delay=2).steps(2)
    (push,) = training.pushes
    training.is_put_off(push, 3).changes(put_off=frozenset({push.push_id}))
    assert not training.does(boundary.leave).waits()


@pytest.mark.parametrize("told", ["granted", "deferred"])
def test_leaving_waits_until_a_deferred_push_is_uploaded(told: str) -> None:
    training = streaming(fragment_sync_delay=2).steps(2)
    (push,) = training.pushes
    if told == "granted":
        training.is_granted(push, 3)
    else:
        training.is_granted(push, 0).is_deferred(0, 3)
    assert training.does(boundary.leave).waits()
    training.changes(uploaded=frozenset({push.push_id}))
    assert not training.waits()


@pytest.mark.parametrize(
    ("config", "own", "worked_out", "used"),
    [
        ({"dylu": True}, {}, 2, 2),
        ({}, {}, 2, H),
        ({"dylu": True}, {"dylu": False}, 2, H),
        ({"dylu": True}, {"sync_every": H}, 2, H),
        ({}, {"sync_every": 3}, None, 3),
        ({"mode": "async"}, {"sync_every": 3}, None, 3),
        ({"sync_every": 2}, {"sync_every": 3}, None, 2),
        ({"sync_every": 2, "mode": "async"}, {"sync_every": 3}, None, 3),
    ],
    ids=str,
)
def test_h_is_the_workers_own_or_the_brokers_for_it_or_the_runs(
    config: dict[str, Any], own: dict[str, Any], worked_out: int | None, used: int
) -> None:
    training = trainer(Options(**own), **config).changes(sync_every=worked_out)
    cycles = []
    for counter in (1, 2):
        began = training.step
        while not training.waits():
            training.steps(1)
        cycles.append(training.step - began)
        training.receives(counter, counted=training.pushes[-1])
    at_first = min(own.get("sync_every", H), H) if worked_out else used
    assert cycles == [at_first, used], "a cycle keeps its H"


def test_own_h_gives_way_to_a_smaller_one_of_the_run() -> None:
    said = gives_way(RunConfig("sync", 2), 3)
    assert said is not None and "sync_every=3" in said
    assert gives_way(RunConfig("async", 2), 3) is None
    assert gives_way(RunConfig("sync", 3), 3) is None


def test_own_wire_dtype_is_that_of_the_pushes() -> None:
    (push,) = trainer(Options(wire_dtype="bf16"), wire_dtype="fp32").steps(H).pushes
    assert push.wire_dtype == "bf16"


def test_staleness_is_the_brokers_or_is_computed() -> None:
    training = trainer(mode="async").steps(H)
    training.receives(9, counted=training.pushes[-1], staleness=2)
    assert training.metrics.staleness == 2
    assert "Synchronised: version 9 has 4 steps" in training.said
    assert "staleness 2" in training.said
    training.steps(H).receives(13, counted=training.pushes[-1])
    assert training.metrics.staleness == 3


def test_at_a_fast_pace_a_line_tells_of_all_syncs_of_a_second() -> None:
    now = 0.0
    told = SyncLines(lambda: now, 100.0)
    said = []
    for counter in range(1, 31):
        push = Push(b"", counter, 0, 1, "fp32", version(0), steps=5, norm=0.5)
        released = Released(0, version(counter), Ledger(), round=counter - 1)
        told.counted(push, Arrival(released, frozenset(), None), 2, 2)
        said.append(told.line(100.0 + counter))
        now += 0.125
    lines = [line for line in said if line is not None]
    assert len(lines) == 4
    assert "waited 1.0 s." in lines[0], "without the waits of a previous incarnation"
    assert "version 9 (round 8)" in lines[1]
    assert lines[1].endswith("waited 8.0 s; and 7 more since the last line.")
    assert "version 30" in str(told.line(130.0, at_once=True))
    assert told.line(140.0, at_once=True) is None, "nothing is logged twice"


def test_fragment_with_zero_deltas_is_named_until_it_moves() -> None:
    training = Trainer(RunConfig(mode="sync", sync_every=4, num_fragments=2, chunk_elements=10))
    training.begins()
    # Of fragments 0 and 1 in turn, the norm of the push, and the warnings up to then.
    norms = [1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 1, None]
    warned = [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]
    for counter, (norm, warnings) in enumerate(zip(norms, warned, strict=True), start=1):
        training.norm = norm
        training.steps(2)
        sent = training.pushes[-1]
        training.receives(counter, fragment=sent.fragment, counted=sent)
        assert training.said.count("was all zeros twice in a row") == warnings
    assert "of fragment 1 was all zeros" in training.said
