"""Waiting at a boundary until a flight has counted, or until it leads nowhere."""

from __future__ import annotations

from diloco_worker.session.connection import Phase
from diloco_worker.sync.effects import KeepAnchor, Look, Say, StandStill, Steps, Trouble, Wait
from diloco_worker.sync.fragment import Flight, Fragment, Outcome
from diloco_worker.sync.landings import settle
from diloco_worker.sync.patience import Patience
from diloco_worker.sync.state import SyncState


def wait_for(state: SyncState, fragment: Fragment) -> Steps[bool]:
    """Wait until the flight of a fragment has counted, and merge it. Returns whether it has.

    Waits while the broker shows signs of life. Giving up, training goes on with the delta in flight.
    When leaving, at most until that has taken too long, and the model stays as it is.
    """
    if fragment.flight is None:
        return False
    began, leaving = state.clock(), state.leaving
    patience = Patience(state.clock)
    yield StandStill()
    sight = yield Look()
    while True:
        state.take_in(sight)
        outcome = yield from settle(state, fragment, now=True, touch_model=leaving is None)
        flight = fragment.flight
        if flight is None or fragment.is_torn:
            break
        reason = why_not(state, fragment)
        left = None if leaving is None else leaving.until - state.clock()
        if leaving is not None and left is not None and left <= 0:
            reason = reason or f"it took longer than {leaving.limit:g} s"
        if reason is not None or not _is_worth_it(state, fragment.number, flight):
            break
        yield from say_line(state)
        if patience.is_due():
            what = "the round to close" if state.schedule.common else "the version with this push"
            yield Say(f"Waiting for {what}; {state.link.description}.", True)
        pause = patience.pause(min(look_again_in(state), state.lines.due_in))
        sight = yield Wait(pause if left is None else min(pause, left))
    state.metrics.seconds_waited += state.clock() - began
    if flight is not None and not fragment.is_torn:
        yield from _stop_waiting(state, fragment, flight, reason)
    return outcome is Outcome.COUNTED


def _is_worth_it(state: SyncState, number: int, flight: Flight) -> bool:
    """Whether waiting for a flight leads anywhere, if the broker is there.

    Who leaves waits at least until the flight is in, or what is missing of it is lost: of one that is
    put off nothing is taken before its round, which may be waiting for this worker. A broker that goes
    away may give up the round in which the chunks are.
    """
    link, leaving = state.link, state.leaving
    if state.schedule.may_wait(number) and not (leaving is not None and leaving.hasty):
        return True
    may_lack_chunks = link.is_restarting or flight.push_id not in link.uploaded | link.put_off
    return leaving is not None and may_lack_chunks


def _stop_waiting(
    state: SyncState, fragment: Fragment, flight: Flight, reason: str | None
) -> Steps[None]:
    link, is_leaving = state.link, state.leaving is not None
    round_ = state.schedule.rounds.get(fragment.number)
    if not is_leaving and not flight.let_go:
        yield KeepAnchor(fragment.number)
        flight.let_go = True
    if reason is None and flight.push_id in link.uploaded and is_leaving:
        yield Say(
            f"The pseudo-gradient of {flight.steps} steps is in at the broker, where it counts."
        )
    elif reason is None:
        if fragment.told_carried != (flight.push_id, round_):
            fragment.told_carried = (flight.push_id, round_)
            what_follows = ", which may go on without it" if is_leaving else "; training goes on"
            yield Say(
                f"The pseudo-gradient of {flight.steps} steps is carried into round {round_}"
                f"{what_follows}."
            )
    elif not is_leaving:
        yield Trouble(
            f"Training goes on with {flight.steps} steps in flight: {reason}. They are merged "
            "when the broker has counted them."
        )
    else:
        away = "; the broker restarts and was not back" if link.is_restarting else ""
        yield Trouble(f"Leaving with {flight.steps} steps in flight: {reason}{away}.")


def why_not(state: SyncState, fragment: Fragment | None = None) -> str | None:
    """Why a boundary waits no longer (for a flight of this fragment), as a part of a sentence.

    None while it waits.
    """
    link, options, is_leaving = state.link, state.options, state.leaving is not None
    flight = fragment.flight if fragment is not None else None
    if link.asked_to_stop is not None and not is_leaving:
        return link.asked_to_stop
    if link.has_ended:
        return f"the link has ended ({link.last_error})"
    if link.over is not None:
        return f"the broker asked this worker to leave ({link.over})"
    if link.is_restarting and not is_leaving:
        return "the broker restarts"
    if link.phase is Phase.REFUSED:
        return f"the broker refuses this worker ({link.refusal})"
    if link.silence is not None and link.silence >= options.timeout:
        return f"no sign of life from {link.address} for {link.silence:.0f} s"
    if flight is not None and not flight.let_go:
        broken = link.reconnections - flight.reconnections
        if broken > options.max_sync_retries:
            return f"the connection broke {broken} times at this boundary"
    return None


def look_again_in(state: SyncState) -> float:
    """Seconds until silence alone ends the waiting, if nothing is heard."""
    return max(0.0, state.options.timeout - (state.link.silence or 0.0))


def say_line(state: SyncState, *, at_once: bool = False) -> Steps[None]:
    """Log the line of the pushes that have counted, if it is time to."""
    line = state.lines.line(state.metrics.seconds_waited, at_once=at_once)
    if line is not None:
        yield Say(line)
