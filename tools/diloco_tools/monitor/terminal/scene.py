"""What a picture is made from: the run or a moment of a past one, and what somebody chose. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_protocol.feed import Snapshot, Worker
from diloco_protocol.monitor.fields import TOP, Field, columns
from diloco_protocol.monitor.rows import Listed, sort_key
from diloco_tools.monitor.feed.model import FeedModel, Freshness, listed
from diloco_tools.monitor.feed.replay import Moment
from diloco_tools.monitor.feed.series import RunSeries

POINTS = 256  # moments before the one shown, from which the curves are drawn: a jump takes a moment
SPEEDS = (1, 2, 5, 10, 20, 50, 100)  # moments a second
# fmt: off
_SORTED = (
    "id", "health", "host", "round", "steps_per_s", "loss", "beat_age_s", "staleness", "bytes_up"
)
# fmt: on
ORDERS = [field for field in columns(TOP) if field.path in _SORTED]


@dataclass(frozen=True)
class Scene:
    """The run as of `now`, live or a moment of a replay."""

    model: FeedModel
    series: RunSeries
    now: float
    address: str
    replay: Player | None = None
    readonly: bool = False

    @property
    def fresh(self) -> Freshness:
        return self.model.freshness(self.now)

    def snapshot(self) -> Snapshot | None:
        return self.model.at(self.now)

    def listed(self, workers: Sequence[Worker]) -> list[Listed]:
        """The workers with what is known of them beside the feed."""
        snapshot, fresh = self.snapshot(), self.fresh
        assert snapshot is not None, "it has the workers"
        return [listed(snapshot, each, fresh, self.series.rate_of(each.id)) for each in workers]


class Player:
    """One moment of a history, and the curves up to it. `clock` gives seconds, monotonic.

    Begins to play at the first moment; there has to be one.
    """

    def __init__(self, moments: Sequence[Moment], clock: Callable[[], float]) -> None:
        self.moments = moments
        self.index = 0
        self.playing = len(moments) > 1
        self._speed = 2
        self._clock, self._since = clock, clock()
        self._drawn = -1  # the moment that the series are at
        self._series = RunSeries()

    @property
    def moment(self) -> Moment:
        return self.moments[self.index]

    @property
    def speed(self) -> int:
        """Moments a second."""
        return SPEEDS[self._speed]

    def tick(self) -> None:
        """Go on as far as the time that has passed asks for; the end stops the play."""
        if not self.playing:
            return
        steps = int((self._clock() - self._since) * self.speed)
        self._since += steps / self.speed
        self._go(self.index + steps)
        if self.index == len(self.moments) - 1:
            self.playing = False

    def toggle(self) -> None:
        """Play or stop; at the end, play from the beginning."""
        if not self.playing and self.index == len(self.moments) - 1:
            self._go(0)
        self.playing = not self.playing and len(self.moments) > 1
        self._since = self._clock()

    def step(self, by: int) -> None:
        """Stop, and show a moment before or behind."""
        self.playing = False
        self._go(self.index + by)

    def first(self) -> None:
        self.step(-self.index)

    def last(self) -> None:
        self.step(len(self.moments))

    def faster(self, by: int) -> None:
        """Up the list of speeds by this many; down if it is negative."""
        self._speed = max(0, min(len(SPEEDS) - 1, self._speed + by))
        self._since = self._clock()

    def scene(self, address: str) -> Scene:
        """What is known at this moment."""
        start = self._drawn + 1
        if not 0 <= self._drawn <= self.index <= self._drawn + POINTS:
            self._series = RunSeries()
            start = max(0, self.index + 1 - POINTS)
        for moment in self.moments[start : self.index + 1]:
            self._series.update(moment.snapshot, moment.at)
        self._drawn = self.index
        # A model of its own for each moment: going back is no older snapshot, it is another time.
        model, at = FeedModel(self.moment.snapshot, self.moment.at), self.moment.at
        return Scene(model, self._series, at, address, replay=self)

    def _go(self, index: int) -> None:
        self.index = max(0, min(len(self.moments) - 1, index))


@dataclass
class View:
    """What the person at the screen has chosen: order and filter."""

    order: int = 0  # of `ORDERS`
    reverse: bool = False
    wanted: str = ""  # the filter

    @property
    def by(self) -> Field:
        return ORDERS[self.order]

    @property
    def order_name(self) -> str:
        return f"by {self.by.label.lower()}" + ", reversed" * self.reverse

    def next_order(self) -> None:
        self.order = (self.order + 1) % len(ORDERS)
        self.reverse = False

    def rows(self, workers: Sequence[Worker]) -> list[Worker]:
        """Those that pass the filter, in order; equal ones by id, unknown ones last."""
        wanted = self.wanted.casefold()

        def passes(each: Worker) -> bool:
            told = (each.id, each.host, each.via, each.state, each.health)
            return any(wanted in text.casefold() for text in told)

        def place(each: Worker) -> tuple[bool, Any]:
            key = sort_key(self.by, Listed(each))
            # NaN would be in no order at all.
            is_known = key is not None and not (isinstance(key, float) and math.isnan(key))
            return (is_known == self.reverse, key if is_known else 0)

        shown = sorted(filter(passes, workers), key=lambda each: each.id)
        return sorted(shown, key=place, reverse=self.reverse)
