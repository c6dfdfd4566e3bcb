"""What happens after each optimizer step: freezing, waiting and merging, over all fragments. Pure.

Between its slot and its apply point a fragment costs the training thread nothing: the link sends and
receives meanwhile. `schedule` says whose turn it is and who may be waited for, `fragment` what becomes
of one fragment, `freezing` how a delta begins, `waiting` how long it is waited for, and `landings` what
is written down when it ends. Training begins with `look` of `landings`, or with `resumption`.

All that can be asked for are generators that yield effects (`effects`). `training.driver` carries them
out for the hook, and the simulator of the tests for a training thread without tensors.
"""

from __future__ import annotations

from diloco_worker.session.events import RequestVersion, StepsLost
from diloco_worker.session.news import Arrival
from diloco_worker.sync.effects import Look, Say, Steps, Trouble, Wait
from diloco_worker.sync.fragment import Flight, Fragment, longest_wait
from diloco_worker.sync.freezing import beat, freeze, offer, offer_frozen, read_reports
from diloco_worker.sync.landings import look, settle
from diloco_worker.sync.patience import HASTY_S, Leaving, Patience
from diloco_worker.sync.schedule import TurnState
from diloco_worker.sync.state import SyncState
from diloco_worker.sync.waiting import look_again_in, say_line, wait_for, why_not


def after_step(state: SyncState, step: int) -> Steps[None]:
    """An optimizer step has been taken. At the end training may go on."""
    state.step = step
    merged = state.metrics.rounds
    yield from look(state)
    yield from offer_frozen(state)
    for fragment in state.by_age():
        flight = fragment.flight
        if flight is not None and step >= flight.wait_at and not flight.let_go:
            yield from wait_for(state, fragment)
    state.set_pace()
    if state.schedule.is_due(step) and not state.link.has_ended:
        yield from _slot(state)
    if state.metrics.rounds != merged:
        # Displays count inner steps from here; the next heartbeat may be half a minute away.
        yield from beat(state)
    yield from say_line(state)


def force(state: SyncState) -> Steps[bool]:
    """Take the next P turns now. Returns whether all of their deltas are in a version."""
    counted, taken = 0, False
    for _ in state.fragments:
        yield from look(state)
        yield from offer_frozen(state)
        turn = yield from _take_turn(state)
        if turn is None:
            break
        taken = True
        for fragment in turn:
            counted += yield from wait_for(state, fragment)
    if taken:
        state.schedule.restart(state.step)
    return counted == len(state.fragments)


def load(state: SyncState) -> Steps[bool]:
    """Put the newest version of every fragment into the model; False when they do not come."""
    yield from look(state, now=True)
    for fragment in state.fragments:
        yield RequestVersion(fragment.number)
    newest: dict[int, Arrival] = {}
    patience = Patience(state.clock)
    sight = yield Look()
    while True:
        for number, arrival in state.take_in(sight).arrivals.items():
            newest[number] = arrival.after(newest.get(number))
        if all(fragment.number in newest for fragment in state.fragments):
            break
        reason = why_not(state)
        if reason is not None:
            yield Trouble(f"The newest parameters could not be loaded: {reason}.")
            return False
        if patience.is_due():
            yield Say(f"Waiting for the newest parameters; {state.link.description}.", True)
        sight = yield Wait(patience.pause(look_again_in(state)))
    for fragment in state.fragments:
        if fragment.rejection is not None or fragment.is_torn:
            yield from settle(state, fragment)
        if not fragment.is_torn:
            fragment.load(newest[fragment.number])
            yield from settle(state, fragment)
    # The steps since the last freeze are gone, and so is what was reported with them.
    yield StepsLost()
    yield from read_reports(state)
    for fragment in state.fragments:
        state.restart_work(fragment)
    state.schedule.restart(state.step)
    return not state.is_torn


def leave(state: SyncState, *, hasty: bool = False) -> Steps[None]:
    """Wait for what is in flight, at most `timeout` seconds in all. The model stays as it is.

    A flight of a later round is not waited for, but its chunks are, so that it counts there. `hasty`:
    only the chunks of each flight are waited for, and not for long.
    """
    timeout = state.options.timeout
    limit = min(HASTY_S, timeout) if hasty else timeout
    state.leaving = Leaving(state.clock() + limit, limit, hasty)
    for fragment in state.fragments:
        if fragment.is_torn:
            yield from settle(state, fragment)
    for fragment in state.by_age():
        yield from wait_for(state, fragment)
    yield from say_line(state, at_once=True)


def _slot(state: SyncState) -> Steps[None]:
    """A slot is due: take a turn, and wait for its reply where that is to be merged at once."""
    turn = yield from _take_turn(state)
    if turn is None:
        return  # it stays due
    state.schedule.use_slot(state.step)
    for fragment in turn:
        if fragment.flight is not None and state.step >= fragment.flight.wait_at:
            yield from wait_for(state, fragment)
    state.set_pace()


def _take_turn(state: SyncState) -> Steps[list[Fragment] | None]:
    """Push the fragment whose turn it is. Returns the fragment, if it is in flight for this turn now.

    None when the turn cannot be taken yet, because the fragment's last flight is still under way.
    """
    schedule = state.schedule
    while schedule.turn() is TurnState.BUSY:
        fragment = state.fragments[schedule.fragment]
        if why_not(state, fragment) is not None or not (yield from wait_for(state, fragment)):
            return None
    fragment = state.fragments[schedule.fragment]
    match schedule.turn():
        case TurnState.PAST:
            schedule.skip()
            return []
        case TurnState.TAKEN:
            assert fragment.flight is not None
            _wait_again(state, fragment.flight)
            schedule.skip()
            return [fragment]
        case _:
            yield from settle(state, fragment, now=True)
            if fragment.is_torn:
                return None
            if not (yield from freeze(state, fragment)):
                return []
            yield from offer(state, fragment)
            return [fragment]


def _wait_again(state: SyncState, flight: Flight) -> None:
    """The flight counts as if it were frozen behind this step, as to when it is waited for."""
    flight.let_go = False
    flight.wait_at = state.step + longest_wait(state.link.config, state.schedule.sync_every)
    flight.reconnections = state.link.reconnections
