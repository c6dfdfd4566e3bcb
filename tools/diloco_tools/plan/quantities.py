"""Quantities that only a plan is asked in: 7B parameters, 1G a second, 95% of the time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from diloco_protocol.quantities import estimate

T = TypeVar("T")

_PARTS = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z/%]*)\s*", re.IGNORECASE)
_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_RATE_ENDS = ("bit/s", "bits/s", "b/s", "bps", "bit")


def rate(text: str) -> float:
    """Bits a second: 100M, 1G, 2.5Gbit/s. Raises ValueError with a sentence."""
    number, unit = _split(text)
    for end in _RATE_ENDS:
        if unit.endswith(end) and unit != "b":
            unit = unit.removesuffix(end)
            break
    factor = _THOUSANDS.get(unit) if unit != "b" else None
    if number is None or factor is None or number <= 0:
        raise ValueError(f"{text!r} is no speed of a line; write 100M or 1G, in bits a second.")
    return number * factor


def both_ways(text: str) -> tuple[float, float]:
    """A line: 1G, or 40M/250M where it is another one up than down. Raises ValueError."""
    ways = re.split(r"/(?=\s*\d)", text)  # not at that of Mb/s
    if len(ways) > 2:
        raise ValueError(f"{text!r} has more ways than up and down; write 40M/250M.")
    return rate(ways[0]), rate(ways[-1])


def several(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Reads what commas separate."""
    return lambda text: tuple(parse(each.strip()) for each in text.split(","))


def share(text: str) -> float:
    """95% or 0.95. Raises ValueError with a sentence."""
    number, unit = _split(text)
    value = math.nan if number is None or unit not in {"", "%"} else number
    value = value / 100 if unit == "%" else value
    if not 0 < value < 1:
        raise ValueError(f"{text!r} is no share of the time; write 95% or 0.95, below 100%.")
    return value


def _split(text: str) -> tuple[float | None, str]:
    found = _PARTS.fullmatch(text)
    if found is None:
        return None, ""
    try:
        return float(found[1]), found[2].lower()
    except ValueError:
        return None, ""


of_bits, of_bytes = partial(estimate, unit="b/s"), partial(estimate, unit="B")


def of_share(number: float) -> str:
    """A share of time, so that 99.97% does not read as all of it."""
    if number < 0.99:
        return f"{number:.1%}"
    return f"{min(number, 0.9999):.2%}" if number < 0.99995 else "100%"
