"""Schedules of the outer optimizer's learning rate and momentum over the rounds of a run.

t is the number of rounds of a fragment, p = min(1, t / R) the progress of its schedule of R rounds, and

    s = 0                       constant
        p                       linear
        (1 - cos(pi p)) / 2     cosine (half a period, as in arXiv 1608.03983, without restarts)

    lr        eta (1 + s (F - 1))                  falls from eta to F eta, and stays there
    momentum  M + s (mu - M), if M < mu, else mu   rises from M to mu, and stays there

M is a momentum, not a factor of mu: a run with mu <= M uses mu from the start.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

CONSTANT = "constant"
MOST_ROUNDS = 1_000_000
USUAL_FINAL = 0.1  # default of F
USUAL_START = 0.0  # default of M

_TEXT = re.compile(r"(linear|cosine):([0-9]{1,7})(?::([0-9]{1,3}(?:\.[0-9]{1,9})?|\.[0-9]{1,9}))?")


@dataclass(frozen=True)
class Schedule:
    """A shape, R, and the third number of the text: F or M; None for its default."""

    shape: str = CONSTANT
    rounds: int = 1
    value: float | None = None

    @classmethod
    def parse(cls, text: object) -> Schedule:
        """Read `constant` or `SHAPE:ROUNDS[:VALUE]`; raises ValueError for anything else."""
        if text == CONSTANT:
            return cls()
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ValueError(f"{text!r:.60} is not a schedule")
        shape, rounds, value = found.groups()
        if not 1 <= int(rounds) <= MOST_ROUNDS:
            raise ValueError(f"rounds must be from 1 to {MOST_ROUNDS}, got {rounds}")
        return cls(shape, int(rounds), None if value is None else float(value))

    @property
    def is_constant(self) -> bool:
        return self.shape == CONSTANT

    @property
    def final(self) -> float:
        """F of a learning rate schedule."""
        return USUAL_FINAL if self.value is None else self.value

    @property
    def start(self) -> float:
        """M of a momentum warm-up."""
        return USUAL_START if self.value is None else self.value

    def done(self, rounds: float) -> float:
        """s after this number of rounds, from 0 to 1."""
        along = min(1.0, rounds / self.rounds)
        match self.shape:
            case "linear":
                return along
            case "cosine":
                return (1 - math.cos(math.pi * along)) / 2
        return 0.0


@dataclass(frozen=True)
class OuterSchedule:
    """Both schedules of a run, and the restarts of its momentum.

    `restart` is the number of rounds between two resets of the momentum to zero (arXiv 2605.28585); 0:
    none. It depends on the count alone, so a resumed run restarts in the same rounds.

    `size` is the number of gradients that count as a round of a fragment: 1, or N in asynchronous mode,
    where each push is a gradient.
    """

    lr: Schedule = Schedule()
    warmup: Schedule = Schedule()
    size: int = 1
    restart: int = 0

    def restarts(self, gradients: int) -> bool:
        """Whether the momentum is reset to zero before the step after this number of gradients."""
        return self.restart > 0 and gradients > 0 and gradients % (self.restart * self.size) == 0

    def factor(self, gradients: int) -> float:
        """The factor of the learning rate after this number of gradients of a fragment."""
        return 1 + self.lr.done(gradients / self.size) * (self.lr.final - 1)

    def momentum(self, momentum: float, gradients: int) -> float:
        """The scheduled value of a momentum after this number of gradients of a fragment."""
        start = self.warmup.start
        if self.warmup.is_constant or start >= momentum:
            return momentum
        return start + self.warmup.done(gradients / self.size) * (momentum - start)


UNCHANGING = OuterSchedule()
