"""How the run ends, and how the broker stops.

The options of a run limit its rounds, its tokens, or its time.

The round that reaches a limit is the last one. With fragments, a limit of tokens or time ends the run at
the last fragment of a cycle, so that all fragments have made the same steps. The broker announces the
last round, then the end of the run; each worker stops once its own work in that round is released. The
last round has a deadline: the pushes that are complete by then make its version, the others are dropped.

A stopping broker finishes a closing round, saves the state that the last checkpoint lacks, and exits.
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

# Seconds that the last round may take at least; it may take twice as long as the round before it. It has
# no deadline if this incarnation of the broker has closed no round, since the length of one is unknown,
# or in asynchronous mode, where any worker may complete it.
LAST_ROUND_S = 60.0
# Seconds that workers have to receive the last version, save, and leave once the run is over.
LEAVE_WITHIN_S = 60.0
OVER = "The run is over: "


def tick(state: RunState) -> effects.Effects:
    """Count the time, and end the run if that is due.

    A held run does not end. A hub without a lease may have been replaced: if it ended its run, it and
    its standby would both have a final model.
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
            yield effects.warning(f"The run ends; no longer waiting for {names}.")
        yield effects.End(ending.why or "", is_complete=True)


def look(state: RunState, number: int) -> effects.Effects:
    """Check whether round `number`, which has closed (-1: none), or the next one is the last."""
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
                f"The run is over: {ending.why}. It made {made} rounds with {totals.tokens} tokens in "
                f"{totals.open_s} s."
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
    """Seconds that the last round may take."""
    return max(LAST_ROUND_S, 2 * state.last_report.seconds if state.last_report else 0.0)


def _time_is_up(state: RunState) -> effects.Effects:
    """Close the last round with the complete pushes; a closing round gets more time, once."""
    ending, round_ = state.ending, state.round
    assert round_ is not None
    if round_.has_work_to_look_at:
        return  # it is checked again at the next tick
    is_new = ending.extended != round_.number
    if state.closing is not None and (is_new or round_.stepped.is_full):
        ending.extended, ending.until = round_.number, state.run_time + _last_round_s(state)
        return
    here = (member.worker_id for member in state.members)
    ending.without = tuple(name for name in here if not round_.has_all_of(name))
    for name in ending.without:
        yield from rules_of(state).do_without(state, name)


def settle(state: RunState) -> effects.Effects:
    """End the run if its last round did not close at the deadline, or report the workers left out."""
    ending, round_ = state.ending, state.round
    without, ending.without = ending.without, None
    assert round_ is not None
    if state.closing is None and holding.is_held(state):
        return  # the lease lapsed in the meantime
    if state.closing is None:
        ending.is_over, ending.until = True, state.run_time + LEAVE_WITHIN_S
        yield effects.warning(
            f"The last round, {round_.number}, has too few complete pushes at its deadline. The run "
            "is over."
        )
        yield from tell_all(state)
        yield from refuse_the_rest(state)
        return
    ending.until = state.run_time + _last_round_s(state)  # with fragments, for the next one
    if without:
        text = f"Round {round_.number}, the last one, reached its deadline and closes without "
        text += ", ".join(without)[:300] + "."
        yield effects.warning(text)
        for member in filter(None, map(state.members.named, without)):
            yield from _refuse(member, text, round_.fragment)


def forget(state: RunState) -> None:
    """Withdraw the announced end after a change of the options."""
    if not state.ending.is_over:
        state.ending.last = state.ending.until = None
        state.ending.is_announced = False


def _end(state: RunState, made: int) -> tuple[str | None, int | None]:
    """Why the run ends, and its last round; None while these are unknown."""
    config, totals = state.config, state.totals
    ends: list[tuple[int, str]] = []
    if config.max_rounds is not None:
        ends.append((config.max_rounds - 1, f"--max-rounds is {config.max_rounds}"))
    if config.token_budget is not None and totals.tokens >= config.token_budget:
        ends.append((_cycle_end(state, made - 1), f"--token-budget is {config.token_budget}"))
    if config.max_seconds is not None and totals.open_s >= config.max_seconds:
        was_over = state.totals_before.open_s >= config.max_seconds  # in an earlier incarnation
        ends.append((_cycle_end(state, made - was_over), f"--max-time is {config.max_time}"))
    if not ends:
        return None, None
    last, why = min(ends)
    if state.ending.last is not None and last > state.ending.last >= made - 1:
        last = state.ending.last  # another reason does not postpone the announced round
    return why, last


def _cycle_end(state: RunState, number: int) -> int:
    """The last round of the fragment cycle that this round belongs to."""
    if state.config.is_async:
        return number
    pieces = state.config.num_fragments
    return number + (pieces - 1 - number % pieces)


def tell_all(state: RunState) -> effects.Effects:
    """Notify all workers if the run is over."""
    if state.ending.is_over:
        for member in state.members:
            yield from tell(state, member)


def refuse_the_rest(state: RunState) -> effects.Effects:
    """Refuse all unfinished pushes if the run is over."""
    if not state.ending.is_over:
        return
    for member in state.members:
        text = f"{OVER}{state.ending.why}. This push is too late for its last round."
        yield from _refuse(member, text)


def _refuse(member: Member, text: str, fragment: int | None = None) -> effects.Effects:
    """Refuse the unfinished pushes of this worker, of one fragment or of all."""
    for push in member.unfinished_pushes():
        if fragment not in (None, push.fragment):
            continue
        member.uploads.void(push.fragment, push.push_id)
        member.take_deferred(push.fragment)
        yield member.tell(Error(Code.LATE, text, push_id=push.push_id, about="push"))


def tell(state: RunState, member: Member) -> effects.Effects:
    """Notify this worker if the run is over."""
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
    """Stop closing rounds, and give one that is closing until the deadline."""
    reason = event.reason.rstrip(".")  # some are sentences
    state.stopping = Stopping(reason, event.restarting, state.now + events.FINISH_WITHIN_S)
    is_over = "The run is over; notifying the workers."
    then = "Workers continue to train until a broker is back." if event.restarting else is_over
    yield effects.info(f"Stopping: {reason}. {then}")
    if event.restarting and state.paused_at is not None:
        yield effects.warning(
            "The restart ends the pause: the run continues when a broker is back."
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
    """Save and exit, unless a round is closing and the deadline is not over."""
    if stopping.is_finished:
        return
    save, round_ = None, state.round
    if state.closing:
        if state.now < stopping.until:
            return
        text = f"Round {state.closing.number} could not be finished before the broker stops."
        yield effects.warning(text, is_listed=False)
    elif round_ is not None and state.config.save_dir and state.saving.number != round_.number:
        save = checkpoints.save(state, round_.number)
    stopping.is_finished = True
    yield effects.Finish(save)
