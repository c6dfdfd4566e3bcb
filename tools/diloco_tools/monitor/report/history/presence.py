"""When each worker was here, and what happened to it: spans of time and marks, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from diloco_tools.monitor.report.facts import Mark, Span
from diloco_tools.monitor.report.history.sentences import Sign

HERE, LOST, STALLED = "here", "lost", "stalled"
# What a worker is after it: None is gone.
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
MOST_SPANS = 400  # of a worker; beyond that the shortest gaps are closed
MOST_MARKS = 200  # of a worker, half of them its first and half its last


@dataclass
class Track:
    """One worker over time. `now` is what it is since `since`; None: gone."""

    spans: list[Span] = field(default_factory=list)
    now: str | None = None
    since: float = 0.0
    marks: list[Mark] = field(default_factory=list)
    marks_left_out: int = 0
    deaths: int = 0
    kicks: int = 0
    returns: int = 0
    last_word: str = ""  # of its last going: died, left, kicked or revoked
    was_here_at_end: bool = False  # of the life before

    def take(self, sign: Sign, at: float, sentence: str) -> None:
        """What a sentence says of it."""
        what = sign.what
        if what == "joined" and self.was_here_at_end:
            what = "reconnected"  # the broker was away, and not the worker
        elif what == "joined" and self.now is None and self.has_gone:
            what = "back"
            self.returns += 1
        self.was_here_at_end = False
        self.deaths += what == "died"
        self.kicks += what == "kicked"
        self._become(_THEN[what], at)
        self.last_word = what if self.now is None else ""
        self._mark(Mark(at, what, sentence))

    def is_here(self, at: float) -> None:
        """The line of a round names it."""
        self.was_here_at_end = False
        if self.now is None:
            self._become(HERE, at)
            self.last_word = ""

    def end(self, at: float) -> None:
        """The broker has ended."""
        self.was_here_at_end = self.now is not None
        self._become(None, at)

    @property
    def has_gone(self) -> bool:
        """It was here once, or what is known of it is that it went."""
        return bool(self.spans or self.last_word)

    @property
    def here_s(self) -> float:
        return sum(span.ended_at - span.began_at for span in self.spans)

    def _become(self, state: str | None, at: float) -> None:
        if state == self.now:
            return
        if self.now is not None:
            self.spans.append(Span(self.since, max(at, self.since), self.now))
            if len(self.spans) > 2 * MOST_SPANS:
                self.spans = _fewer(self.spans)
        self.now, self.since = state, at

    def _mark(self, mark: Mark) -> None:
        self.marks.append(mark)
        if len(self.marks) > MOST_MARKS:
            del self.marks[MOST_MARKS // 2]
            self.marks_left_out += 1


def _fewer(spans: list[Span]) -> list[Span]:
    """`MOST_SPANS` of them: neighbours that are over soonest, together, become one."""
    lengths = [
        (later.ended_at - earlier.began_at, place)
        for place, (earlier, later) in enumerate(pairwise(spans))
    ]
    joined = {place for _, place in sorted(lengths)[: len(spans) - MOST_SPANS]}
    kept: list[Span] = []
    for place, span in enumerate(spans):
        if kept and place - 1 in joined:
            last = kept[-1]
            longer = max(last, span, key=lambda each: each.ended_at - each.began_at)
            kept[-1] = Span(last.began_at, span.ended_at, longer.state)
        else:
            kept.append(span)
    return kept


class Activity:
    """When each worker contributed: stretches of time that grow as the run does."""

    MOST = 1024  # stretches of the run

    def __init__(self) -> None:
        self._began: float | None = None
        self._length = 1.0  # seconds of a stretch
        self._active: dict[str, set[int]] = {}

    def add(self, at: float, name: str) -> None:
        if self._began is None:
            self._began = at
        while at - self._began >= self.MOST * self._length:
            self._length *= 2
            self._active = {
                each: {place // 2 for place in places} for each, places in self._active.items()
            }
        place = int(max(0.0, at - self._began) / self._length)
        self._active.setdefault(name, set()).add(place)

    def of(self, name: str) -> tuple[tuple[float, float], ...]:
        """Stretches in which it contributed, neighbours joined."""
        found: list[tuple[float, float]] = []
        began = self._began or 0.0
        for place in sorted(self._active.get(name, ())):
            start, end = began + place * self._length, began + (place + 1) * self._length
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], end)
            else:
                found.append((start, end))
        return tuple(found)
