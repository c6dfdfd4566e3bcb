"""One worker over a whole run: what it contributed, when it was here, what happened to it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from diloco_protocol.records import NOT_SENT
from diloco_tools.monitor.report.curves import Curve, Points, quantile
from diloco_tools.monitor.report.plain_values import LONGEST_NAME, count, number, text
from diloco_tools.monitor.report.sentences import Sign

HERE, LOST, STALLED = "here", "lost", "stalled"
# The state of a worker after each sign of it; None: gone.
_THEN = {
    "joined": HERE,
    "back": HERE,
    "reconnected": HERE,
    "moving": HERE,
    "lost": LOST,
    "stalled": STALLED,
    "died": None,
    "left": None,
    "kicked": None,
    "revoked": None,
}
CURVES = ("loss", "norm", "speed")
STRETCHES = 48  # of a curve of one worker: at most four points each
FINEST = 1024  # parts of a run: a span or a gap that is shorter than one cannot be seen
MOST_MARKS = 200  # half of them the first, half the last
MOST_HOSTS = 4


@dataclass(frozen=True)
class Span:
    """A worker was `state` from `began_at` to `ended_at`: here, lost (no connection) or stalled."""

    began_at: float
    ended_at: float
    state: str


@dataclass(frozen=True)
class Mark:
    """Something that a worker did, or that was done to it."""

    at: float
    what: str  # joined, back, reconnected, lost, stalled, moving, died, left, kicked or revoked
    text: str = ""  # the broker's sentence


class Counter:
    """The sum of a counter that now and then begins again."""

    def __init__(self) -> None:
        self.sum = self._last = 0

    def reads(self, value: int | None, most: int | None = None) -> int:
        """Take its value, return the sum. A value below the last one began at 0; but one above `most`,
        all that can have been counted since, went on from an older checkpoint."""
        if value is not None:
            if value >= self._last:
                self.sum += value - self._last
            elif most is None or value <= most:
                self.sum += value
            self._last = value
        return self.sum


class _Record:
    """What a worker's figures are made of."""

    def __init__(self) -> None:
        self.since = 0.0  # when its present state began
        self.last_word = ""  # of its last going
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        self.points = {name: Points() for name in CURVES}
        self.moments = array("d")  # of its contributions
        self.staleness: list[int] = []
        self.up, self.down = Counter(), Counter()


@dataclass
class Worker:
    """Figures are what the lines of rounds say of it. `id` is the newest of a worker that had another
    one after each restart; `name` the first."""

    id: str
    restarts: int = 0  # under another id
    hosts: tuple[str, ...] = ()
    behind: int | None = None  # of a relay: how many workers, in its last round
    first_seen: float = 0.0
    last_seen: float = 0.0
    here_s: float = 0.0
    # How the history leaves it: here, the word of its last mark, or away: it was here when a broker
    # ended, and did not come to the next one.
    ended: str = ""
    contributions: int = 0
    rounds_here: int = 0  # rounds that closed while it was here
    step: int | None = None
    steps_per_s: float | None = None  # median of what it reported
    loss: float | None = None  # the last that it reported
    delta_norm: float | None = None  # the last
    staleness_mean: float | None = None  # versions
    staleness_most: int | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    deaths: int = 0
    kicks: int = 0
    returns: int = 0  # after it had gone
    spans: tuple[Span, ...] = ()
    marks: tuple[Mark, ...] = ()
    marks_left_out: int = 0
    active: tuple[tuple[float, float], ...] = ()  # stretches in which it contributed

    name: str = field(default="", compare=False, metadata=NOT_SENT)
    now: str | None = field(default=None, compare=False, metadata=NOT_SENT)  # its state; None: gone
    was_here_at_end: bool = field(default=False, compare=False, metadata=NOT_SENT)  # of a broker
    _record: _Record = field(default_factory=_Record, repr=False, compare=False, metadata=NOT_SENT)

    def joined_from(self, host: str) -> None:
        host = text(host, LONGEST_NAME)
        if host and host not in self.hosts and len(self.hosts) < MOST_HOSTS:
            self.hosts = (*self.hosts, host)

    def contributed(
        self, at: float, round_: int, line: Mapping[str, Any], ups: int, downs: int
    ) -> int | None:
        """Its part in a round; returns the staleness of its work, if that is known.

        `ups`, `downs`: bytes of all workers so far in this incarnation of the broker.
        """
        self.contributions += 1
        self.last_seen = at
        self._record.moments.append(at)
        self.was_here_at_end = False
        if self.now is None:
            self._become(HERE, at)
            self._record.last_word = ""
        self.behind = count(line.get("workers"))
        self.joined_from(text(line.get("host")))
        self.step = count(line.get("step")) if line.get("step") is not None else self.step
        values = [number(line.get(name)) for name in ("loss", "delta_norm", "steps_per_s")]
        self.loss = self.loss if values[0] is None else values[0]
        self.delta_norm = self.delta_norm if values[1] is None else values[1]
        for curve, value in zip(CURVES, values, strict=True):
            if value is not None:
                self._record.points[curve].add(at, round_, value)
        self.bytes_up = self._record.up.reads(count(line.get("bytes_up")), ups)
        self.bytes_down = self._record.down.reads(count(line.get("bytes_down")), downs)
        staleness = count(line.get("staleness"))
        if staleness is not None:
            self._record.staleness.append(staleness)
        return staleness

    def shows(self, sign: Sign, at: float, sentence: str) -> None:
        """What a sentence of the broker says of it."""
        what = sign.what
        if what == "joined" and self.was_here_at_end:
            what = "reconnected"  # the broker was away, and not the worker
        elif (
            what == "joined" and self.now is None and (self._record.spans or self._record.last_word)
        ):
            what = "back"
            self.returns += 1
        self.was_here_at_end = False
        self.deaths += what == "died"
        self.kicks += what == "kicked"
        self._become(_THEN[what], at)
        self._record.last_word = what if self.now is None else ""
        self._record.marks.append(Mark(at, what, sentence))
        self.joined_from(sign.host)
        self.last_seen = at

    def broker_ended(self, at: float) -> None:
        self.was_here_at_end = self.now is not None
        self._become(None, at)

    def _become(self, state: str | None, at: float) -> None:
        if state != self.now:
            if self.now is not None:
                self._record.spans.append(
                    Span(self._record.since, max(at, self._record.since), self.now)
                )
            self.now, self._record.since = state, at

    def finish(self, began: float, ended: float) -> None:
        """Sum up, once the run's last line was read; the run lasted from `began` to `ended`."""
        finest = max(1.0, (ended - began) / FINEST)
        self.here_s = sum(span.ended_at - span.began_at for span in self._record.spans)
        self.ended = "here" if self.was_here_at_end else self._record.last_word or "away"
        self.steps_per_s = quantile(self._record.points["speed"].values, 0.5)
        if self._record.staleness:
            self.staleness_mean = sum(self._record.staleness) / len(self._record.staleness)
            self.staleness_most = max(self._record.staleness)
        self.spans = tuple(_as_seen(self._record.spans, finest))
        half = MOST_MARKS // 2
        few = len(self._record.marks) <= MOST_MARKS
        self.marks = tuple(
            self._record.marks if few else self._record.marks[:half] + self._record.marks[-half:]
        )
        self.marks_left_out = len(self._record.marks) - len(self.marks)
        self.active = tuple(_stretches(self._record.moments, began, finest))

    def curve(self, key: str) -> Curve | None:
        """One of `CURVES`; None without a point."""
        gaps = ((one.ended_at, other.began_at) for one, other in pairwise(self._record.spans))
        absent = tuple((start, end) for start, end in gaps if start < end)
        points = self._record.points[key]
        return points.curve(self.id, STRETCHES, absent) if len(points) else None


def _as_seen(spans: list[Span], finest: float) -> list[Span]:
    """Spans with nothing between them that cannot be seen: then they are one, in the longer's state."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last is not None and span.ended_at - last.began_at < finest:
            longer = max(last, span, key=lambda each: each.ended_at - each.began_at)
            found[-1] = Span(last.began_at, span.ended_at, longer.state)
        else:
            found.append(span)
    return found


def _stretches(moments: Sequence[float], began: float, length: float) -> list[tuple[float, float]]:
    """Stretches of the run with a moment in them, neighbours joined."""
    found: list[tuple[int, int]] = []
    for at in moments:
        place = int((at - began) / length)
        if found and place <= found[-1][1]:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return [(began + start * length, began + end * length) for start, end in found]
