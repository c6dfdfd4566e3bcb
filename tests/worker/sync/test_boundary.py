"""The decisions after each optimizer step: freezing, waiting, merging, leaving, resuming."""

from typing import Any

import pytest

from diloco_protocol import Bitmap, Counted, Ledger
from diloco_protocol.messages import Released
from diloco_worker.group.ports import FollowerPorts
from diloco_worker.session.connection import Phase
from diloco_worker.session.events import BeatNow, RequestVersion, VerifyPushes
from diloco_worker.session.news import Arrival, Work
from diloco_worker.sync import boundary
from diloco_worker.sync.boundary import resume
from diloco_worker.sync.fragment import InFlight, Merge, Outcome, TrainingBase
from diloco_worker.sync.ports import NonFinite, finish
from diloco_worker.sync.schedule import SchedulePlace
from diloco_worker.sync.state import HASTY_S, Options
from kit.boundary_harness import H, Trainer, a_run, trainer, version

AT_A_SLOT = ["read_reports", "check_model", "beat", "freeze", "offer"]


def at_the_boundary(**changes: Any) -> Trainer:
    """It waits at its first boundary."""
    training = trainer(**changes).steps(H)
    assert training.waits()
    return training


def test_at_a_slot_the_delta_is_frozen_offered_and_waited_for() -> None:
    training = trainer().steps(H - 1)
    assert training.calls == [], "between boundaries nothing is done"
    training.steps(1)
    assert training.calls == [*AT_A_SLOT, "show_waiting", "wait"]
    (push,) = training.pushes
    assert (push.fragment, push.base, push.steps, push.norm) == (0, version(0), H, 1.0)
    assert push.wire_dtype == training.config.wire_dtype


def test_inner_step_does_not_poll_unless_something_arrived() -> None:
    training = trainer()
    before = training.polls
    training.steps(H - 2)
    assert training.polls == before
    training.receives(1).steps(1)
    assert (training.polls, training.outcomes) == (before + 1, ["moved"])


def test_reply_is_merged_and_training_goes_on() -> None:
    training = at_the_boundary()
    (push,) = training.pushes
    training.passes(2.5).forget()
    training.receives(0)
    assert training.waits(), "that version lacks the push"
    training.forget()
    training.receives(1, counted=push)
    assert not training.waits()
    assert training.calls == ["merge", "push_ended", "beat", "log"]
    assert training.outcomes == ["counted"]
    assert training.ended[0].version == version(1)
    assert training.said.endswith("has 4 steps of this worker, norm 1, staleness 0; waited 2.5 s.")
    assert (training.metrics.pushes, training.metrics.seconds_waited) == (1, 2.5)
    assert training.steps(H).pushes[-1].base == version(1)


def test_worker_without_heartbeats_sends_none_at_a_boundary() -> None:
    training = trainer(Options(heartbeat_interval=0)).steps(H)
    training.receives(1, counted=training.pushes[0])
    assert not training.waits()
    assert not training.all(BeatNow)


@pytest.mark.parametrize("weight_by", ["tokens", "tokens2-per-step"])
def test_work_since_the_last_freeze_goes_with_the_push(weight_by: str) -> None:
    training = trainer(weight_by=weight_by).steps(H)
    training.receives(1, counted=training.pushes[0])
    training.totals = Work(tokens=640, samples=40, loss=0.5)
    training.steps(H)
    training.receives(2, counted=training.pushes[1])
    training.totals = Work(tokens=1000, samples=50, loss=0.25)
    training.steps(H)
    told = [(push.steps, push.tokens, push.samples, push.loss) for push in training.pushes]
    assert told == [(H, 0, 0, None), (H, 640, 40, 0.5), (H, 360, 10, 0.25)]
    warning = "weighs each contribution by its tokens, and none were reported"
    assert training.said.count(warning) == 1


REASONS: list[tuple[dict[str, Any], str]] = [
    ({"asked_to_stop": "SIGTERM asks this process to end"}, "SIGTERM asks this process to end"),
    ({"has_ended": True, "last_error": "It broke."}, "the link has ended (It broke.)"),
    ({"over": "A reason."}, "the broker asked this worker to leave (A reason.)"),
    ({"is_restarting": True}, "the broker restarts"),
    ({"phase": Phase.REFUSED, "refusal": "no"}, "the broker refuses this worker (no)"),
    ({"silence": 601.0, "address": "tcp://b"}, "no sign of life from tcp://b for 601 s"),
    ({"reconnections": 4}, "the connection broke 4 times at this boundary"),
]


@pytest.mark.parametrize(("changes", "reason"), REASONS)
def test_training_continues_with_the_delta_in_flight(changes: dict[str, Any], reason: str) -> None:
    training = at_the_boundary().changes(reconnections=3)
    assert training.waits(), "the connection may break this often"
    training.forget()
    training.changes(**changes)
    assert not training.waits()
    assert training.calls == ["keep_anchor", "trouble"]
    assert f"Training goes on with 4 steps in flight: {reason}." in training.said
    training.steps(1)
    assert training.state.unsynced_steps == H + 1


def test_wait_polls_again_when_silence_would_end_it() -> None:
    training = trainer(Options(timeout=20.0))
    training.changes(silence=5.0)
    (seconds,) = training.steps(H).waited
    assert seconds == 15.0


@pytest.mark.parametrize("newer", [None, 5])
def test_counted_delta_is_merged_once_at_its_apply_point(newer: int | None) -> None:
    training = trainer(fragment_sync_delay=2).steps(H)
    assert not training.waits()
    training.receives(1, counted=training.pushes[0]).steps(1)
    assert training.outcomes == []
    if newer is not None:
        training.receives(newer)
    training.steps(1)
    assert training.outcomes == ["counted"]
    assert training.state.fragments[0].version == version(newer or 1)
    metrics = training.metrics
    assert (metrics.pushes, metrics.merge_delay, metrics.late_merges) == (1, 2, 0)


def test_version_without_a_push_in_flight_moves_the_model() -> None:
    training = trainer().steps(1).receives(3).steps(1)
    assert training.outcomes == ["moved"]
    assert training.state.fragments[0].version == version(3)
    training.receives(3).steps(1)
    assert training.outcomes == ["moved"], "it is the base already"


@pytest.mark.parametrize(
    ("code", "requests", "next_round"), [("late", 1, 1), ("stale", 1, 0), ("bad_push", 0, 0)]
)
def test_dropped_delta_is_removed_from_the_model(code: str, requests: int, next_round: int) -> None:
    training = at_the_boundary()
    (push,) = training.pushes
    training.is_granted(push, 0).is_refused(push, code)
    assert not training.waits()
    assert training.outcomes == ["rejected"]
    assert training.state.schedule.cursor == next_round, "any round but a closed one needs the push"
    assert len(training.all(RequestVersion)) == requests
    (ended,) = training.ended
    assert (ended.version, ended.why) == (None, code)
    assert training.metrics.rejected == 1


@pytest.mark.parametrize(("may_count", "kept"), [(None, 2), (0b00, 0), (0b10, 4), (0b11, 2)])
def test_rejected_quantized_pushes_are_kept_bounded(may_count: int | None, kept: int) -> None:
    """No version arrives meanwhile to search for them. The oldest are given up first."""
    training = trainer(wire_dtype="int4")
    told = None if may_count is None else Bitmap(2, may_count)
    for _ in range(6):
        training.steps(H)
        training.is_refused(training.pushes[-1], "non_finite", counted=told)
    last = [push.push_id for push in training.pushes][6 - kept :]
    assert dropped(training) == last
    for counter in (1, 2):  # the first may precede their round
        assert dropped(training) == last
        training.steps(H).receives(counter, counted=training.pushes[-1])
    assert dropped(training) == []
    settled = [merge.settled for merge in training.merged]
    assert settled[-1].keys() == {*last, training.pushes[-1].push_id}
    given_up = [push for each in settled[:6] for push in each]
    assert given_up == [p.push_id for p in training.pushes[: 6 - kept]] * bool(kept)


def dropped(training: Trainer) -> list[int]:
    """The dropped pushes in a checkpoint that are not settled."""
    (base,) = training.state.training_bases(training.totals)
    return [each.push_id for each in base.dropped]


def test_non_finite_delta_restores_every_fragment_and_is_not_sent() -> None:
    training = trainer(num_fragments=2)
    training.bad = NonFinite("layer.weight")
    training.steps(2)
    assert not training.waits()
    assert training.pushes == []
    assert training.outcomes == ["restored", "restored"]
    assert "not finite in layer.weight" in training.said
    assert training.steps(2).pushes[0].steps == 2, "discarded steps are in no push"


def test_superseding_version_ends_the_push_in_flight() -> None:
    training = trainer(fragment_sync_delay=3).steps(H)
    training.receives(7, superseding="an earlier incarnation has sent them").steps(1)
    assert training.outcomes == ["superseded"]
    assert "5 steps of fragment 0" in training.said
    assert training.ended[0].why == "superseded"


def test_failed_removal_of_non_finite_steps_is_retried_after_the_next_step() -> None:
    """No message asks for it, so it must not be forgotten."""
    training = trainer()
    training.bad = NonFinite("layer.weight")
    training.fails = MemoryError("full")
    training.steps(H)
    assert training.state.is_partial
    training.steps(1)
    assert training.outcomes == ["restored", "restored"], "tried again"
    assert not training.state.is_partial


@pytest.mark.parametrize("where", ["offer", "show_waiting", "wait"])
def test_interrupted_boundary_is_completed_once_after_the_next_step(where: str) -> None:
    training = trainer()
    training.interrupts = where
    training.steps(H).steps(1)
    (push,) = training.pushes
    assert push.steps == H
    assert training.waits()
    training.interrupts = "merge"
    training.receives(1, counted=push)
    assert training.outcomes == []
    training.steps(1)
    assert training.outcomes == ["counted"]


def test_forced_synchronisation_pushes_every_fragment_and_begins_a_new_cycle() -> None:
    training = trainer(num_fragments=2).steps(1)
    training.does(boundary.force)
    for counter, fragment in enumerate((0, 1), start=1):
        assert training.waits()
        training.receives(counter, fragment=fragment, counted=training.pushes[-1])
    assert training.result is True
    assert [push.fragment for push in training.pushes] == [0, 1]
    assert not training.steps(1).waits()
    assert training.steps(1).waits(), "a new cycle: H / P steps to its first slot"
    refused = trainer().steps(1).does(boundary.force)
    assert refused.is_refused(refused.pushes[0], "bad_push").result is False


def test_newest_parameters_are_loaded_once_all_arrived() -> None:
    training = trainer(num_fragments=2).steps(1)
    training.does(boundary.load)
    assert [each.fragment for each in training.all(RequestVersion)] == [0, 1]
    assert training.receives(1, fragment=0).waits()
    training.receives(2, fragment=1)
    assert training.result is True
    assert training.outcomes == ["loaded", "loaded"]
    assert training.steps(2).pushes[0].steps == 2, "the steps before it are gone"
    alone = trainer().changes(over="The run is over.").does(boundary.load)
    assert (alone.result, alone.outcomes) == (False, [])
    assert "could not be loaded: the broker asked this worker to leave" in alone.said


def leaving(*, hasty: bool = False, **changes: Any) -> Trainer:
    training = trainer(fragment_sync_delay=3, **changes).steps(H)
    training.forget()
    return training.does(lambda state: boundary.leave(state, hasty=hasty))


def test_leaving_worker_waits_for_its_push_and_leaves_the_model_alone() -> None:
    training = leaving()
    push = training.state.fragments[0].in_flight
    assert training.waits()
    assert push is not None
    training.receives(1, counted=push.push)
    assert not training.waits()
    assert training.outcomes == []
    assert training.metrics.pushes == 1
    (base,) = training.state.training_bases(Work())
    assert (base.version, base.in_flight) == (version(0), push), "a checkpoint resumes from here"


@pytest.mark.parametrize("hasty", [False, True])
@pytest.mark.parametrize(
    ("is_restarting", "away"), [(False, ""), (True, "; the broker restarts and was not back")]
)
def test_leaving_worker_waits_no_longer_than_the_timeout(
    hasty: bool, is_restarting: bool, away: str
) -> None:
    training, most = leaving(hasty=hasty).changes(is_restarting=is_restarting), 600.0
    if hasty:
        most = HASTY_S
    assert training.passes(most - 1).waits()
    training.passes(2.0)
    assert f"Leaving with 4 steps in flight: it took longer than {most:g} s{away}." in training.said


@pytest.mark.parametrize("where", ["uploaded", "put_off"])
def test_interrupted_process_waits_only_for_its_upload(where: str) -> None:
    training = leaving(hasty=True)
    in_flight = training.state.fragments[0].in_flight
    assert in_flight is not None
    assert training.waited[-1] <= HASTY_S
    training.changes(**{where: frozenset({in_flight.push_id})})
    assert not training.waits()


def test_leaving_worker_does_not_wait_for_a_run_that_is_over() -> None:
    assert not leaving().changes(over="The run is over.").waits()


def resumed(known: Ledger, in_flight: InFlight | None, *, arrives: dict[str, Any]) -> Trainer:
    """Step 6 of a cycle that began at 4, on version 5; the broker has this version."""
    training = Trainer(a_run(), step=6)
    training.begins(TrainingBase(version(5), known, Work(2), in_flight), cycle_start=4)
    training.is_welcome(5)
    training.receives(**arrives)
    sight = training._arrivals.pop(0)
    place = SchedulePlace(H, 0, 0)
    return training.does(lambda state: resume(state, place, 4, [sight]))


def a_push_in_flight() -> InFlight:
    training = trainer(fragment_sync_delay=3).steps(H)
    in_flight = training.state.fragments[0].in_flight
    assert in_flight is not None
    return InFlight(in_flight.push, 4, 4, 8)


def test_resumed_worker_keeps_its_place_and_offers_its_push() -> None:
    in_flight = a_push_in_flight()
    ledger = Ledger({"me": (Counted(77),)})
    training = resumed(ledger, in_flight, arrives={"counter": 5})
    assert training.calls == ["VerifyPushes", "offer", "log"]
    assert training.all(VerifyPushes)[0].known == {77, in_flight.push_id}
    assert not training.offered[0].is_new
    assert "step 6, 2 steps into the cycle" in training.said
    training.steps(2)
    assert training.waits(), "its boundary is at the same step"


def test_resumed_worker_adopts_what_an_earlier_incarnation_pushed() -> None:
    arrives = {"counter": 6, "counted": a_push_in_flight().push}
    training = resumed(Ledger(), None, arrives=arrives)
    assert training.outcomes == ["superseded"]
    assert not training.all(VerifyPushes)
    assert "2 steps of fragment 0" in training.said


def test_interrupted_merge_of_another_rank_has_begun_as_that_of_the_leader_has() -> None:
    """Then all ranks of a worker refuse to save the model, and none waits for the others."""

    class Interrupted:
        def apply(self, merge: Merge, step: int) -> None:
            merge.change = "half of it"
            raise KeyboardInterrupt

    ports: Any = object.__new__(FollowerPorts)
    ports.fragments = [Interrupted()]
    arrival = Arrival(Released(0, version(1), Ledger()), frozenset(), values=None)
    merge = Merge(Outcome.MOVED, arrival=arrival)
    with pytest.raises(KeyboardInterrupt):
        finish(ports.merge(0, merge, 1))
    assert merge.change == "half of it"
