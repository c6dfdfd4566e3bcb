"""Where the page's figures come from: a feed that a thread listens to, or a recorded run.

Many pages look at one `FeedSource`. It keeps the newest snapshot and bounded series, never a queue for
each page: a page that is slow misses snapshots, and costs nothing.

What a page is sent is strict JSON. Times leave here as seconds before the moment of sending, so the page
adds what its own clock has counted since; the clocks of two machines are never compared.
"""

import json
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, TypeVar

from diloco_protocol.clients import Keys
from diloco_protocol.feed import MAX_DEPTH, FeedError, FeedRefusedError, Snapshot, json_safe
from diloco_protocol.quantities import clock
from diloco_protocol.records import to_plain
from diloco_tools.monitor.feed.listener import FeedWatcher
from diloco_tools.monitor.feed.model import Freshness
from diloco_tools.monitor.feed.replay import HISTORY, History, read_history, rounds_of
from diloco_tools.monitor.feed.series import RunSeries
from diloco_tools.monitor.web.words import words

POINTS = 900  # of each figure: a quarter of an hour at one snapshot a second
REPLAY_POINTS = 2_000  # moments of a recorded run that are plotted: more than a plot has columns
SPEED_POINTS = 20_000  # of all workers in one message: some 500 kB
LEAST_SPEED_POINTS = 60  # of one worker
MOST_WORDED = 300  # workers whose words come with a pulse: some 100 kB

P = TypeVar("P")


class FeedSource(FeedWatcher):
    """Watches one broker's feed, and keeps its figures over time. For any thread."""

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        super().__init__(address, self._cannot_read, self._note, keys)
        self._series = RunSeries(points=POINTS)
        self._problem: str | None = None
        self._recalled_at = -math.inf  # when the past was read: pages lack it that are older
        self._encoded = (0, "null")  # `received` and JSON of the newest picture that was asked for
        self._words: tuple[object, str] = (None, "null")  # the moment and JSON of the newest words

    def pulse(self, *, is_shown: bool = False) -> str:
        """JSON: how alive the feed is; `age_s` of the newest snapshot in seconds, null before the first.

        For a page that shows this snapshot also the words of this moment, unless there are many workers.
        """
        with self.lock:
            now, snapshot = time.monotonic(), self.model.snapshot
            few = snapshot is not None and len(snapshot.listed) <= MOST_WORDED
            return _joined(
                self._pulse(now), words=self._worded(now) if few and is_shown else "null"
            )

    def state(self, after: float = -math.inf) -> tuple[str, float]:
        """Everything for a page that has the points up to `after`, as JSON, and the new `after`."""
        with self.lock:
            now = time.monotonic()
            after = -math.inf if after < self._recalled_at else after
            if self._encoded[0] != self.received and self.model.snapshot is not None:
                self._encoded = (self.received, picture(self.model.snapshot, self._series))
            verdict = self.model.verdict(now)
            head = {
                **self._pulse(now),
                "verdict": verdict.word,
                "reasons": verdict.reasons,
                "whole": after == -math.inf,
                "series": history(self._series, now, after),
            }
            return _joined(head, words=self._worded(now), picture=self._encoded[1]), now

    def _worded(self, now: float) -> str:
        """The JSON of the words of this moment; the same for all pages that ask within half a second."""
        key = (self.received, math.floor(2 * now))
        if self._words[0] != key and (snapshot := self.model.at(now)) is not None:
            fresh, series = self.model.freshness(now), self._series
            if fresh is not Freshness.STALE:
                snapshot = replace(snapshot, uptime_s=snapshot.uptime_s + self.model.age_s(now))
            said = words(snapshot, fresh, series.rate_of, series.cpu)
            self._words = (key, encoded(said))
        return self._words[1]

    def _pulse(self, now: float) -> dict[str, Any]:
        return {
            "age_s": None if self.model.snapshot is None else self.model.age_s(now),
            "missed": self.model.missed,
            "restarts": self.model.restarts,
            "malformed": self.listener.feed.malformed,
            "problem": self._problem,
            "refusal": self.model.refusal,
        }

    def _note(self, snapshot: Snapshot, now: float) -> None:
        if self._recalled_at == -math.inf:
            self._recall(snapshot, now)
            self._recalled_at = now
        self._series.update(snapshot, now)
        self._problem = None

    def _recall(self, snapshot: Snapshot, now: float) -> None:
        """Begin with the rounds that the broker has written down, where its folder can be read here."""
        saved, unix_s = snapshot.checkpoint, snapshot.unix_s
        if saved is None or unix_s is None:
            return
        past = RunSeries(points=POINTS)
        for moment in rounds_of(Path(saved.folder) / HISTORY, snapshot.epoch, POINTS):
            past.update(moment.snapshot, now - max(0.0, unix_s - moment.at))
        self._series.go_on_from(past)

    def _cannot_read(self, error: FeedError) -> None:
        if not isinstance(error, FeedRefusedError):
            self._problem = str(error)


@dataclass(frozen=True)
class ReplaySource:
    """A run that was: its moments one by one, and its figures from the first moment to the last."""

    history: History

    @staticmethod
    def of_file(path: Path) -> "ReplaySource":
        """Read a history.

        Raises:
            FeedError: the file is missing, or no history.
        """
        return ReplaySource(read_history(path))

    def outline(self) -> str:
        """JSON: how many moments there are, when they were, and the plots of the whole run."""
        moments = self.history
        first = moments[0].at
        series = RunSeries(points=REPLAY_POINTS + 1)
        stride = -(-len(moments) // REPLAY_POINTS)
        for index in sorted({*range(0, len(moments), stride), len(moments) - 1}):
            series.update(moments[index].snapshot, moments[index].at)
        return encoded(
            {
                "moments": len(moments),
                "first_at": first,
                "last_at": moments[-1].at,
                "skipped": self.history.skipped,
                "series": history(series, first, -math.inf),
            }
        )

    def moment(self, index: int) -> str | None:
        """JSON of one moment as `FeedSource.state` has it, without series; None beyond the ends."""
        if not 0 <= index < len(self.history):
            return None
        moment, series = self.history[index], RunSeries(points=1)
        return _joined(
            {
                "index": index,
                "at": moment.at,
                "verdict": "healthy",
                "reasons": [],
                "after": clock(moment.at - self.history[0].at),
            },
            words=encoded(words(moment.snapshot, None, series.rate_of)),
            picture=picture(moment.snapshot, series),
        )


def _joined(head: dict[str, Any], **encoded_values: str) -> str:
    """JSON of `head` and of values that are JSON already."""
    more = "".join(f',"{name}":{value}' for name, value in encoded_values.items())
    return f"{encoded(head)[:-1]}{more}}}"


def encoded(value: object) -> str:
    """Strict JSON without spaces or line breaks: it fits into one line of an event stream."""
    plain = json_safe(to_plain(value, with_none=True), 2 * MAX_DEPTH)
    return json.dumps(plain, allow_nan=False, separators=(",", ":"))


def picture(snapshot: Snapshot, series: RunSeries) -> str:
    """The JSON of one snapshot, with the bytes a second of each worker."""
    plain = to_plain(snapshot, with_none=True)
    for worker in plain["workers"] + plain["dead"]:
        del worker["extra"]  # of any size, and nothing on the page shows it
    rates = {worker.id: series.rate_of(worker.id) for worker in snapshot.workers}
    known = {name: (rate.up, rate.down) for name, rate in rates.items() if rate is not None}
    return encoded({"snapshot": plain, "rates": known})


def history(series: RunSeries, now: float, after: float) -> dict[str, Any]:
    """The points later than `after`, each beginning with its time relative to `now` in seconds.

    Returns:
        rounds: [t, number, seconds, averaged, loss, delta norm, staleness]
        network: [t, bytes a second up, down]
        speeds: worker id -> [t, steps a second]
    """

    def later(points: Sequence[P], time_of: Callable[[P], float]) -> Sequence[P]:
        return points[bisect_right(points, after, key=time_of) :]

    each = max(LEAST_SPEED_POINTS, SPEED_POINTS // max(1, len(series.speeds)))
    speeds = {name: later(points, itemgetter(0)) for name, points in series.speeds.items()}
    return {
        "rounds": [
            (at - now, r.number, r.seconds, r.averaged, r.loss, r.delta_norm, r.staleness)
            for at, r in later(series.rounds, itemgetter(0))
        ],
        "network": [
            (rate.at - now, rate.up, rate.down) for rate in later(series.network, attrgetter("at"))
        ],
        "speeds": {
            name: [(at - now, speed) for at, speed in thinned(points, each)]
            for name, points in speeds.items()
            if points
        },
    }


def thinned(points: Sequence[P], most: int) -> Sequence[P]:
    """At most `most` of the points, evenly spread, the newest always among them."""
    stride = -(-len(points) // most) or 1
    return points[(len(points) - 1) % stride :: stride]
