"""Validates numbers and texts from peers; `records` applies it to every field.

Numbers that a worker *reports* about itself (steps, speed, loss) are only displayed, averaged and
recorded. An invalid report is not an error: it is clamped to its range or dropped. Any other number that
is out of range is rejected. Texts are made printable, except names, which are rejected if they are not
printable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.printable import LONGEST_TEXT, printable

# Largest count that all displays show exactly, because web pages use doubles. A million tokens per
# second reach it in 285 years.
MOST = 2**53 - 1
# Optimizer steps per second: one in 30 years, and far more than a Python loop can make.
SLOWEST, FASTEST = 1e-9, 1e9
# Largest loss: displays can add millions of them without overflow.
LARGEST = 1e300

Fit = Callable[[Any, str, str], Any]
"""Takes a value, the record it is in, and the name of its field. Returns the validated value."""


def count(value: float, where: str, name: str) -> int:
    """A count, clamped to 0 to `MOST`."""
    return min(max(int(value), 0), MOST)


def rate(value: float, where: str, name: str) -> float | None:
    """A rate per second; None if it is implausible."""
    return value if SLOWEST <= value <= FASTEST else None


def figure(value: float, where: str, name: str) -> float:
    """A measured value, clamped. NaN and infinities are kept: they show that training diverged."""
    return min(max(value, -LARGEST), LARGEST) if math.isfinite(value) else value


def length(value: float, where: str, name: str) -> float | None:
    """A norm; None if it is negative, infinite or NaN."""
    return min(value, LARGEST) if 0 <= value < math.inf else None


def unsigned(value: float, where: str, name: str) -> float:
    """Any number from 0 to 2**64 - 1."""
    if not 0 <= value < 1 << 64:
        raise ProtocolError(
            Code.BAD_HEADER, f"{where}.{name} is {value}; it must be from 0 to 2**64 - 1."
        )
    return value


def after_any(value: float, where: str, name: str) -> float:
    """The counter of a version, or -1 for any version."""
    return value if value == -1 else unsigned(value, where, name)


def text(value: str, where: str, name: str) -> str:
    """The text, made printable and cut at `LONGEST_TEXT` characters."""
    return printable(value[:LONGEST_TEXT])


def named(value: str, where: str, name: str) -> str:
    """A printable name; others are rejected, because a changed name would identify something else."""
    if not value.isprintable():
        raise ProtocolError(
            Code.BAD_HEADER,
            f"{where}.{name} is {value!a:.80}; it must have printable characters only.",
        )
    return value


_REPORTS: Mapping[str, Mapping[str, Fit]] = {
    "Join": {"pid": count},
    "Heartbeat": {
        "step": count,
        "inner_step": count,
        "steps_per_s": rate,
        "loss": figure,
        "tokens": count,
        "merge_delay": count,
    },
    "Push": {"steps": count, "tokens": count, "samples": count, "loss": figure, "norm": length},
    "Pull": {"after": after_any},
    "Progress": dict.fromkeys(
        ("rounds", "steps", "tokens", "seconds", "max_rounds", "token_budget"), count
    )
    | {"max_seconds": length},
    "Released": {"loss": figure},
}
_NAMES: Mapping[str, Fit] = {"worker_id": named, "name": named, "dtype": named}


def fit_of(record: type, name: str, kind: type) -> Fit | None:
    """The validator of a field of this type; None if any value is valid."""
    if kind is str:
        return _NAMES.get(name, text)
    return _REPORTS.get(record.__name__, {}).get(name, unsigned if kind is int else None)
