"""The facts of a report: plain records, which the page shows and `--json` prints.

Times are Unix seconds by the broker's clock, durations seconds, sizes bytes.
"""

from array import array
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import Any

from diloco_protocol import feed
from diloco_protocol.records import NOT_SENT

MOST_HOSTS = 4


class Ending(str, Enum):
    """The state of a run at the end of its history."""

    OVER, STOPPED, OPEN = "over", "stopped", "open"


class Ended(str, Enum):
    """The state of a worker. AWAY: present when a broker ended, and did not rejoin the next one."""

    HERE, LEFT, DIED, KICKED, AWAY = "here", "left", "died", "kicked", "away"


class Counter:
    """The sum of a counter that may be reset."""

    def __init__(self) -> None:
        self.sum = self._last = 0

    def reads(self, value: int, most: int) -> int:
        """Take a reading, return the sum. A decrease is a reset to 0, unless the value exceeds `most`,
        the total since the broker's start: then the broker resumed from an older checkpoint."""
        if value >= self._last:
            self.sum += value - self._last
        elif value <= most:
            self.sum += value
        self._last = value
        return self.sum


def quantile(values: Sequence[float], share: float) -> float | None:
    """The quantile by nearest rank; None without values."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else None


@dataclass
class Life:
    """One incarnation of the broker, from its start to its last line. `ending` is its logged reason."""

    epoch: str
    began_at: float
    ended_at: float
    ending: str | None = None
    is_over: bool = False  # the run ended, not only the broker
    rounds: int = 0
    contributions: int = 0
    first: int | None = None  # number of its first round
    last: int | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    cpu_s: float | None = None
    rss_bytes: int | None = None  # largest of its round lines
    longest_turn_ms: float | None = None
    version: str = ""  # of the broker's program

    def closed(self, closed: feed.LastRound, line: feed.Snapshot) -> None:
        """Take a round line."""
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
    """A worker, with figures from round lines."""

    id: str
    hosts: tuple[str, ...] = ()
    via: str = ""  # its relay in its last round
    first_seen: float = 0.0
    last_seen: float = 0.0
    ended: Ended = Ended.HERE
    contributions: int = 0
    step: int | None = None
    steps_per_s: float | None = None  # median of its reports
    loss: float | None = None  # last reported
    delta_norm: float | None = None  # of the last
    staleness_mean: float | None = None  # versions
    staleness_most: int | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    deaths: int = 0
    kicks: int = 0
    returns: int = 0  # after it left, died or was kicked

    speeds: MutableSequence[float] = field(
        default_factory=lambda: array("d"), compare=False, metadata=NOT_SENT
    )
    _up: Counter = field(default_factory=Counter, compare=False, metadata=NOT_SENT)
    _down: Counter = field(default_factory=Counter, compare=False, metadata=NOT_SENT)

    def contributed(self, at: float, line: feed.Worker, life: Life) -> None:
        """Take its part of a round line."""
        self.is_here(at, line.host)
        self.contributions += 1
        self.via = line.via
        self.step = line.step
        self.loss = self.loss if line.loss is None else line.loss
        self.delta_norm = self.delta_norm if line.delta_norm is None else line.delta_norm
        if line.steps_per_s is not None:
            self.speeds.append(line.steps_per_s)
        self.bytes_up = self._up.reads(line.bytes_up, life.bytes_up)
        self.bytes_down = self._down.reads(line.bytes_down, life.bytes_down)
        mean = self.staleness_mean or 0.0
        self.staleness_mean = mean + (line.staleness - mean) / self.contributions
        self.staleness_most = max(self.staleness_most or 0, line.staleness)

    def is_here(self, at: float, host: str) -> None:
        self.returns += self.ended in (Ended.LEFT, Ended.DIED, Ended.KICKED)
        self.ended, self.last_seen = Ended.HERE, at
        if host and host not in self.hosts and len(self.hosts) < MOST_HOSTS:
            self.hosts = (*self.hosts, host)

    def went(self, at: float, how: Ended) -> None:
        self.ended, self.last_seen = how, at
        self.deaths += how == Ended.DIED
        self.kicks += how == Ended.KICKED


@dataclass(frozen=True)
class Said:
    """A warning or an error of the broker, counted with those that differ only in numbers."""

    level: str
    text: str  # of the newest
    count: int
    first_at: float
    last_at: float


@dataclass(frozen=True)
class Event:
    """One line of the broker's log, except those of rounds."""

    at: float
    level: str
    text: str


@dataclass(frozen=True)
class Change:
    """A change of a setting. `by_restart`: by options of a restart."""

    at: float
    name: str
    before: Any
    after: Any
    by_restart: bool


@dataclass(frozen=True)
class Action:
    """An action of an operator. `is_proven`: authenticated by a key."""

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
    """The facts of a report. `Digest` fills them in, line by line."""

    began_at: float = 0.0
    ended_at: float = 0.0  # of the newest line; never decreases
    ending: Ending = Ending.OPEN
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
    remarks: tuple[str, ...] = ()  # about the history itself
