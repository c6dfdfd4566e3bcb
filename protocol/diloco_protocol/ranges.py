"""The one place where a peer's numbers and texts are made sane: `records` asks here for every field.

What a worker *reports* of itself (steps, speed, loss) is shown, averaged and written down. A report
that makes no sense is worth no refusal: it is brought into range, or left out. Every other number means
something, so one that is out of range is refused. A text is made printable, and one that names
something is refused where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.printable import LONGEST_TEXT, printable

# Counts that all displays show exactly: a page has doubles. A million tokens a second for 285 years.
MOST = 2**53 - 1
# Optimizer steps per second: one in 30 years, and far more than any loop in Python makes.
SLOWEST, FASTEST = 1e-9, 1e9
# So many losses can be added up as displays have pixels, and more, without an overflow.
LARGEST = 1e300

Fit = Callable[[Any, str, str], Any]
"""Takes a number or text, the record it is in, the name of its field. Returns what stands for it."""


def count(value: float, where: str, name: str) -> int:
    """How many, from 0 to `MOST`."""
    return min(max(int(value), 0), MOST)


def rate(value: float, where: str, name: str) -> float | None:
    """How many in a second; None for what no clock can have measured."""
    return value if SLOWEST <= value <= FASTEST else None


def figure(value: float, where: str, name: str) -> float:
    """A measured value. NaN and infinities are news of a training that has gone wrong, and stay."""
    return min(max(value, -LARGEST), LARGEST) if math.isfinite(value) else value


def length(value: float, where: str, name: str) -> float | None:
    """A norm; None for what is none."""
    return min(value, LARGEST) if 0 <= value < math.inf else None


def unsigned(value: float, where: str, name: str) -> float:
    """Any number from 0 to 2**64 - 1."""
    if not 0 <= value < 1 << 64:
        raise ProtocolError(
            Code.BAD_HEADER, f"{where}.{name} is {value}; it must be from 0 to 2**64 - 1."
        )
    return value


def after_any(value: float, where: str, name: str) -> float:
    """The counter of a version, or -1 for "whatever there is"."""
    return value if value == -1 else unsigned(value, where, name)


def text(value: str, where: str, name: str) -> str:
    """What can be printed of it, and no more than `LONGEST_TEXT` characters."""
    return printable(value[:LONGEST_TEXT])


def named(value: str, where: str, name: str) -> str:
    """What it names would be something else if it were changed."""
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
    """What a field of this type has to go through; None for a number that may be any."""
    if kind is str:
        return _NAMES.get(name, text)
    return _REPORTS.get(record.__name__, {}).get(name, unsigned if kind is int else None)
