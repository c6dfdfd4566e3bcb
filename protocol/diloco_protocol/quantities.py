"""Formats and parses quantities for people: 41 s, 38 MB, 1.5k, 5min. Pure.

Formatters return `NONE` for None and for values that are not numbers, so that displays need no special
case. Prefixes are decimal, as for network rates: 38 MB is 38,000,000 bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, Final

NONE: Final = "—"  # an unknown value
PREFIXES = ("", "k", "M", "G", "T", "P")
_DAY_S = 86_400.0


def _is_known(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def duration(seconds: float | None) -> str:
    """0.4 s, 41 s, 12 min, 3 h, 4 d: two significant figures."""
    if seconds is None or not -0.05 < seconds < 9999 * _DAY_S:
        return NONE
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    for size, unit in ((1.0, "s"), (60.0, "min"), (3600.0, "h")):
        if seconds / size < 99.5:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / _DAY_S:.0f} d"


def clock(seconds: float | None) -> str:
    """A duration in full: 02:13:20, or 3 d 02:13."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    whole = int(max(0.0, seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    return f"{hours:02}:{minutes:02}:{whole % 60:02}"


def moment(at: float | None, form: str = "%d %b %Y %H:%M:%S") -> str:
    """A moment in UTC, because the machines of a run may be in other time zones than the reader."""
    if at is None:
        return NONE
    try:
        return datetime.fromtimestamp(at, timezone.utc).strftime(form)
    except (ValueError, OverflowError, OSError):  # from a clock that was far off
        return NONE


def scaled(value: float | None, unit: str = "") -> str:
    """0.41, 1.5k, 38M, or with unit "B" 1.5 kB, 38 MB: two or three figures."""
    if value is None or not math.isfinite(value):
        return NONE
    space = " " if unit else ""
    if 0 < abs(value) < 0.995:
        return f"{value:.2f}{space}{unit}"
    for prefix in PREFIXES:
        # From 9.95 and 999.5 on the rounded number would need one more character.
        if abs(value) < 9.95 and (prefix or value != int(value)):
            return f"{value:.1f}{space}{prefix}{unit}"
        if abs(value) < 999.5:
            return f"{value:.0f}{space}{prefix}{unit}"
        value /= 1000
    return f"{value:.3g}{space}E{unit}"


def byte_size(count: float | None) -> str:
    """38 MB."""
    return scaled(count, "B")


def byte_rate(bytes_per_s: float | None) -> str:
    """38 MB/s."""
    return scaled(bytes_per_s, "B/s")


def count(value: float | None) -> str:
    """An exact count: 1,644."""
    return f"{value:,.0f}" if value is not None and _is_known(value) else NONE


def whole(value: float | None) -> str:
    """A number that identifies something, such as a round: 1644."""
    return f"{value:.0f}" if value is not None and _is_known(value) else NONE


def figure(value: float | None) -> str:
    """A loss: three decimals if they are significant, else with an exponent."""
    if value is None or not math.isfinite(value):
        return NONE
    if value and not 0.001 <= abs(value) < 1000:
        return f"{value:.2e}"
    return f"{value:.3f}"


def norm(value: float | None) -> str:
    """A norm with three significant digits: 0.0131, 1.25."""
    return f"{value:.3g}" if value is not None and _is_known(value) else NONE


def setting(value: Any) -> str:
    """A setting as people write it: 0.7, bf16, yes."""
    if value is None or value == "":
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def percent(share: float | None) -> str:
    """12%, or 1.2% below 9.95%."""
    if share is None or not math.isfinite(share):
        return NONE
    return f"{100 * share:.1f}%" if 0 < share < 0.0995 else f"{100 * share:.0f}%"


def plural(number: int, one: str, many: str = "") -> str:
    """1 restart, 2 restarts."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def names(ids: list[str] | tuple[str, ...], most: int = 6) -> str:
    """The first names, and the number of the others."""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(ids[:most]) + more


def parameters(count: float | None) -> str:
    """9.93M, 1.3B, as in names of models."""
    if count is None or not _is_known(count):
        return NONE
    return estimate(count, "").replace(" ", "").replace("G", "B")


# The formats of the field catalogue by name.
FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "whole": whole,
    "count": count,
    "amount": scaled,
    "parameters": parameters,
    "bytes": byte_size,
    "bytes/s": byte_rate,
    "duration": duration,
    "clock": clock,
    "moment": moment,
    "figure": figure,
    "norm": norm,
    "percent": percent,
    "setting": setting,
    "names": names,
}


def estimate(value: float, unit: str) -> str:
    """1.23 GB, 12.5 Mb/s: three significant digits."""
    for prefix in PREFIXES:
        if value < 999.5 or prefix == PREFIXES[-1]:
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"


def estimate_s(seconds: float) -> str:
    """20 ms, 1.23 s, 12.5 min, 3 h, 2.4 d: three significant digits."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    for size, unit in ((1.0, "s"), (60.0, "min"), (3600.0, "h")):
        if seconds < 120 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / _DAY_S:.3g} d"


_PARTS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(us|ms|s|m|min|h|d|)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1, "": 1, "m": 60, "min": 60, "h": 3600, "d": _DAY_S}


def parse_duration(text: object) -> float:
    """Parse a duration into seconds: 20ms, 90s, 5min, 36h, 7d, or a plain number. Raises ValueError."""
    found = _PARTS.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"{text!r:.60} is not a duration (use 30s, 5min, 2h)")
    return float(found[1]) * _SECONDS[found[2]]


_NUMBER = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)([kmgbt]?)", re.IGNORECASE)
_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


def parse_parameters(text: str) -> int:
    """Parse the size of a model: 124M, 1.3B, 350e6, or plain digits. Raises ValueError."""
    found = _NUMBER.fullmatch(text.replace(" ", ""))
    try:
        number = round(float(found[1]) * _THOUSANDS[found[2].lower()]) if found else 0
    except (ValueError, OverflowError):  # several points, or too many digits
        number = 0
    if number < 1:
        raise ValueError(f"{text!r} is not a number of parameters; write 124M or 1.3B.")
    return number
