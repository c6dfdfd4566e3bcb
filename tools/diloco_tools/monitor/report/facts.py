"""What a report says of a run: plain records, which the page shows and `--json` prints.

Moments are Unix seconds by the broker's clock, durations seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol.records import NOT_SENT
from diloco_tools.monitor.report.curves import Curve
from diloco_tools.monitor.report.plain_values import count, number
from diloco_tools.monitor.report.workers import Counter, Worker

# How a run is left by its history.
OVER, STOPPED, OPEN = "over", "stopped", "open"


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

    _up: Counter = field(default_factory=Counter, compare=False, metadata=NOT_SENT)
    _down: Counter = field(default_factory=Counter, compare=False, metadata=NOT_SENT)

    def closed(self, round_: int, averaged: int, line: Mapping[str, Any]) -> None:
        """Take the line of a round."""
        self.rounds += 1
        self.contributions += averaged
        self.first = round_ if self.first is None else self.first
        self.last = round_
        self.bytes_up = self._up.reads(count(line.get("bytes_up")))
        self.bytes_down = self._down.reads(count(line.get("bytes_down")))
        cpu, rss = number(line.get("cpu_s")), count(line.get("rss_bytes"))
        turn = number(line.get("longest_turn_ms"))
        self.cpu_s = self.cpu_s if cpu is None else cpu
        self.rss_bytes = rss if self.rss_bytes is None else max(self.rss_bytes, rss or 0)
        if turn is not None:
            self.longest_turn_ms = max(self.longest_turn_ms or 0.0, turn)


@dataclass(frozen=True)
class SlowRound:
    """One of the rounds that took longest. `expected` and `without` are not known in every mode."""

    number: int
    at: float
    fragment: int
    seconds: float
    averaged: int
    expected: int | None = None
    without: str = ""


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

    at: float
    who: str
    is_proven: bool
    what: str
    text: str
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
    model: Mapping[str, Any] = field(default_factory=dict)
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
    curves: Mapping[str, tuple[Curve, ...]] = field(default_factory=dict)
    staleness: tuple[tuple[int, int], ...] = ()  # (versions, contributions), the last: and older
    slowest: tuple[SlowRound, ...] = ()
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
    pauses: tuple[tuple[float, float], ...] = ()  # of the run, by operators
    lines: int = 0
    damaged: int = 0
    remarks: tuple[str, ...] = ()  # what a reader must know of the history itself
