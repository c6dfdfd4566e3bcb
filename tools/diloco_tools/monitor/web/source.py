"""Sources of the page's figures: a feed that a thread listens to, or a recorded run.

Many pages share one `FeedSource`. It keeps the newest snapshot and bounded series, and no state of a
page: each page asks once a second, and says up to which time it has the points.

Answers are strict JSON. Their times are seconds before the moment of sending, to which the page adds the
time since; the clocks of two machines are never compared.
"""

import json
import math
import time
from pathlib import Path

from diloco_protocol.clients import Keys
from diloco_protocol.feed import MAX_DEPTH, FeedError, FeedRefusedError, Snapshot, json_safe
from diloco_protocol.monitor.verdict import Verdict
from diloco_protocol.quantities import clock, moment
from diloco_protocol.records import to_plain
from diloco_tools.monitor.feed.history_lines import HISTORY
from diloco_tools.monitor.feed.listener import FeedSubscriber, Listener
from diloco_tools.monitor.feed.replay import History, rounds_of
from diloco_tools.monitor.feed.series import RunSeries
from diloco_tools.monitor.web.words import live_words, words

POINTS = 900  # of each figure: a quarter of an hour at one snapshot a second
REPLAY_POINTS = 2_000  # plotted moments of a recorded run: more than a plot has columns


class FeedSource(Listener):
    """Listens to one broker's feed, and keeps its figures over time. For any thread."""

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        super().__init__(FeedSubscriber(address, keys=keys), self._note, self._cannot_read)
        self._series = RunSeries(points=POINTS)
        self._problem: str | None = None
        self._recalled_at = -math.inf  # when the past was read; older pages lack it
        # The moment of the newest words, their verdict, and their JSON.
        self._worded: tuple[object, Verdict, str] = (None, Verdict(), "")

    def state(self, after: float | None = None) -> str:
        """All as JSON; for a page only the points later than `after`, and no snapshot."""
        with self.lock:
            now, model = time.monotonic(), self.model
            since = -math.inf if after is None or after < self._recalled_at else after
            verdict, words = self._words(now)
            head = {
                "clock": now,
                "age_s": None if model.snapshot is None else model.age_s(now),
                "missed": model.missed,
                "restarts": model.restarts,
                "malformed": self.feed.malformed,
                "problem": self._problem,
                "refusal": model.refusal,
                "verdict": verdict.word,
                "reasons": verdict.reasons,
                "whole": since == -math.inf,
                "series": self._series.later(now, since),
            }
            text = f'{encoded(head)[:-1]},"words":{words}'
            if after is not None:
                return f"{text}}}"
            shown = picture(model.snapshot, self._series) if model.snapshot else "null"
            return f'{text},"picture":{shown}}}'

    def _words(self, now: float) -> tuple[Verdict, str]:
        """Verdict and words of this moment; the same for all pages that ask within a second."""
        key = (self.received, math.floor(now), self.model.refusal, self._problem)
        if self._worded[0] != key:
            verdict = self.model.verdict(now)
            said = live_words(
                self.model, self._series, verdict, now, problem=self._problem, address=self.address
            )
            self._worded = (key, verdict, encoded(said))
        return self._worded[1:]

    def _note(self, snapshot: Snapshot) -> None:
        now = self.model.received_at
        if self._recalled_at == -math.inf:
            self._recall(snapshot, now)
            self._recalled_at = now
        self._series.update(snapshot, now)
        self._problem = None

    def _recall(self, snapshot: Snapshot, now: float) -> None:
        """Begin with the rounds in the broker's save folder, if it can be read here."""
        saved, unix_s = snapshot.checkpoint, snapshot.unix_s
        if saved is None or unix_s is None:
            return
        past = RunSeries(points=POINTS)
        for each in rounds_of(Path(saved.folder) / HISTORY, snapshot.epoch, POINTS):
            past.update(each.snapshot, now - max(0.0, unix_s - each.at))
        self._series.go_on_from(past)

    def _cannot_read(self, error: FeedError) -> None:
        if not isinstance(error, FeedRefusedError):
            self._problem = str(error)


def outline_of(moments: History) -> str:
    """JSON of a recorded run: the number of moments, their times, and the plots of the whole run."""
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
            "skipped": moments.skipped,
            "series": series.later(first, -math.inf, is_whole=True),
        }
    )


def moment_of(moments: History, index: int) -> str | None:
    """JSON of one moment in the words of the page; None beyond the ends."""
    if not 0 <= index < len(moments):
        return None
    shown = moments[index]
    after = shown.at - moments[0].at
    last = shown.snapshot.last_round
    said = words(shown.snapshot, None, lambda _: None) | {
        "badge": ("quiet", "REPLAY", ""),
        "title": "REPLAY: DiLoCo",
    }
    return encoded(
        {
            "index": index,
            "at": shown.at,
            "when": f"{moment(shown.at)} UTC, {clock(after)} after the start",
            "marker": {"number": last and last.number, "at": shown.at},
            "words": said,
        }
    )


def encoded(value: object) -> str:
    """Strict JSON without spaces."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):  # a record, or an infinite number
        plain = json_safe(to_plain(value, with_none=True), 2 * MAX_DEPTH)
        return json.dumps(plain, allow_nan=False, separators=(",", ":"))


def picture(snapshot: Snapshot, series: RunSeries) -> str:
    """The JSON of one snapshot, with the bytes a second of each worker."""
    plain = to_plain(snapshot, with_none=True)
    for worker in plain["workers"] + plain["dead"]:
        del worker["extra"]  # of any size
    rates = {worker.id: series.rate_of(worker.id) for worker in snapshot.workers}
    known = {name: (rate.up, rate.down) for name, rate in rates.items() if rate is not None}
    return encoded({"snapshot": plain, "rates": known})
