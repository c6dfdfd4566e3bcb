"""Freezing what was learnt since the last time, and offering it. What looks wrong with it is told."""

from __future__ import annotations

from diloco_protocol import RunConfig
from diloco_protocol.messages import BUFFERS, Push
from diloco_worker.session.events import BeatNow, StepsLost
from diloco_worker.session.news import Work
from diloco_worker.sync import effects
from diloco_worker.sync.effects import Frozen, NonFinite, Steps, Trouble
from diloco_worker.sync.fragment import Flight, Fragment, longest_wait
from diloco_worker.sync.landings import settle
from diloco_worker.sync.schedule import TurnState
from diloco_worker.sync.state import SyncState


def freeze(state: SyncState, fragment: Fragment) -> Steps[bool]:
    """Freeze what was learnt since the fragment's last freeze. Returns whether it can be sent."""
    began, config = state.clock(), state.link.config
    yield from read_reports(state)
    work = state.work(fragment)
    yield from _warn_of_weights(state, work, config)
    yield effects.CheckModel()
    yield from beat(state)
    dtype = state.options.wire_dtype or config.wire_dtype
    frozen = yield effects.Freeze(
        Push(
            session=b"",
            push_id=state.draw(),
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
    state.metrics.seconds_waited += state.clock() - began
    if isinstance(frozen, Frozen):
        apply_at = state.step + config.fragment_sync_delay
        wait_at = state.step + longest_wait(config, state.schedule.sync_every)
        fragment.take_off(Flight(frozen.push, state.step, apply_at, wait_at, frozen.reconnections))
        yield from _warn_of_zeros(state, fragment, frozen.push)
        return True
    assert isinstance(frozen, NonFinite)
    state.metrics.rejected += 1
    yield Trouble(
        f"The pseudo-gradient of {work.steps} steps is not finite in {_where(frozen, dtype)}; it "
        "was not sent, and the model is back at the last global parameters. The other workers wait "
        "until the next boundary. If it happens again, lower the learning rate or clip gradients."
    )
    # What is not finite in one fragment has spread through the others.
    yield StepsLost()
    for each in state.fragments:
        each.restore()
        yield from settle(state, each)
        state.restart_work(each)
    return False


def offer(state: SyncState, fragment: Fragment, *, is_new: bool = True) -> Steps[None]:
    """Hand what is frozen to the link. Interrupted, it is done again."""
    flight, schedule = fragment.flight, state.schedule
    assert flight is not None
    if is_new and schedule.fragment == fragment.number and schedule.turn() is TurnState.FREE:
        schedule.push()
    yield effects.Offer(flight, is_new)
    flight.is_offered = True


def offer_frozen(state: SyncState) -> Steps[None]:
    """Offer what was frozen and not offered, because an interrupt came in between."""
    for fragment in state.fragments:
        flight = fragment.flight
        if flight is not None and not flight.is_offered and not fragment.is_over:
            yield from offer(state, fragment)
            if state.schedule.is_due(flight.began):
                state.schedule.use_slot(flight.began)


def beat(state: SyncState) -> Steps[None]:
    """Send a heartbeat at once, if this worker sends any."""
    if state.options.heartbeat_interval != 0:
        yield BeatNow()


def read_reports(state: SyncState) -> Steps[None]:
    """Read what the script has reported, also what lies on a device."""
    totals = yield effects.ReadReports()
    assert isinstance(totals, Work)
    state.totals = totals


def _warn_of_weights(state: SyncState, work: Work, config: RunConfig) -> Steps[None]:
    counts = {"tokens": work.tokens, "samples": work.samples}
    name = config.weight_by
    if counts.get(name, 1) <= 0 and not state.has_warned_of_weights:
        state.has_warned_of_weights = True
        yield Trouble(
            f"This run weighs each contribution by its {name}, and none were reported; call "
            f"report({name}=...) after each step, or the broker will refuse what this worker "
            "sends."
        )


def _warn_of_zeros(state: SyncState, fragment: Fragment, push: Push) -> Steps[None]:
    """Say it once when a fragment was pushed twice in a row without having moved."""
    if push.norm != 0:  # or not known
        fragment.zeros = 0
        state.has_warned_of_zeros &= any(each.zeros for each in state.fragments)
        return
    fragment.zeros += push.steps > 0  # without any step, zeros are no news
    if push.steps and fragment.zeros >= 2 and not state.has_warned_of_zeros:
        state.has_warned_of_zeros = True
        whose = f"of fragment {fragment.number} " if len(state.fragments) > 1 else ""
        yield Trouble(
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
