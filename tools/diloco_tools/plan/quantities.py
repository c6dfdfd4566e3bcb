"""Quantities of a plan: 1G bits a second, 95% of the time."""

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
    """Parse bits a second: 100M, 1G, 2.5Gbit/s. Raises ValueError with a sentence."""
    number, unit = _split(text)
    for end in _RATE_ENDS:
        if unit.endswith(end) and unit != "b":
            unit = unit.removesuffix(end)
            break
    factor = _THOUSANDS.get(unit) if unit != "b" else None
    if number is None or factor is None or number <= 0:
        raise ValueError(f"{text!r} is not a rate; use 100M or 1G, in bits a second.")
    return number * factor


def both_ways(text: str) -> tuple[float, float]:
    """Parse a link: 1G, or 40M/250M for up and down. Raises ValueError."""
    ways = re.split(r"/(?=\s*\d)", text)  # not at the slash of Mb/s
    if len(ways) > 2:
        raise ValueError(f"{text!r} has more than two rates; use 40M/250M for up and down.")
    return rate(ways[0]), rate(ways[-1])


def several(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """A parser of values separated by commas."""
    return lambda text: tuple(parse(each.strip()) for each in text.split(","))


def share(text: str) -> float:
    """Parse 95% or 0.95. Raises ValueError with a sentence."""
    number, unit = _split(text)
    value = math.nan if number is None or unit not in {"", "%"} else number
    value = value / 100 if unit == "%" else value
    if not 0 < value < 1:
        raise ValueError(f"{text!r} is not a share below 100%; use 95% or 0.95.")
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
    """A share of time, with digits enough to tell 99.97% from 100%."""
    if number < 0.99:
        return f"{number:.1%}"
    return f"{min(number, 0.9999):.2%}" if number < 0.99995 else "100%"
