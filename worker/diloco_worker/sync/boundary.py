"""What happens after each optimizer step: freezing, waiting and merging, over all fragments.

With P fragments there are P *slots* in each cycle of H steps (Streaming DiLoCo, Douillard et al. 2025,
arXiv 2501.18512). At a slot a fragment's delta is frozen and offered to the broker, and
`fragment.merge_steps` says after which step its reply is merged. Meanwhile the link sends and receives
at no cost to the training thread. `schedule` says whose turn it is and who may be waited for.

A boundary reads and changes a `SyncState`, and acts through its ports. It may be interrupted anywhere
(Ctrl-C, an exception): unfinished decisions are carried out after the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_protocol import Code, RunConfig
from diloco_protocol.messages import BUFFERS, WEIGHTS, Push
from diloco_worker.session.connection import Phase
from diloco_worker.session.events import RequestVersion, StepsLost, VerifyPushes
from diloco_worker.session.news import Arrival, Work
from diloco_worker.sync.fragment import (
    Fragment,
    InFlight,
    Merge,
    Outcome,
    compared,
    known_pushes,
    merge_steps,
)
from diloco_worker.sync.ports import MergeFailed, NonFinite
from diloco_worker.sync.schedule import SchedulePlace, TurnState
from diloco_worker.sync.state import HASTY_S, Leaving, Patience, SyncState

# Called by the hook.


async def after_step(state: SyncState, step: int) -> None:
    """An optimizer step was made. Returns when training may go on."""
    state.step = step
    if state.is_calm and not state.ports.has_news():
        return
    counted = state.metrics.pushes
    await poll(state)
    _offer_frozen(state)
    for fragment in state.by_age():
        if _must_wait(state, fragment):
            await _wait_for(state, fragment)
    state.set_pace()
    if state.schedule.is_due(step) and not state.link.has_ended:
        await _use_slot(state)
    if state.metrics.pushes != counted:
        # For displays: the next heartbeat may be half a minute away.
        _beat(state)
    _log_counted(state)


async def resume(
    state: SyncState, place: SchedulePlace, cycle_start: int, arrivals: Sequence[Arrival]
) -> None:
    """Before the first step, resume the cycle and the pushes of a previous process.

    `arrivals` are the broker's versions.
    """
    schedule, fragments = state.schedule, state.fragments
    known = [known_pushes(state.worker_id, fragment) for fragment in fragments]
    for fragment, arrival in zip(fragments, arrivals, strict=True):
        news = compared(state.worker_id, fragment, arrival)
        if news is not None:
            fragment.take_in(news)
    schedule.resume(place, state.step, cycle_start, [each.number for each in state.by_age()])
    state.set_pace()
    kept = [f for f in fragments if f.reply is None or not f.reply.superseding]
    await poll(state)
    for fragment in kept:
        state.ports.notify(VerifyPushes(fragment.number, known[fragment.number]))
    pushes_in_flight = [each for each in state.by_age() if not each.is_over]
    for fragment in pushes_in_flight:
        offer(state, fragment, is_new=False)
    state.ports.log(
        f"Going on from a checkpoint at step {state.step}, {schedule.position(state.step)} steps into "
        f"the cycle, with {len(pushes_in_flight)} deltas in flight."
    )


async def force(state: SyncState) -> bool:
    """Take the next P turns now. Returns whether all of their deltas are in a version."""
    counted, has_taken = 0, False
    for _ in state.fragments:
        await poll(state)
        _offer_frozen(state)
        turn = await _take_turn(state)
        if turn is None:
            break
        has_taken = True
        for fragment in turn:
            counted += await _wait_for(state, fragment)
    if has_taken:
        state.schedule.restart(state.step)
    return counted == len(state.fragments)


async def load(state: SyncState) -> bool:
    """Put the newest version of every fragment into the model; False when they do not arrive."""
    ports = state.ports
    await poll(state, now=True)
    for fragment in state.fragments:
        ports.notify(RequestVersion(fragment.number))
    newest: dict[int, Arrival] = {}
    patience = Patience(state.ports.clock)
    found = ports.poll()
    while True:
        for number, arrival in state.take_in(found).arrivals.items():
            newest[number] = arrival.after(newest.get(number))
        if all(fragment.number in newest for fragment in state.fragments):
            break
        reason = _why_not(state)
        if reason is not None:
            ports.trouble(f"The newest parameters could not be loaded: {reason}.")
            return False
        if patience.is_due():
            what = f"Waiting for the newest parameters; {state.link.description}."
            ports.log(what, is_warning=True)
        found = await ports.wait(patience.pause(_silent_in(state)))
    for fragment in state.fragments:
        if fragment.rejection is not None or fragment.is_partial:
            await settle(state, fragment)
        if not fragment.is_partial:
            fragment.load(newest[fragment.number])
            await settle(state, fragment)
    # The steps since the last freeze are gone, with their reports.
    ports.notify(StepsLost())
    state.totals = ports.read_reports()
    for fragment in state.fragments:
        state.restart_work(fragment)
    state.schedule.restart(state.step)
    return not state.is_partial


async def leave(state: SyncState, *, hasty: bool = False) -> None:
    """Wait for pushes in flight, at most `timeout` seconds in all. The model stays as it is.

    A push of a later round is not awaited, but its upload is, so that it counts there. `hasty`: wait
    only for the uploads, and not for long.
    """
    timeout = state.options.timeout
    limit = min(HASTY_S, timeout) if hasty else timeout
    state.leaving = Leaving(state.ports.clock() + limit, limit, hasty)
    for fragment in state.fragments:
        if fragment.is_partial:
            await settle(state, fragment)
    for fragment in state.by_age():
        await _wait_for(state, fragment)
    _log_counted(state, at_once=True)


async def poll(state: SyncState, *, now: bool = False) -> None:
    """Take in arrivals, and merge what is due (`now`: all of it). Never waits."""
    state.take_in(state.ports.poll())
    for fragment in state.fragments:
        await settle(state, fragment, now=now)


# Slots and turns.


async def _use_slot(state: SyncState) -> None:
    """A slot is due: take a turn, and wait for its reply where that is merged at once."""
    turn = await _take_turn(state)
    if turn is None:
        return  # it stays due
    state.schedule.use_slot(state.step)
    for fragment in turn:
        if _must_wait(state, fragment):
            await _wait_for(state, fragment)
    state.set_pace()


async def _take_turn(state: SyncState) -> list[Fragment] | None:
    """Push the fragment whose turn it is. Returns it if it is in flight for this turn now.

    None when the turn cannot be taken yet, because the fragment's last push is still in flight.
    """
    schedule = state.schedule
    while schedule.turn() is TurnState.BUSY:
        fragment = state.fragments[schedule.fragment]
        if _why_not(state, fragment) is not None or not await _wait_for(state, fragment):
            return None
    fragment = state.fragments[schedule.fragment]
    match schedule.turn():
        case TurnState.PAST:
            schedule.skip()
            return []
        case TurnState.TAKEN:
            assert fragment.in_flight is not None
            _wait_again(state, fragment.in_flight)
            schedule.skip()
            return [fragment]
        case _:
            await settle(state, fragment, now=True)
            if fragment.is_partial:
                return None
            if not await _freeze(state, fragment):
                return []
            offer(state, fragment)
            return [fragment]


def _wait_again(state: SyncState, in_flight: InFlight) -> None:
    """Restart the deadline of the push at this step."""
    in_flight.is_detached = False
    _, in_flight.wait_at = merge_steps(state.link.config, state.schedule.sync_every, state.step)
    in_flight.reconnections = state.link.reconnections


# Freezing and offering.


async def _freeze(state: SyncState, fragment: Fragment) -> bool:
    """Freeze the delta since the fragment's last freeze. Returns whether it can be sent."""
    began, config, ports = state.ports.clock(), state.link.config, state.ports
    state.totals = ports.read_reports()
    work = state.work(fragment)
    _warn_of_weights(state, work, config)
    ports.check_model()
    _beat(state)
    dtype = state.options.wire_dtype or config.wire_dtype
    frozen = await ports.freeze(
        Push(
            session=b"",
            push_id=ports.draw(),
            fragment=fragment.number,
            chunks=fragment.chunks,
            wire_dtype=dtype,
            base=fragment.version,
            steps=work.steps,
            tokens=work.tokens,
            samples=work.samples,
            loss=work.loss,
            buffers=BUFFERS,
        )
    )
    state.restart_work(fragment)
    state.metrics.seconds_waited += state.ports.clock() - began
    if isinstance(frozen, Push):
        merge_at, wait_at = merge_steps(config, state.schedule.sync_every, state.step)
        fragment.froze(InFlight(frozen, state.step, merge_at, wait_at))
        _warn_of_zeros(state, fragment, frozen)
        return True
    state.metrics.rejected += 1
    ports.trouble(
        f"The pseudo-gradient of {work.steps} steps is not finite in {_where(frozen, dtype)}; it "
        "was not sent, and the model is back at the last global parameters. The other workers wait "
        "until the next boundary. If it happens again, lower the learning rate or clip gradients."
    )
    # NaN in one fragment has spread through the others.
    ports.notify(StepsLost())
    for each in state.fragments:
        each.restore()
        await settle(state, each)
        state.restart_work(each)
    return False


def offer(state: SyncState, fragment: Fragment, *, is_new: bool = True) -> None:
    """Hand a frozen push to the link. Interrupted, it is done again."""
    in_flight, schedule = fragment.in_flight, state.schedule
    assert in_flight is not None
    if is_new and schedule.fragment == fragment.number and schedule.turn() is TurnState.FREE:
        schedule.push()
    reconnections = state.ports.offer(in_flight, is_new=is_new)
    if is_new:
        in_flight.reconnections = reconnections
    in_flight.is_offered = True


def _offer_frozen(state: SyncState) -> None:
    """Offer deltas that were frozen but not offered, because of an interrupt."""
    for fragment in state.fragments:
        in_flight = fragment.in_flight
        if in_flight is not None and not in_flight.is_offered and not fragment.is_over:
            offer(state, fragment)
            if state.schedule.is_due(in_flight.began):
                state.schedule.use_slot(in_flight.began)


def _beat(state: SyncState) -> None:
    if state.options.heartbeat_interval != 0:
        state.ports.beat()


def _warn_of_weights(state: SyncState, work: Work, config: RunConfig) -> None:
    counts = {"tokens": work.tokens, "samples": work.samples}
    missing = [name for name in WEIGHTS.get(config.weight_by, ()) if counts.get(name, 1) <= 0]
    if missing and not state.has_warned_of_weights:
        state.has_warned_of_weights = True
        name = missing[0]
        state.ports.trouble(
            f"This run weighs each contribution by its {name}, and none were reported; call "
            f"report({name}=...) after each step, or the broker will reject this worker's pushes."
        )


def _warn_of_zeros(state: SyncState, fragment: Fragment, push: Push) -> None:
    """Warn once when a fragment was pushed twice in a row without having moved."""
    if push.norm != 0:  # or not known
        fragment.zeros = 0
        state.has_warned_of_zeros &= any(each.zeros for each in state.fragments)
        return
    fragment.zeros += push.steps > 0  # without a step, zeros are expected
    if push.steps and fragment.zeros >= 2 and not state.has_warned_of_zeros:
        state.has_warned_of_zeros = True
        whose = f"of fragment {fragment.number} " if len(state.fragments) > 1 else ""
        state.ports.trouble(
            f"The pseudo-gradient {whose}was all zeros twice in a row, the last time after "
            f"{push.steps} optimizer steps: nothing is learnt there. Look for a learning rate of 0 (a "
            "scheduler), frozen parameters, an optimizer over other parameters than the model's, or "
            "updates too small for the model's dtype."
        )


def _where(bad: NonFinite, dtype: str) -> str:
    if bad.is_buffer:
        return (
            f"{bad.name}, a buffer (one that is to hold infinities must hold them from the start)"
        )
    hint = " after rounding to fp16, whose largest value is 65504"
    return bad.name + (hint if dtype == "fp16" else "")


# Waiting.


def _must_wait(state: SyncState, fragment: Fragment) -> bool:
    """Whether training waits for this fragment's reply after this step."""
    in_flight = fragment.in_flight
    return in_flight is not None and in_flight.is_awaited(state.step)


async def _wait_for(state: SyncState, fragment: Fragment) -> bool:
    """Wait until the in-flight push of a fragment has counted, and merge it. Returns whether it has.

    Waits while the broker shows signs of life; then training goes on with the delta in flight. When
    leaving, at most until the time limit, and the model stays as it is.
    """
    if fragment.in_flight is None:
        return False
    began, leaving, ports = state.ports.clock(), state.leaving, state.ports
    patience = Patience(state.ports.clock)
    ports.show_waiting()
    found = ports.poll()
    while True:
        state.take_in(found)
        outcome = await settle(state, fragment, now=True, touch_model=leaving is None)
        in_flight = fragment.in_flight
        if in_flight is None or fragment.is_partial:
            break
        reason = _why_not(state, fragment)
        left = None if leaving is None else leaving.until - state.ports.clock()
        if leaving is not None and left is not None and left <= 0:
            reason = reason or f"it took longer than {leaving.limit:g} s"
        if reason is not None or not _is_worth_it(state, fragment.number, in_flight):
            break
        _log_counted(state)
        if patience.is_due():
            what = "the round to close" if state.schedule.common else "the version with this push"
            ports.log(f"Waiting for {what}; {state.link.description}.", is_warning=True)
        pause = patience.pause(min(_silent_in(state), state.lines.due_in))
        found = await ports.wait(pause if left is None else min(pause, left))
    state.metrics.seconds_waited += state.ports.clock() - began
    if in_flight is not None and not fragment.is_partial:
        _stop_waiting(state, fragment, in_flight, reason)
    return outcome is Outcome.COUNTED


def _is_worth_it(state: SyncState, number: int, in_flight: InFlight) -> bool:
    """Whether waiting for an in-flight push can succeed while the broker is connected.

    A worker that leaves waits at least until the push was uploaded, or the rest of it is lost. A
    deferred push is the exception: the broker accepts it in a later round. A restarting broker may
    abandon the round that has the chunks.
    """
    link, leaving = state.link, state.leaving
    if state.schedule.may_wait(number) and not (leaving is not None and leaving.hasty):
        return True
    may_lack_chunks = link.is_restarting or in_flight.push_id not in link.uploaded | link.put_off
    return leaving is not None and may_lack_chunks


def _stop_waiting(
    state: SyncState, fragment: Fragment, in_flight: InFlight, reason: str | None
) -> None:
    link, ports, is_leaving = state.link, state.ports, state.leaving is not None
    round_ = state.schedule.rounds.get(fragment.number)
    if not is_leaving and not in_flight.is_detached:
        ports.keep_anchor(fragment.number)
        in_flight.is_detached = True
    if reason is None and in_flight.push_id in link.uploaded and is_leaving:
        ports.log(f"The pseudo-gradient of {in_flight.steps} steps is uploaded, and counts.")
    elif reason is None:
        if fragment.logged_deferral != (in_flight.push_id, round_):
            fragment.logged_deferral = (in_flight.push_id, round_)
            what_follows = ", which may go on without it" if is_leaving else "; training goes on"
            ports.log(
                f"The pseudo-gradient of {in_flight.steps} steps is deferred to round {round_}"
                f"{what_follows}."
            )
    elif not is_leaving:
        ports.trouble(
            f"Training goes on with {in_flight.steps} steps in flight: {reason}. They are merged "
            "when the broker has counted them."
        )
    else:
        away = "; the broker restarts and was not back" if link.is_restarting else ""
        ports.trouble(f"Leaving with {in_flight.steps} steps in flight: {reason}{away}.")


def _why_not(state: SyncState, fragment: Fragment | None = None) -> str | None:
    """Why a boundary stops waiting (for a push of this fragment), as a part of a sentence; else None."""
    link, options, is_leaving = state.link, state.options, state.leaving is not None
    in_flight = fragment.in_flight if fragment is not None else None
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
    if in_flight is not None and not in_flight.is_detached:
        broken = link.reconnections - in_flight.reconnections
        if broken > options.max_sync_retries:
            return f"the connection broke {broken} times at this boundary"
    return None


def _silent_in(state: SyncState) -> float:
    """Seconds until silence ends the waiting."""
    return max(0.0, state.options.timeout - (state.link.silence or 0.0))


def _log_counted(state: SyncState, *, at_once: bool = False) -> None:
    """Log the counted pushes, if it is time to."""
    line = state.lines.line(state.metrics.seconds_waited, at_once=at_once)
    if line is not None:
        state.ports.log(line)


# Settling: the model is brought in line with the end of a push.


async def settle(
    state: SyncState, fragment: Fragment, *, now: bool = False, touch_model: bool = True
) -> Outcome:
    """Bring the model in line with the arrivals of a fragment. Never waits for the broker.

    Running out of memory must not end the training: the outcome is FAILED, and the next call resumes
    the merge. `now` and `touch_model` are those of `Fragment.next_merge`.
    """
    merge = fragment.next_merge(state.step, now=now, touch_model=touch_model)
    if merge is not None and merge.touches_model:
        try:
            await state.ports.merge(fragment.number, merge, state.step)
        except BaseException as error:
            if merge.change is None:
                fragment.has_not_begun()
            if not isinstance(error, MergeFailed):
                raise
            _has_failed(state, fragment, error.__cause__)
            return Outcome.FAILED
    fragment.logged_failure = None
    if merge is None:
        return Outcome.NOTHING
    fragment.merged(merge)
    _note_ending(state, fragment, merge)
    return merge.outcome


def _has_failed(state: SyncState, fragment: Fragment, cause: BaseException | None) -> None:
    text = (
        f"The model could not take in what came for fragment {fragment.number}: {cause!r}. "
        "It is tried again after each step, and what is in flight counts once."
    )
    if fragment.logged_failure != text:
        fragment.logged_failure = text
        state.ports.trouble(text, cause)


def _note_ending(state: SyncState, fragment: Fragment, merge: Merge) -> None:
    in_flight, arrival, rejection = merge.in_flight, merge.arrival, merge.rejection
    ports = state.ports
    match merge.outcome:
        case Outcome.COUNTED:
            assert in_flight is not None and arrival is not None
            if merge.touches_model and not merge.is_load:
                is_auto = state.link.config.fragment_delay_auto
                late_after = in_flight.wait_at if is_auto else in_flight.apply_at
                state.metrics.late_merges += state.step > late_after
            _has_counted(state, fragment, in_flight, arrival)
        case Outcome.SUPERSEDED:
            assert arrival is not None
            _is_superseded(state, fragment, in_flight, arrival)
        case Outcome.REJECTED:
            assert in_flight is not None and rejection is not None
            state.metrics.rejected += 1
            ports.push_ended(in_flight.push_id, fragment.number, why=rejection.code)
            if rejection.code in (Code.LATE, Code.STALE):
                # The model moves to newer parameters as soon as they arrive.
                ports.notify(RequestVersion(fragment.number))
                ports.trouble(
                    f"The pseudo-gradient of {in_flight.steps} steps was dropped: "
                    f"{rejection.text} The model moves on to the newest global parameters."
                )
            else:
                ports.trouble(
                    "The broker dropped the last pseudo-gradient; the model is back at the "
                    "global parameters it started from, and takes part again at the next "
                    "boundary."
                )


def _has_counted(
    state: SyncState, fragment: Fragment, in_flight: InFlight, arrival: Arrival
) -> None:
    metrics = state.metrics
    metrics.pushes += 1
    metrics.staleness = fragment.staleness
    metrics.merge_delay = state.step - in_flight.began
    state.ports.push_ended(in_flight.push_id, fragment.number, arrival.version)
    state.lines.counted(in_flight.push, arrival, fragment.staleness, metrics.merge_delay)


def _is_superseded(
    state: SyncState, fragment: Fragment, in_flight: InFlight | None, arrival: Arrival
) -> None:
    """Discard the steps made since the fragment's base, which are out of the model."""
    ports, steps = state.ports, state.work(fragment).steps
    state.restart_work(fragment)
    ports.notify(StepsLost())
    if in_flight is not None:
        if arrival.released.ledger.names_whole(state.worker_id, in_flight.push_id):
            _has_counted(state, fragment, in_flight, arrival)
        else:
            steps += in_flight.steps
            ports.push_ended(in_flight.push_id, fragment.number, why="superseded")
    ports.trouble(
        f"Discarded {steps} steps of fragment {fragment.number} to avoid double counting: "
        f"{arrival.superseding}. The model goes on from version {arrival.version}."
    )
