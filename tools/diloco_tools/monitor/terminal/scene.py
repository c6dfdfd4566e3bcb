"""The data of a picture: the run or a moment of a past one, and the user's choices. Pure."""

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

POINTS = 256  # moments in the curves of a replay; bounds the time of a jump
SPEEDS = (1, 2, 5, 10, 20, 50, 100)  # moments a second
# fmt: off
_SORTED = (
    "id", "health", "host", "round", "steps_per_s", "loss", "beat_age_s", "staleness", "bytes_up"
)
# fmt: on
ORDERS = [field for field in columns(TOP) if field.path in _SORTED]


@dataclass(frozen=True)
class Scene:
    """The run at `now`, live or in a replay."""

    model: FeedModel
    series: RunSeries
    now: float
    address: str
    replay: "Player | None" = None
    readonly: bool = False

    @property
    def fresh(self) -> Freshness:
        return self.model.freshness(self.now)

    def snapshot(self) -> Snapshot | None:
        return self.model.at(self.now)

    def listed(self, workers: Sequence[Worker]) -> list[Listed]:
        """The workers with their computed figures."""
        snapshot, fresh = self.snapshot(), self.fresh
        assert snapshot is not None
        return [listed(snapshot, each, fresh, self.series.rate_of(each.id)) for each in workers]


class Player:
    """Plays the moments of a history, from the first; there must be one. `clock` is in seconds."""

    def __init__(self, moments: Sequence[Moment], clock: Callable[[], float]) -> None:
        self.moments = moments
        self.index = 0
        self.playing = len(moments) > 1
        self._speed = 2
        self._clock, self._since = clock, clock()
        self._drawn = -1  # the last moment in the series
        self._series = RunSeries()

    @property
    def speed(self) -> int:
        """Moments a second."""
        return SPEEDS[self._speed]

    def tick(self) -> None:
        """Advance by the elapsed time; stops at the end."""
        if not self.playing:
            return
        steps = int((self._clock() - self._since) * self.speed)
        self._since += steps / self.speed
        self._go(self.index + steps)
        if self.index == len(self.moments) - 1:
            self.playing = False

    def toggle(self) -> None:
        """Play or stop; at the end, restart."""
        if not self.playing and self.index == len(self.moments) - 1:
            self._go(0)
        self.playing = not self.playing and len(self.moments) > 1
        self._since = self._clock()

    def step(self, by: int) -> None:
        """Stop, and show an earlier or later moment."""
        self.playing = False
        self._go(self.index + by)

    def first(self) -> None:
        self.step(-self.index)

    def last(self) -> None:
        self.step(len(self.moments))

    def faster(self, by: int) -> None:
        """Move by this many places in the list of speeds."""
        self._speed = max(0, min(len(SPEEDS) - 1, self._speed + by))
        self._since = self._clock()

    def scene(self, address: str) -> Scene:
        """The scene of this moment."""
        start, moment = self._drawn + 1, self.moments[self.index]
        if not 0 <= self._drawn <= self.index <= self._drawn + POINTS:
            self._series = RunSeries()
            start = max(0, self.index + 1 - POINTS)
        for each in self.moments[start : self.index + 1]:
            self._series.update(each.snapshot, each.at)
        self._drawn = self.index
        # A new model for each moment, since one model takes only newer snapshots.
        model = FeedModel(moment.snapshot, moment.at)
        return Scene(model, self._series, moment.at, address, replay=self)

    def _go(self, index: int) -> None:
        self.index = max(0, min(len(self.moments) - 1, index))


@dataclass
class View:
    """The user's choices: order and filter of the table."""

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
        """The workers that match the filter, in order; equal ones by id, unknown ones last."""
        wanted = self.wanted.casefold()

        def matches(each: Worker) -> bool:
            texts = (each.id, each.host, each.via, each.state, each.health)
            return any(wanted in text.casefold() for text in texts)

        def place(each: Worker) -> tuple[bool, Any]:
            key = sort_key(self.by, Listed(each))
            # NaN has no order.
            is_known = key is not None and not (isinstance(key, float) and math.isnan(key))
            return (is_known == self.reverse, key if is_known else 0)

        shown = sorted(filter(matches, workers), key=lambda each: each.id)
        return sorted(shown, key=place, reverse=self.reverse)
