"""Everything that a picture is made from: the run, and what somebody chose. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diloco_protocol.feed import Snapshot, Worker
from diloco_protocol.monitor import tree
from diloco_tools.monitor.feed.model import FeedModel, Freshness
from diloco_tools.monitor.feed.series import RunSeries
from diloco_tools.top.playing import Player

SERIOUS = (
    "dead",
    "lost",
    "stalled",
    "slow",
)  # most urgent first; any other health comes next


@dataclass(frozen=True)
class Said:
    """A sentence for the status line. `style` has the colour of what it means."""

    text: str = ""
    style: str = ""


@dataclass(frozen=True)
class Scene:
    """`model` and `series` are shown as of `now`; `fresh` and `age_s` are those of the feed itself.

    The two differ while the picture is frozen: `frozen_s` is then for how long.
    """

    model: FeedModel
    series: RunSeries
    now: float
    fresh: Freshness
    age_s: float
    address: str
    frozen_s: float | None = None
    replay: Player | None = None
    readonly: bool = False
    said: Said = Said()

    def snapshot(self) -> Snapshot | None:
        return self.model.at(self.now)


def _by_health(worker: Worker) -> int:
    if worker.health == "ok":
        return len(SERIOUS) + 1
    return SERIOUS.index(worker.health) if worker.health in SERIOUS else len(SERIOUS)


def _down(value: float | None) -> float:
    """The greatest first, nothing last; what is not a number would be in no order at all."""
    return math.inf if value is None or math.isnan(value) else -value


class Order(NamedTuple):
    """A way to sort the table: its name, the column that it is about, and what comes first."""

    name: str
    column: str
    key: Callable[[Worker], float | str]


ORDERS = (
    Order("id", "WORKER", lambda w: w.id),
    Order("health", "HEALTH", _by_health),
    Order("host", "HOST", lambda w: w.host),
    Order("round, most behind first", "ROUND", lambda w: -1 if w.round is None else w.round),
    Order("speed, slowest first", "ST/S", lambda w: w.steps_per_s or 0.0),
    Order("loss, greatest first", "LOSS", lambda w: _down(w.loss)),
    Order("beat, oldest first", "BEAT", lambda w: -w.beat_age_s),
    Order("staleness, greatest first", "OLD", lambda w: -w.staleness),
    Order("bytes sent, most first", "TX/S", lambda w: -w.bytes_up),
)


@dataclass
class View:
    """What the person at the screen has chosen: order, filter, the marked worker.

    And the part of the table that is in the window: `offset` rows are above it.
    """

    order: int = 0
    reverse: bool = False
    wanted: str = ""  # the filter
    marked: str | None = None
    offset: int = 0
    _last: int = 0  # where the marked worker was when it was last seen

    @property
    def by(self) -> Order:
        return ORDERS[self.order]

    def next_order(self) -> None:
        self.order = (self.order + 1) % len(ORDERS)
        self.reverse = False

    def rows(self, workers: Sequence[Worker]) -> list[Worker]:
        """Those that the filter lets through, in order; equal ones by id.

        Below each relay those that are behind it, for the sake of which it stays.
        """
        wanted = self.wanted.casefold()

        def passes(each: Worker) -> bool:
            told = (each.id, each.host, each.state, each.health)
            return any(wanted in text.casefold() for text in told)

        return tree.arranged(workers, self.by.key, reverse=self.reverse, wanted=passes)

    def move(self, by: int, rows: Sequence[Worker]) -> None:
        """Mark the worker `by` rows further down, or the last in that direction."""
        if rows:
            self.marked = rows[max(0, min(len(rows) - 1, self._place(rows) + by))].id

    def settle(self, rows: Sequence[Worker], room: int) -> int:
        """Have one worker marked, and in the window of `room` rows; the place of the marked one.

        A worker that has gone leaves the mark to the one that took its place.
        """
        if not rows:
            self.marked, self.offset, self._last = None, 0, 0
            return -1
        place = min(self._place(rows), len(rows) - 1)
        self.marked, self._last = rows[place].id, place
        self.offset = max(0, min(self.offset, place, len(rows) - room))
        self.offset = max(self.offset, place - room + 1)
        return place

    def _place(self, rows: Sequence[Worker]) -> int:
        for place, worker in enumerate(rows):
            if worker.id == self.marked:
                return place
        return min(self._last, len(rows) - 1)
