"""Everything that a picture is made from: the run, and what somebody chose. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diloco_protocol.feed import Snapshot, Worker
from diloco_protocol.monitor import tree
from diloco_protocol.monitor.rows import Listed
from diloco_tools.monitor.feed.model import FeedModel, Freshness, listed
from diloco_tools.monitor.feed.series import RunSeries
from diloco_tools.monitor.terminal.playing import Player

# Most urgent first; any other health comes next, then those that are well.
SERIOUS = ("dead", "lost", "stalled", "slow")


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

    def snapshot(self) -> Snapshot | None:
        return self.model.at(self.now)

    def listed(self, workers: Sequence[Worker]) -> list[Listed]:
        """The workers with what is known of them beside the feed."""
        snapshot, fresh = self.snapshot(), self.model.freshness(self.now)
        assert snapshot is not None, "it has the workers"
        return [listed(snapshot, each, fresh, self.series.rate_of(each.id)) for each in workers]


def _by_health(worker: Worker) -> int:
    if worker.health == "ok":
        return len(SERIOUS) + 1
    return SERIOUS.index(worker.health) if worker.health in SERIOUS else len(SERIOUS)


def _down(value: float | None) -> float:
    """The greatest first, unknown ones last; NaN would be in no order at all."""
    return math.inf if value is None or math.isnan(value) else -value


class Order(NamedTuple):
    """A way to sort the table: its name, the field that it is about, and what comes first."""

    name: str
    path: str
    key: Callable[[Worker], float | str]


ORDERS = (
    Order("id", "id", lambda w: w.id),
    Order("health", "health", _by_health),
    Order("host", "host", lambda w: w.host),
    Order("round, oldest first", "round", lambda w: -1 if w.round is None else w.round),
    Order("speed, slowest first", "steps_per_s", lambda w: w.steps_per_s or 0.0),
    Order("loss, greatest first", "loss", lambda w: _down(w.loss)),
    Order("last heard, longest ago first", "beat_age_s", lambda w: -w.beat_age_s),
    Order("staleness, greatest first", "staleness", lambda w: -w.staleness),
    Order("bytes sent up, most first", "rate_up", lambda w: -w.bytes_up),
)


@dataclass
class View:
    """What the person at the screen has chosen: order and filter."""

    order: int = 0
    reverse: bool = False
    wanted: str = ""  # the filter

    @property
    def by(self) -> Order:
        return ORDERS[self.order]

    @property
    def order_name(self) -> str:
        return f"by {self.by.name}" + ", reversed" * self.reverse

    def next_order(self) -> None:
        self.order = (self.order + 1) % len(ORDERS)
        self.reverse = False

    def rows(self, workers: Sequence[Worker]) -> list[Worker]:
        """Those that pass the filter, in order; equal ones by id.

        Below each relay those downstream of it, for the sake of which it stays.
        """
        wanted = self.wanted.casefold()

        def passes(each: Worker) -> bool:
            told = (each.id, each.host, each.state, each.health)
            return any(wanted in text.casefold() for text in told)

        return tree.arranged(workers, self.by.key, reverse=self.reverse, wanted=passes)
