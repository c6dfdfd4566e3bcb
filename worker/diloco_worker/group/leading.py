"""The driver of the process that leads: what its boundary decides, all processes carry out together.

Each effect that touches the model is an order to the others first. What fails in one of them has failed
for the worker: nobody knows which part of the model is ahead, so all of them end, and go on from the
script's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import msgpack

from diloco_worker.group import orders
from diloco_worker.group.orders import Agreed
from diloco_worker.model.spread.ranks import FORCE, LOAD, SAVE, STEP, GroupBroken, Ranks
from diloco_worker.model.spread.saved_share import OF_FLIGHT
from diloco_worker.model.spread.spread_tensors import SpreadTensors
from diloco_worker.session import events
from diloco_worker.session.news import Arrival, Sight, Work
from diloco_worker.sync import boundary, effects
from diloco_worker.sync.effects import Answer, Effect, Steps
from diloco_worker.sync.state import SyncState
from diloco_worker.training.driver import Driver
from diloco_worker.training.saved_state import Plain

# Seconds after which the others hear again that there is nothing to do: far less than a collective of
# torch.distributed waits.
WORD_EVERY_S = 20.0

# What a script calls to have these done.
DEED_OF: Mapping[object, str] = {boundary.force: FORCE, boundary.load: LOAD}

T = TypeVar("T")


@dataclass(eq=False, repr=False, kw_only=True)
class LeadingDriver(Driver):
    """See the head of this module."""

    ranks: Ranks
    agreed: Agreed = Agreed()  # noqa: RUF009  frozen
    _is_asked: bool = False  # a process of this worker is to end
    _is_leaving: bool = False

    def __post_init__(self, step: int, cycle_start: int, resumption: Any) -> None:
        self._others = Work()  # what the other processes have reported
        if resumption is not None:
            self.ranks.broadcast([orders.RESUME])
        super().__post_init__(step, cycle_start, resumption)
        self._go()

    # What comes first.

    def _put_frozen(self, arrival: Arrival) -> None:
        has_values = arrival.values is not None
        self.ranks.broadcast([orders.FROZEN, arrival.version.plain() if has_values else None])
        super()._put_frozen(arrival)

    def _put(self, arrivals: list[Arrival]) -> None:
        self.ranks.broadcast([orders.PUT, [each.version.plain() for each in arrivals]])
        super()._put(arrivals)

    # Between steps.

    def after_step(self, step: int) -> None:
        self._is_asked = self.ranks.meet(STEP, float(self.termination.is_asked)) > 0
        self._together(lambda: super(LeadingDriver, self).after_step(step))

    def between_steps(self, action: Callable[[SyncState], Steps[T]]) -> T | None:
        self.ranks.meet(DEED_OF[action])
        return self._together(lambda: super(LeadingDriver, self).between_steps(action))

    def _together(self, action: Callable[[], T]) -> T:
        """Something that the others follow; whatever becomes of it, they are told when it is over."""
        result = None
        try:
            result = action()
        except GroupBroken:
            raise
        except Exception:
            self._go()
            raise
        self._go(result)
        return result

    def _go(self, result: Any = None) -> None:
        link, schedule = self.link, self.state.schedule
        reason = self.termination.reason
        if reason is None and self._is_asked:
            reason = "SIGTERM asks a process of this worker to end"
        self.agreed = Agreed(
            stop_reason=reason or link.stopping,
            is_over=link.stopping is not None,
            save_order=link.save_order,
            progress=link.run_progress,
            loss=link.run_loss,
            sync_every=schedule.sync_every,
            cycle_start=schedule.cycle_start,
            unsynced_steps=self.state.unsynced_steps,
            last_error=link.last_error,
            metrics=asdict(self.metrics),
            result=result,
        )
        self.ranks.broadcast([orders.GO, self.agreed.plain()])

    def leave(self, *, hasty: bool) -> None:
        """The others wait until this process has left, and hear nothing over the group any more."""
        self._is_leaving = True
        super().leave(hasty=hasty)
        self.link.say_at_the_end(msgpack.packb(asdict(self.metrics)))

    def saved(self) -> Plain | None:
        """The part of the checkpoint that this process keeps; the others make theirs."""
        assert isinstance(self.tensors, SpreadTensors)
        self.ranks.meet(SAVE)
        self.ranks.broadcast([orders.SAVE])
        plain = super().saved()
        self.ranks.broadcast(None if plain is None else without_vectors(plain))
        return None if plain is None else self.tensors.shared_out(plain, self.reports.counts)

    # Effects.

    def _do(self, effect: Effect | events.Event) -> Answer:
        match effect:
            case effects.ReadReports():
                self.ranks.broadcast([orders.REPORT])
                self.reports.read(self.clock(), at_once=True)
                self._others = others_of(self.ranks, self.reports.totals)
                return self._totals
            case effects.Offer(flight):
                push = flight.push
                self.ranks.broadcast([orders.OFFER, push.fragment, push.push_id])
        return super()._do(effect)

    def _change_model(self, effect: Effect | events.Event) -> Answer:
        try:
            match effect:
                case effects.CheckModel():
                    self._check_model()
                    return None
                case effects.Freeze(push):
                    self.ranks.broadcast([orders.FREEZE, push.fragment, push.wire_dtype])
                case effects.KeepAnchor(fragment):
                    self.ranks.broadcast([orders.ANCHOR, fragment])
                case effects.Land(fragment, landing, step):
                    self.ranks.broadcast(orders.landing_as_order(fragment, landing, step))
            answer = super()._change_model(effect)
        except GroupBroken:
            raise
        except Exception as error:
            raise GroupBroken(f"The model of this worker could not be changed: {error}") from error
        if isinstance(answer, effects.Failed):
            raise GroupBroken(
                f"The model of this worker could not take in what came: {answer.error!r}"
            ) from answer.error
        return answer

    def _check_model(self) -> None:
        self.ranks.broadcast([orders.CHECK])
        watch = self.tensors.watch
        for found in self.ranks.gather(watch.look() if watch is not None else None):
            if found is not None:
                self.trouble(found)
                return

    @property
    def _totals(self) -> Work:
        return with_others(self.reports.totals, self._others)

    def _look(self) -> Sight:
        sight = super()._look()
        return Sight(sight.news, sight.link, self._totals)

    @property
    def _has_news(self) -> bool:
        is_lost = self.link.lost_process is not None and not self._is_leaving
        return is_lost or super()._has_news

    def _wait(self, seconds: float) -> None:
        if self._is_leaving:
            super()._wait(seconds)
            return
        self.ranks.broadcast([orders.WAIT])
        super()._wait(min(seconds, WORD_EVERY_S))
        lost = self.link.lost_process
        if lost is not None:
            raise GroupBroken(f"{lost}: the others cannot go on without it.")


def without_vectors(plain: Plain) -> Plain:
    """What is the same at all processes of what one saves."""
    fragments = []
    for each in plain["fragments"]:
        flight = each["flight"]
        if flight is not None:
            flight = {**flight, **dict.fromkeys((*OF_FLIGHT, "codes"))}
        fragments.append({**each, "base": None, "flight": flight, "residual": None, "gains": []})
    return {**plain, "fragments": fragments, "checksums": {}}


def others_of(ranks: Ranks, mine: Work) -> Work:
    """What the other processes have reported up to now; their loss is the mean of all that have one."""
    loss = mine.loss
    sums = ranks.total(
        [mine.tokens, mine.samples, 0.0 if loss is None else loss, float(loss is not None)]
    )
    mean = sums[2] / sums[3] if sums[3] else None
    return Work(0, int(sums[0]) - mine.tokens, int(sums[1]) - mine.samples, mean)


def with_others(mine: Work, others: Work) -> Work:
    """What all processes have reported."""
    loss = mine.loss if others.loss is None else others.loss
    return Work(0, mine.tokens + others.tokens, mine.samples + others.samples, loss)
