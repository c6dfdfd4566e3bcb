"""Where the page's figures come from: a feed that a thread listens to, or a recorded run.

Many pages look at one `FeedSource`. It keeps the newest snapshot and bounded series, never a queue for
each page: a page that is slow misses snapshots, and costs nothing.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_protocol.feed import FeedError, Snapshot
from diloco_tools.dashboard.picture import encoded, history, picture
from diloco_tools.feed.listener import FeedWatcher
from diloco_tools.feed.replay import History, read_history
from diloco_tools.feed.series import RunSeries

POINTS = 900  # of each figure: a quarter of an hour at one snapshot a second
REPLAY_POINTS = 2_000  # moments of a recorded run that are plotted: more than a plot has columns


class FeedSource(FeedWatcher):
    """Watches one broker's feed, and keeps its figures over time. For any thread."""

    def __init__(self, address: str) -> None:
        super().__init__(address, self._cannot_read, self._note)
        self._series = RunSeries(points=POINTS)
        self._problem: str | None = None
        self._encoded = (0, "null")  # `received` and JSON of the newest picture that was asked for

    def pulse(self) -> dict[str, Any]:
        """How alive the feed is: age of the newest snapshot in seconds (None before the first)."""
        with self.lock:
            return self._pulse(time.monotonic())

    def state(self, after: float = -math.inf) -> tuple[str, float]:
        """Everything for a page that has the points up to `after`, as JSON, and the new `after`."""
        with self.lock:
            now = time.monotonic()
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
            return f'{encoded(head)[:-1]},"picture":{self._encoded[1]}}}', now

    def _pulse(self, now: float) -> dict[str, Any]:
        return {
            "age_s": None if self.model.snapshot is None else self.model.age_s(now),
            "missed": self.model.missed,
            "restarts": self.model.restarts,
            "malformed": self.listener.malformed,
            "problem": self._problem,
        }

    def _note(self, snapshot: Snapshot, now: float) -> None:
        self._series.update(snapshot, now)
        self._problem = None

    def _cannot_read(self, error: FeedError) -> None:
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
        history = read_history(path)
        if not history.moments:
            raise FeedError(f"{path} has no line of a run; give the history.jsonl of a save folder")
        return ReplaySource(history)

    def outline(self) -> str:
        """JSON: how many moments there are, when they were, and the plots of the whole run."""
        moments = self.history.moments
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
        if not 0 <= index < len(self.history.moments):
            return None
        moment = self.history.moments[index]
        head = json.dumps({"index": index, "at": moment.at, "verdict": "healthy", "reasons": []})
        return f'{head[:-1]},"picture":{picture(moment.snapshot, RunSeries(points=1))}}}'
