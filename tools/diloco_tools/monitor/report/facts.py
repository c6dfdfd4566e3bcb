"""What a report says of a run: plain records, which the page shows and `--json` prints.

Moments are Unix seconds by the broker's clock, durations seconds, sizes bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from diloco_protocol import feed
from diloco_protocol.records import NOT_SENT

# How a run is left by its history.
OVER, STOPPED, OPEN = "over", "stopped", "open"
# How a worker is left by it: here, how it went, or away: it was here when a broker ended, and did not
# come to the next one.
HERE, LEFT, DIED, KICKED, AWAY = "here", "left", "died", "kicked", "away"
MOST_HOSTS = 4


class Counter:
    """The sum of a counter that now and then begins again."""

    def __init__(self) -> None:
        self.sum = self._last = 0

    def reads(self, value: int, most: int) -> int:
        """Take its value, return the sum. A value below the last one began at 0; but one above `most`,
        all that can have been counted since, went on from an older checkpoint."""
        if value >= self._last:
            self.sum += value - self._last
        elif value <= most:
            self.sum += value
        self._last = value
        return self.sum


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least value that this share of all does not exceed; None without any."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else None


@dataclass
class Life:
    """One incarnation of the broker, from its start to its last line. `ending` is the reason that it
    logged, None without one."""

    epoch: str
    began_at: float
    ended_at: float
    ending: str | None = None
    is_over: bool = False  # the run reached its end, and not only the broker
    rounds: int = 0
    contributions: int = 0
    first: int | None = None  # number of its first round
    last: int | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    cpu_s: float | None = None
    rss_bytes: int | None = None  # the most that a round's line says
    longest_turn_ms: float | None = None
    version: str = ""  # of the broker's program

    def closed(self, closed: feed.LastRound, line: feed.Snapshot) -> None:
        """Take the line of a round."""
        self.rounds += 1
        self.contributions += closed.averaged
        self.first = closed.number if self.first is None else self.first
        self.last = closed.number
        self.bytes_up, self.bytes_down = line.totals.bytes_up, line.totals.bytes_down
        loop = line.loop
        self.cpu_s = self.cpu_s if loop.cpu_s is None else loop.cpu_s
        self.rss_bytes = max(filter(None, (self.rss_bytes, loop.rss_bytes)), default=None)
        turns = (self.longest_turn_ms, loop.longest_turn_ms)
        self.longest_turn_ms = max(filter(None, turns), default=None)


@dataclass
class Worker:
    """Figures are what the lines of rounds say of it."""

    id: str
    hosts: tuple[str, ...] = ()
    via: str = ""  # the relay that it came through, in its last round
    first_seen: float = 0.0
    last_seen: float = 0.0
    ended: str = HERE
    contributions: int = 0
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

    speeds: MutableSequence[float] = field(
        default_factory=lambda: array("d"), compare=False, metadata=NOT_SENT
    )
    _up: Counter = field(default_factory=Counter, compare=False, metadata=NOT_SENT)
    _down: Counter = field(default_factory=Counter, compare=False, metadata=NOT_SENT)

    def contributed(self, at: float, told: feed.Worker, life: Life) -> None:
        """Its part in a round."""
        self.is_here(at, told.host)
        self.contributions += 1
        self.via = told.via
        self.step = told.step
        self.loss = self.loss if told.loss is None else told.loss
        self.delta_norm = self.delta_norm if told.delta_norm is None else told.delta_norm
        if told.steps_per_s is not None:
            self.speeds.append(told.steps_per_s)
        self.bytes_up = self._up.reads(told.bytes_up, life.bytes_up)
        self.bytes_down = self._down.reads(told.bytes_down, life.bytes_down)
        mean = self.staleness_mean or 0.0
        self.staleness_mean = mean + (told.staleness - mean) / self.contributions
        self.staleness_most = max(self.staleness_most or 0, told.staleness)

    def is_here(self, at: float, host: str) -> None:
        self.returns += self.ended in (LEFT, DIED, KICKED)
        self.ended, self.last_seen = HERE, at
        if host and host not in self.hosts and len(self.hosts) < MOST_HOSTS:
            self.hosts = (*self.hosts, host)

    def went(self, at: float, how: str) -> None:
        self.ended, self.last_seen = how, at
        self.deaths += how == DIED
        self.kicks += how == KICKED


@dataclass(frozen=True)
class Said:
    """A warning or an error of the broker; those that differ in their numbers alone are one."""

    level: str
    text: str  # of the newest
    count: int
    first_at: float
    last_at: float


@dataclass(frozen=True)
class Event:
    """One line of the broker's log, but those of rounds."""

    at: float
    level: str
    text: str


@dataclass(frozen=True)
class Change:
    """A setting of the run that has another value from now on. `by_restart`: an option of the start."""

    at: float
    name: str
    before: Any
    after: Any
    by_restart: bool


@dataclass(frozen=True)
class Action:
    """What an operator did. `is_proven`: a key says who it was."""

    at: float = 0.0
    who: str = ""
    is_proven: bool = False
    what: str = ""
    text: str = ""
    before: Any = None
    after: Any = None
    round: int | None = None

    @property
    def sentence(self) -> str:
        """As the broker logs it."""
        return f"{self.who}{'' if self.is_proven else ' (unproven)'}: {self.text}."


@dataclass
class Facts:
    """Everything that a report says. `Digest` fills it in, line by line."""

    began_at: float = 0.0
    ended_at: float = 0.0  # of the newest line; a clock that was set back does not go back here
    ending: str = OPEN  # OVER, STOPPED or OPEN
    last_words: str | None = None
    run: str | None = None
    mode: str = ""
    model: feed.Model | None = None
    lives: tuple[Life, ...] = ()
    rounds: int = 0
    contributions: int = 0
    most_alive: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    best_loss: float | None = None
    best_loss_round: int | None = None
    round_median_s: float | None = None
    round_p95_s: float | None = None
    round_longest_s: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    workers: tuple[Worker, ...] = ()  # most contributions first
    workers_left_out: int = 0
    series: Mapping[str, Any] = field(default_factory=dict)  # of the plots, see `RunSeries.later`
    said: tuple[Said, ...] = ()
    warnings: int = 0
    errors: int = 0
    events: tuple[Event, ...] = ()
    events_left_out: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    changes_left_out: int = 0
    actions: tuple[Action, ...] = ()
    actions_left_out: int = 0
    lines: int = 0
    damaged: int = 0
    remarks: tuple[str, ...] = ()  # what a reader must know of the history itself
