"""Figures over time from snapshots, for sparklines and plots. Pure and bounded.

`RunSeries` keeps one point for each closed round, bytes a second at the broker and at each worker, and
steps a second of each worker.

Rates are differences of the broker's counters over differences of its own uptime, so slow networks and
lost snapshots do not distort them. `now` only dates the points: it may come from any clock in seconds.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from diloco_protocol.feed import LastRound, Snapshot, Totals, Worker
from diloco_protocol.quantities import duration, figure, norm

_Point = TypeVar("_Point", bound=tuple[Any, ...])  # its time first
LEAST_RECENT = 4  # points that determine a scale
MOST_SPEEDS = 20_000  # points of all workers sent to a page: some 500 kB
LEAST_SPEEDS = 60  # of one worker
LARGEST = 1e100  # of a curve: differences of larger values overflow
CPU_SNAPSHOTS = 6  # five seconds of a live feed, to smooth single turns


def recent_scale(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest value on the scale of a curve.

    The scale contains the newer half of the values, and older ones within twice its span of it. Values
    beyond are off the scale: the loss of the first round would flatten all others. `values` are finite
    and not empty, the newest last.
    """
    newer = values[-max(LEAST_RECENT, len(values) - len(values) // 2) :]
    least, most = min(newer), max(newer)
    room = 2 * (most - least)
    if not 0 < room < math.inf:  # no difference, or an overflow
        return min(values), max(values)
    near = [value for value in values if least - room <= value <= most + room]
    return min(near), max(near)


def off_scale(
    points: Sequence[tuple[int, float | None]], written: Callable[[float], str], *, is_whole: bool
) -> tuple[float, float, str] | None:
    """The scale of a plot over rounds, and the rounds off it as a sentence; None without a point.

    A complete run is shown from its start, unless a few values would flatten all others. Times far above
    the 95th percentile, as of a round that a pause interrupted, are ignored.
    """
    known = [(number, y) for number, y in points if y is not None and abs(y) < LARGEST]
    if not known:
        return None
    values = [y for _, y in known]
    ranked = sorted(values)
    most = ranked[max(0, min(len(ranked) - 2, int(0.95 * len(ranked))))]
    limit = most + 8 * max(most - ranked[0], 0.1 * abs(most))
    may_jump = len(known) >= LEAST_RECENT and written is duration
    low, high = recent_scale([y for y in values if y <= limit] if may_jump else values)
    off = [(number, y) for number, y in known if not low <= y <= high]
    is_flattened = len(off) <= len(known) / 10 and max(values) - min(values) > 8 * (high - low)
    if not off or (is_whole and not is_flattened):
        return min(values), max(values), ""
    lowest, highest = (written(find(y for _, y in off)) for find in (min, max))
    which = f"round {off[0][0]}" if len(off) == 1 else f"{len(off)} rounds"
    span = f" to {highest}" if lowest != highest else ""
    return low, high, f"Off the scale: {which} with {lowest}{span}."


class Rate(NamedTuple):
    """Bytes a second to the broker and from it, over an interval that ended at `at`."""

    at: float
    up: float
    down: float


class _Counted(NamedTuple):
    """Counters of bytes at the broker's uptime `uptime_s`."""

    uptime_s: float
    up: int
    down: int


def _rate(before: _Counted | None, later: _Counted, at: float) -> Rate | None:
    """The rate between two counters, at growing uptimes; None after a reset."""
    if before is None or later.up < before.up or later.down < before.down:
        return None
    seconds = later.uptime_s - before.uptime_s
    return Rate(at, (later.up - before.up) / seconds, (later.down - before.down) / seconds)


class RunSeries:
    """The last `points` of each figure, of at most `workers` workers.

    A restart of the broker resets the rates and keeps the rounds. Absent workers are evicted for present
    ones, the longest absent first; if all places are taken by present workers, others get none.
    """

    def __init__(self, points: int = 512, workers: int = 256) -> None:
        self._points = points
        self._workers = workers
        self.rounds: list[tuple[float, LastRound]] = []  # (when seen, round)
        self.network: list[Rate] = []  # of all workers, one rate a snapshot
        # Worker id -> (at, reported inner steps a second); the longest absent first.
        self.speeds: dict[str, list[tuple[float, float]]] = {}
        self._rates: dict[str | None, Rate] = {}
        self._epoch = ""
        self._sequence = -1
        self._uptime_s: float | None = None
        self._last_round: int | None = None
        self._counted: dict[str | None, _Counted] = {}  # None: at the broker
        self._cpu: deque[tuple[float, float]] = deque(maxlen=CPU_SNAPSHOTS)  # uptime, CPU seconds

    def rate_of(self, worker_id: str) -> Rate | None:
        """The newest rate of a worker; None while unknown or absent."""
        return self._rates.get(worker_id)

    @property
    def cpu(self) -> float | None:
        """The share of a core that the broker uses, 0 to 1; None while unknown."""
        if len(self._cpu) < 2:
            return None
        (began, before), (ended, after) = self._cpu[0], self._cpu[-1]
        return max(0.0, after - before) / (ended - began)

    def go_on_from(self, past: "RunSeries") -> None:
        """Prepend earlier figures; called before the first `update`. A round in both is kept once."""
        self.rounds = past.rounds[-self._points :]
        self.network = past.network[-self._points :]
        self.speeds = {name: points[-self._points :] for name, points in past.speeds.items()}
        self._epoch, self._last_round = past._epoch, past._last_round

    def update(self, snapshot: Snapshot, now: float) -> None:
        """Take a snapshot; one that is not newer than the last changes nothing."""
        if snapshot.epoch != self._epoch:
            self._epoch = snapshot.epoch
            self._uptime_s = self._last_round = None
            self._counted.clear()
            self._rates.clear()
            self._cpu.clear()
        elif snapshot.sequence <= self._sequence:
            return
        self._sequence = snapshot.sequence
        closed = snapshot.last_round
        if closed is not None and closed.number != self._last_round:
            self._last_round = closed.number
            self._keep(self.rounds, (now, closed))
        spent = snapshot.loop.cpu_s
        if spent is not None and (not self._cpu or snapshot.uptime_s > self._cpu[-1][0]):
            self._cpu.append((snapshot.uptime_s, spent))
        # A replayed event has the figures and the uptime of the round before it.
        if self._uptime_s is not None and snapshot.uptime_s <= self._uptime_s:
            return
        self._uptime_s = snapshot.uptime_s
        workers = self._placed({worker.id: worker for worker in snapshot.workers})
        before, self._counted, self._rates = self._counted, {}, {}
        counters: dict[str | None, Totals | Worker] = {None: snapshot.totals}
        counters |= {worker.id: worker for worker in workers}
        for name, counts in counters.items():
            counted = _Counted(snapshot.uptime_s, counts.bytes_up, counts.bytes_down)
            self._counted[name] = counted
            if rate := _rate(before.get(name), counted, now):
                self._rates[name] = rate
        if rate := self._rates.get(None):
            self._keep(self.network, rate)
        for worker in workers:
            if worker.steps_per_s is not None and worker.health != "lost":
                self._keep(self.speeds[worker.id], (now, worker.steps_per_s))

    def later(self, now: float, after: float, *, is_whole: bool = False) -> dict[str, Any]:
        """The points later than `after`; each starts with its time relative to `now` in seconds.

        Returns:
            rounds: [t, number, seconds, averaged, loss, delta norm, staleness]
            network: [t, bytes a second up, down]
            speeds: worker id -> [t, steps a second]
            scales: of all points, see `off_scale`
        """

        def points(kept: Sequence[_Point]) -> Sequence[_Point]:
            return kept[bisect_right(kept, after, key=itemgetter(0)) :]

        each = max(LEAST_SPEEDS, MOST_SPEEDS // max(1, len(self.speeds)))
        speeds = {
            name: [(at - now, speed) for at, speed in spread(points(kept), each)]
            for name, kept in self.speeds.items()
        }
        rounds: list[tuple[float, LastRound]] = []
        for made in self.rounds:  # a broker resumed from an older version repeats rounds
            while rounds and rounds[-1][1].number >= made[1].number:
                rounds.pop()
            rounds.append(made)
        figures = {
            "loss": ("loss", figure),
            "seconds": ("seconds", duration),
            "norm": ("delta_norm", norm),
        }
        return {
            "scales": {
                name: off_scale(
                    [(r.number, getattr(r, field)) for _, r in rounds], written, is_whole=is_whole
                )
                for name, (field, written) in figures.items()
            },
            "rounds": [
                (at - now, r.number, r.seconds, r.averaged, r.loss, r.delta_norm, r.staleness)
                for at, r in points(rounds)
            ],
            "network": [(r.at - now, r.up, r.down) for r in points(self.network)],
            "speeds": {name: kept for name, kept in speeds.items() if kept},
        }

    def _placed(self, here: Mapping[str, Worker]) -> list[Worker]:
        """The present workers that have a place, each moved behind the absent ones."""
        self.speeds |= {name: self.speeds.pop(name) for name in here if name in self.speeds}
        gone = [name for name in self.speeds if name not in here]
        for name in here:
            if name in self.speeds:
                continue
            if len(self.speeds) >= self._workers:
                if not gone:
                    break
                del self.speeds[gone.pop(0)]
            self.speeds[name] = []
        return [worker for name, worker in here.items() if name in self.speeds]

    def _keep(self, kept: list[_Point], new: _Point) -> None:
        kept.append(new)
        del kept[: -self._points]


class WholeSeries(RunSeries):
    """The figures of a complete run: thinned, keeping the extremes of each stretch."""

    def _keep(self, kept: list[_Point], new: _Point) -> None:
        kept.append(new)
        if len(kept) >= 2 * self._points:
            kept[:] = _thinned(kept)


def _thinned(points: Sequence[_Point], length: int = 16) -> list[_Point]:
    """Of each `length` points the first, and those with the least and the greatest of each value."""
    kept: list[_Point] = []
    for start in range(0, len(points), length):
        part = points[start : start + length]
        places = {0}
        for values in zip(*map(_values, part), strict=True):
            known = [place for place, value in enumerate(values) if value is not None]
            if known:
                places |= {min(known, key=values.__getitem__), max(known, key=values.__getitem__)}
        kept += [part[place] for place in sorted(places)]
    return kept


def _values(point: Any) -> tuple[float | None, ...]:
    """The values of a point that a plot shows."""
    value = point[1]
    if isinstance(value, LastRound):
        return value.seconds, value.loss, value.delta_norm
    return tuple(point[1:])


def spread(points: Sequence[_Point], most: int) -> Sequence[_Point]:
    """At most `most` of the points, evenly spaced, including the newest."""
    stride = -(-len(points) // most) or 1
    return points[(len(points) - 1) % stride :: stride]
