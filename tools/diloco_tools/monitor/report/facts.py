"""What a report says of a run: plain records, which the page shows and `--json` prints.

Moments are Unix seconds by the broker's clock, durations seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_tools.monitor.report.thinning import Point

# How a run is left by its history.
OVER, STOPPED, OPEN = "over", "stopped", "open"


@dataclass(frozen=True)
class Life:
    """One life of the broker, from its start to its end. `ending` is its last words, None without."""

    epoch: str
    began_at: float
    ended_at: float  # of its last line
    ending: str | None = None
    is_over: bool = False  # the run came to its end, and not only the broker
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


@dataclass(frozen=True)
class Worker:
    """One worker over the whole run. Figures are what the lines of rounds say of it."""

    id: str  # the newest, of a worker that had another one after each restart
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
    steps_per_s: float | None = None  # median of what it told
    loss: float | None = None  # the last that it told
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


@dataclass(frozen=True)
class Curve:
    """Values over a run; `count` points, of which those kept have all extremes."""

    name: str
    points: tuple[Point, ...]
    count: int
    absent: tuple[tuple[float, float], ...] = ()  # times in which there could be no point


@dataclass(frozen=True)
class SlowRound:
    """One of the rounds that took longest. `expected` and `without` are not told in every mode."""

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
    """A setting of the run that has another value from now on. `by_restart`: of a new life's options."""

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


@dataclass(frozen=True)
class Facts:
    """Everything that a report says."""

    began_at: float
    ended_at: float
    ending: str  # OVER, STOPPED or OPEN
    last_words: str | None
    run: str | None
    mode: str
    model: Mapping[str, Any]
    lives: tuple[Life, ...]
    rounds: int
    contributions: int
    most_alive: int
    first_loss: float | None
    last_loss: float | None
    best_loss: float | None
    best_loss_round: int | None
    round_median_s: float | None
    round_p95_s: float | None
    round_longest_s: float | None
    bytes_up: int
    bytes_down: int
    workers: tuple[Worker, ...]  # most contributions first
    workers_left_out: int
    curves: Mapping[str, tuple[Curve, ...]]
    staleness: tuple[tuple[int, int], ...]  # (versions, contributions), the last: and older
    slowest: tuple[SlowRound, ...]
    said: tuple[Said, ...]
    warnings: int
    errors: int
    events: tuple[Event, ...]
    events_left_out: int
    settings: Mapping[str, Any]
    changes: tuple[Change, ...]
    changes_left_out: int
    actions: tuple[Action, ...]
    actions_left_out: int
    pauses: tuple[tuple[float, float], ...]  # of the run, by operators
    lines: int
    damaged: int
    remarks: tuple[str, ...] = field(default=())  # what a reader must know of the history itself
