"""How flights end: the model is brought in line, and what has come of them is written down."""

from __future__ import annotations

from diloco_protocol import Code
from diloco_worker.session.events import RequestVersion, StepsLost
from diloco_worker.session.news import Arrival
from diloco_worker.sync.effects import Failed, Land, Look, PushEnded, Steps, Trouble
from diloco_worker.sync.fragment import Flight, Fragment, Landing, Outcome
from diloco_worker.sync.state import SyncState


def look(state: SyncState, *, now: bool = False) -> Steps[None]:
    """Take in what has come, and merge what is due (`now`: all of it). Never waits."""
    state.take_in((yield Look()))
    for fragment in state.fragments:
        yield from settle(state, fragment, now=now)


def settle(
    state: SyncState, fragment: Fragment, *, now: bool = False, touch_model: bool = True
) -> Steps[Outcome]:
    """Bring the model in line with what has come for a fragment. Never waits.

    Memory that runs out in it must not end the training: the outcome is FAILED, and the next look goes
    on where this one was broken off. `now` and `touch_model` are those of `Fragment.next_landing`.
    """
    landing = fragment.next_landing(state.step, now=now, touch_model=touch_model)
    if landing is not None and landing.touches_model:
        failed = yield Land(fragment.number, landing, state.step)
        if isinstance(failed, Failed):
            yield from _has_failed(fragment, failed)
            return Outcome.FAILED
    fragment.told_failure = None
    if landing is None:
        return Outcome.NOTHING
    fragment.landed(landing)
    yield from _write_down(state, fragment, landing)
    return landing.outcome


def _has_failed(fragment: Fragment, failed: Failed) -> Steps[None]:
    if not failed.is_torn:
        fragment.has_not_begun()
    text = (
        f"The model could not take in what came for fragment {fragment.number}: {failed.error!r}. "
        "It is tried again after each step, and what is in flight counts once."
    )
    if fragment.told_failure != text:
        fragment.told_failure = text
        yield Trouble(text, failed.error)


def _write_down(state: SyncState, fragment: Fragment, landing: Landing) -> Steps[None]:
    flight, arrival, rejection = landing.flight, landing.arrival, landing.rejection
    match landing.outcome:
        case Outcome.COUNTED:
            assert flight is not None and arrival is not None
            if landing.touches_model and not landing.is_load:
                is_auto = state.link.config.fragment_delay_auto
                late_after = flight.wait_at if is_auto else flight.apply_at
                state.metrics.late_merges += state.step > late_after
            yield from _has_counted(state, fragment, flight, arrival)
        case Outcome.SUPERSEDED:
            assert arrival is not None
            yield from _is_superseded(state, fragment, flight, arrival)
        case Outcome.REJECTED:
            assert flight is not None and rejection is not None
            state.metrics.rejected += 1
            yield PushEnded(flight.push_id, fragment.number, why=rejection.code)
            if rejection.code in (Code.LATE, Code.STALE):
                # Newer parameters are there: local moves onto them as soon as they have come.
                yield RequestVersion(fragment.number)
                yield Trouble(
                    f"The pseudo-gradient of {flight.steps} steps was dropped: "
                    f"{rejection.text} The model moves on to the newest global parameters."
                )
            else:
                yield Trouble(
                    "The broker dropped the last pseudo-gradient; the model is back at the "
                    "global parameters it started from, and takes part again at the next "
                    "boundary."
                )


def _has_counted(
    state: SyncState, fragment: Fragment, flight: Flight, arrival: Arrival
) -> Steps[None]:
    metrics = state.metrics
    metrics.rounds += 1
    metrics.staleness = fragment.staleness
    metrics.merge_delay = state.step - flight.began
    yield PushEnded(flight.push_id, fragment.number, arrival.version)
    state.lines.counted(flight.push, arrival, fragment.staleness, metrics.merge_delay)


def _is_superseded(
    state: SyncState, fragment: Fragment, flight: Flight | None, arrival: Arrival
) -> Steps[None]:
    """The model has given up what was made since the fragment's base."""
    steps = state.work(fragment).steps
    state.restart_work(fragment)
    yield StepsLost()
    if flight is not None:
        if arrival.released.ledger.names_whole(state.worker_id, flight.push_id):
            yield from _has_counted(state, fragment, flight, arrival)
        else:
            steps += flight.steps
            yield PushEnded(flight.push_id, fragment.number, why="superseded")
    yield Trouble(
        f"{steps} steps of fragment {fragment.number} are left out, so that nothing counts "
        f"twice: {arrival.superseding}. The model goes on from version {arrival.version}."
    )
