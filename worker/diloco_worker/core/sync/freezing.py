"""Freezing what was learnt since the last time, and offering it. What looks wrong with it is told."""

from __future__ import annotations

from collections.abc import Callable

from diloco_protocol import RunConfig
from diloco_protocol.messages import BUFFERS, Push
from diloco_worker.core.sync.effects import (
    Beat,
    CheckModel,
    Freeze,
    Frozen,
    NonFinite,
    Offer,
    ReadReports,
    Steps,
    Trouble,
)
from diloco_worker.core.sync.flights import Flight
from diloco_worker.core.sync.fragment import Fragment
from diloco_worker.core.sync.landings import Landings
from diloco_worker.core.sync.metrics import SyncMetrics
from diloco_worker.core.sync.schedule import TurnState
from diloco_worker.core.sync.state import SyncState
from diloco_worker.core.sync.work import Totals, Work


class Stillness:
    """Notices that a fragment was pushed twice in a row without having moved.

    Says so once, until every fragment has moved again.

    Args:
        num_fragments: P.
    """

    def __init__(self, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self._zeros: dict[int, int] = {}  # by fragment: pushes of zeros in a row
        self._is_told = False

    def pushed(self, fragment: int, norm: float | None, steps: int) -> str | None:
        """A pseudo-gradient is pushed. Returns a warning if it is time for one.

        Args:
            norm: Euclidean length of its parameters; None where that is not known.
            steps: optimizer steps in it; without any, zeros are no news.
        """
        if norm != 0:
            self._zeros.pop(fragment, None)
            self._is_told = self._is_told and bool(self._zeros)
            return None
        if not steps:
            return None
        self._zeros[fragment] = self._zeros.get(fragment, 0) + 1
        if self._zeros[fragment] < 2 or self._is_told:
            return None
        self._is_told = True
        whose = f"of fragment {fragment} " if self._num_fragments > 1 else ""
        return (
            f"The pseudo-gradient {whose}was all zeros twice in a row, the last time after {steps} "
            "optimizer steps: nothing is learnt there. Look for a learning rate of 0 (a scheduler), "
            "frozen parameters, an optimizer over other parameters than the model's, or updates too "
            "small for the model's dtype."
        )


class Freezing:
    """See the head of this module.

    Args:
        metrics: rejections and seconds are counted in them.
        clock: seconds, monotonic.
        draw: returns a random number below 2**64 (push ids).
    """

    def __init__(
        self,
        state: SyncState,
        landings: Landings,
        metrics: SyncMetrics,
        clock: Callable[[], float],
        draw: Callable[[], int],
    ) -> None:
        self._state = state
        self._landings = landings
        self._metrics = metrics
        self._clock = clock
        self._draw = draw
        self._stillness = Stillness(len(state.fragments))
        self._has_warned_of_weights = False

    def freeze(self, fragment: Fragment) -> Steps[bool]:
        """Freeze what was learnt since the fragment's last freeze. Returns whether it can be sent."""
        state, number = self._state, fragment.number
        began, config = self._clock(), state.link.config
        yield from self.read_reports()
        work = state.work.since(number, state.step)
        yield from self._warn_of_weights(work, config)
        yield CheckModel()
        yield from self.beat()
        dtype = state.options.wire_dtype or config.wire_dtype
        frozen = yield Freeze(
            Push(
                session=b"",
                push_id=self._draw(),
                fragment=number,
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
        state.work.restart(number, state.step)
        self._metrics.seconds_waited += self._clock() - began
        if isinstance(frozen, Frozen):
            rule = state.merge
            apply_at = state.step + rule.delay
            wait_at = state.step + rule.longest(state.schedule.sync_every)
            fragment.take_off(
                Flight(frozen.push, state.step, apply_at, wait_at, frozen.reconnections)
            )
            warning = self._stillness.pushed(number, frozen.push.norm, work.steps)
            if warning is not None:
                yield Trouble(warning)
            return True
        assert isinstance(frozen, NonFinite)
        self._metrics.rejected += 1
        yield Trouble(
            f"The pseudo-gradient of {work.steps} steps is not finite in {_where(frozen, dtype)}; it "
            "was not sent, and the model is back at the last global parameters. The other workers wait "
            "until the next boundary. If it happens again, lower the learning rate or clip gradients."
        )
        # What is not finite in one fragment has spread through the others.
        for each in state.fragments:
            each.restore()
            yield from self._landings.settle(each, state.step)
            state.work.restart(each.number, state.step)
        return False

    def offer(self, fragment: Fragment, *, is_new: bool = True) -> Steps[None]:
        """Hand what is frozen to the link. Interrupted, it is done again."""
        flight, schedule = fragment.flight, self._state.schedule
        assert flight is not None
        if is_new and schedule.fragment == fragment.number and schedule.turn() is TurnState.FREE:
            schedule.push()
        yield Offer(flight, is_new)
        flight.is_offered = True

    def offer_frozen(self) -> Steps[None]:
        """Offer what was frozen and not offered, because an interrupt came in between."""
        schedule = self._state.schedule
        for fragment in self._state.fragments:
            flight = fragment.flight
            if flight is not None and not flight.is_offered and not fragment.is_over:
                yield from self.offer(fragment)
                if schedule.is_due(flight.began):
                    schedule.use_slot(flight.began)

    def _warn_of_weights(self, work: Work, config: RunConfig) -> Steps[None]:
        counts = {"tokens": work.tokens, "samples": work.samples}
        name = config.weight_by
        if counts.get(name, 1) <= 0 and not self._has_warned_of_weights:
            self._has_warned_of_weights = True
            yield Trouble(
                f"This run weighs each contribution by its {name}, and none were reported; call "
                f"report({name}=...) after each step, or the broker will refuse what this worker "
                "sends."
            )

    def beat(self) -> Steps[None]:
        """Send a heartbeat at once, if this worker sends any."""
        if self._state.options.heartbeat_interval != 0:
            yield Beat()

    def read_reports(self) -> Steps[None]:
        """Read what the script has reported, also what lies on a device."""
        totals = yield ReadReports()
        assert isinstance(totals, Totals)
        self._state.work.totals = totals


def _where(bad: NonFinite, dtype: str) -> str:
    if bad.is_buffer:
        return (
            f"{bad.name}, a buffer (one that is to hold infinities must hold them from the start)"
        )
    hint = " after rounding to fp16, whose largest value is 65504"
    return bad.name + (hint if dtype == "fp16" else "")
