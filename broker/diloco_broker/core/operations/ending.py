"""How the run ends, and how the broker stops.

The options of a run set its end: so many rounds, tokens, or so much time.

The round in which that is reached is the last one; with fragments tokens and time end a run with the
last fragment of a cycle, so that all have had the same steps. Workers are told which it is, then that
the run is over: each ends once its own work in it is back. Who does neither is not waited for: what
is whole when the last round's time is up makes that round, and only the rest is left out.

A broker that is to stop finishes a closing round, saves what the last checkpoint lacks, and ends.
"""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.members.members import Member
from diloco_broker.core.operations import holding
from diloco_broker.core.rounds.modes import rules_of
from diloco_broker.core.state import RunState, Stopping
from diloco_broker.core.versions import checkpoints
from diloco_protocol.errors import Code
from diloco_protocol.messages import Error, Notice
from diloco_protocol.ranges import MOST

# The last round may take twice as long as the one before it, and at least so long. Where no round was
# made in this life of the broker nobody knows how long one takes, and in asynchronous mode any worker
# may make it: then it is waited for like any other.
LAST_ROUND_S = 60.0
# How long workers have, once the run is over, to get the last version, save, and leave.
LEAVE_WITHIN_S = 60.0
OVER = "The run is over: "


def tick(state: RunState) -> effects.Effects:
    """Time has passed: it is counted, and what was waited for may be here.

    Nothing ends while the run is held. A hub whose lease has lapsed may have been replaced: if it ended
    all the same, it and its standby would both have a final model.
    """
    _count_time(state)
    ending, round_ = state.ending, state.round
    if round_ is None or state.stopping is not None or holding.is_held(state):
        return
    if not ending.is_over:
        yield from look(state, round_.number - 1)
        yield from tell_all(state)
        yield from refuse_the_rest(state)
    is_late = ending.until is not None and state.run_time >= ending.until
    if ending.is_over and not ending.is_asked_to_end and (is_late or not len(state.members)):
        ending.is_asked_to_end = True
        if len(state.members):
            names = ", ".join(member.worker_id for member in state.members)[:300]
            yield effects.warning(f"The run ends without waiting longer for {names}.")
        yield effects.End(ending.why or "", is_complete=True)


def look(state: RunState, number: int) -> effects.Effects:
    """Round `number` has been made (-1: none): was it the last one, or is the next?"""
    ending, config, totals = state.ending, state.config, state.totals
    made = number + 1
    if ending.is_over:
        return
    ending.why, last = _end(state, made)
    if last is None:
        forget(state)
        return
    if last < made:
        if not state.closing or made > state.closing.number:
            ending.is_over, ending.until = True, state.run_time + LEAVE_WITHIN_S
            yield effects.info(
                f"The run is over: {ending.why}. It has made {made} rounds, from {totals.tokens} "
                f"tokens, in {totals.open_s} s."
            )
        return
    pieces = 1 if config.is_async else config.num_fragments
    if last - made < pieces and not ending.is_announced:
        ending.is_announced = True
        text = f"Round {last} is the last one: {ending.why}."
        yield effects.info(text)
        for member in state.members:
            yield member.tell(Notice("last_round", text, round=last))
    ending.last = last
    before = None if config.is_async else state.last_report
    if before is None or not ending.is_announced:
        return
    if ending.until is None:
        ending.until = state.run_time + max(LAST_ROUND_S, 2 * before.seconds * pieces)
    elif state.run_time >= ending.until:
        yield from _time_is_up(state)


def _last_round_s(state: RunState) -> float:
    """How long the last round may take."""
    return max(LAST_ROUND_S, 2 * state.last_report.seconds if state.last_report else 0.0)


def _time_is_up(state: RunState) -> effects.Effects:
    """The last round is made of what is whole; what has begun gets more time, once."""
    ending, round_ = state.ending, state.round
    assert round_ is not None
    if round_.has_work_to_look_at:
        return  # at the next tick
    is_new = ending.extended != round_.number
    if state.closing is not None and (is_new or round_.stepped.is_full):
        ending.extended, ending.until = round_.number, state.run_time + _last_round_s(state)
        return
    here = (member.worker_id for member in state.members)
    ending.without = tuple(name for name in here if not round_.has_all_of(name))
    for name in ending.without:
        yield from rules_of(state).do_without(state, name)


def settle(state: RunState) -> effects.Effects:
    """It is decided whether a last round whose time is up closes: if not, the run ends without it."""
    ending, round_ = state.ending, state.round
    without, ending.without = ending.without, None
    assert round_ is not None
    if state.closing is None and holding.is_held(state):
        return  # the lease has lapsed meanwhile
    if state.closing is None:
        ending.is_over, ending.until = True, state.run_time + LEAVE_WITHIN_S
        yield effects.warning(
            f"The last round, {round_.number}, could not be made within the time it had. "
            "The run is over."
        )
        yield from tell_all(state)
        yield from refuse_the_rest(state)
        return
    ending.until = state.run_time + _last_round_s(state)  # with fragments, of the next
    if without:
        text = f"The time of the last round is up: round {round_.number} is made without "
        text += ", ".join(without)[:300] + "."
        yield effects.warning(text)
        for member in filter(None, map(state.members.named, without)):
            yield from _refuse(member, text, round_.fragment)


def forget(state: RunState) -> None:
    """The options have changed: what was announced no longer holds."""
    if not state.ending.is_over:
        state.ending.last = state.ending.until = None
        state.ending.is_announced = False


def _end(state: RunState, made: int) -> tuple[str | None, int | None]:
    """Why the run ends, and with which round; None while that cannot be told."""
    config, totals = state.config, state.totals
    ends: list[tuple[int, str]] = []
    if config.max_rounds is not None:
        ends.append((config.max_rounds - 1, f"--max-rounds is {config.max_rounds}"))
    if config.token_budget is not None and totals.tokens >= config.token_budget:
        ends.append((_cycle_end(state, made - 1), f"--token-budget is {config.token_budget}"))
    if config.max_seconds is not None and totals.open_s >= config.max_seconds:
        was_over = state.totals_before.open_s >= config.max_seconds  # in an earlier life
        ends.append((_cycle_end(state, made - was_over), f"--max-time is {config.max_time}"))
    if not ends:
        return None, None
    last, why = min(ends)
    if state.ending.last is not None and last > state.ending.last >= made - 1:
        last = state.ending.last  # what is announced is not put off by the next reason
    return why, last


def _cycle_end(state: RunState, number: int) -> int:
    """The round with which the cycle of fragments ends that this round belongs to."""
    if state.config.is_async:
        return number
    pieces = state.config.num_fragments
    return number + (pieces - 1 - number % pieces)


def tell_all(state: RunState) -> effects.Effects:
    """If the run has just become over, the workers are told."""
    for member in state.members:
        yield from tell(state, member)


def refuse_the_rest(state: RunState) -> effects.Effects:
    """If the run has just become over, nothing more is taken in."""
    if not state.ending.is_over:
        return
    for member in state.members:
        text = f"{OVER}{state.ending.why}. This work came after its last round."
        yield from _refuse(member, text)


def _refuse(member: Member, text: str, fragment: int | None = None) -> effects.Effects:
    """Nothing that is under way of this worker (and fragment) counts any more."""
    for push in member.unfinished_pushes():
        if fragment not in (None, push.fragment):
            continue
        member.uploads.void(push.fragment, push.push_id)
        member.take_deferred(push.fragment)
        yield member.tell(Error(Code.LATE, text, push_id=push.push_id, about="push"))


def tell(state: RunState, member: Member) -> effects.Effects:
    """A worker that is here, or comes, is told if the run is over."""
    if state.ending.is_over and not state.ending.is_asked_to_end:
        yield member.tell(Notice("over", f"{OVER}{state.ending.why}."))


def _count_time(state: RunState) -> None:
    ending, totals = state.ending, state.totals
    counts = state.round is not None and not ending.is_over and bool(len(state.members))
    if counts and ending.timed_at is not None:
        ending.rest_s += state.run_time - ending.timed_at
        whole = int(ending.rest_s)
        ending.rest_s -= whole
        totals.open_s = min(totals.open_s + whole, MOST)
    ending.timed_at = state.run_time if counts else None


# The broker stops.


def stop(state: RunState, event: events.Stop) -> effects.Effects:
    """From now on no round closes any more; one that is closing has until the deadline."""
    reason = event.reason.rstrip(".")  # it may be a sentence
    state.stopping = Stopping(reason, event.restarting, state.now + events.FINISH_WITHIN_S)
    is_over = "The run is over, and workers are told so."
    then = "Workers train on until a broker is back." if event.restarting else is_over
    yield effects.info(f"Stopping: {reason}. {then}")
    if event.restarting and state.paused_at is not None:
        yield effects.warning(
            "The pause ends with this broker: the run goes on when it is restarted."
        )
    for member in state.members:
        yield member.tell(farewell(state.stopping))
    for relay in state.relays:
        yield effects.Send(relay.control, farewell(state.stopping))


def farewell(stopping: Stopping) -> Notice:
    if stopping.restarting:
        return Notice("restarting", f"The broker restarts: {stopping.reason}.")
    return Notice("shutdown", f"The run is over: {stopping.reason}.")


def finish_if_due(state: RunState, stopping: Stopping) -> effects.Effects:
    """Once no round is closing, or time is up: save what the last checkpoint lacks, and end."""
    if stopping.is_finished:
        return
    save, round_ = None, state.round
    if state.closing:
        if state.now < stopping.until:
            return
        text = "The closing round could not be finished in time."
        yield effects.warning(text, is_listed=False)
    elif round_ is not None and state.config.save_dir and state.saving.number != round_.number:
        save = checkpoints.save(state, round_.number)
    stopping.is_finished = True
    yield effects.Finish(save)
