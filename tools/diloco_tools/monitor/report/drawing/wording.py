"""How quantities and moments are written on a page: as the dashboard does."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from diloco_tools.top.drawing.notation import number, scaled

NONE = "—"


def duration(seconds: float | None) -> str:
    """0.4 s, 41 s, 12 min, 3 h, 4 d."""
    if seconds is None or seconds < -0.05:
        return NONE
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    for size, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if seconds / size < 99.5:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def clock(seconds: float) -> str:
    """A length in full: 02:13:20, or 3 d 02:13."""
    whole = int(max(0.0, seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    return f"{hours:02}:{minutes:02}:{whole % 60:02}"


def moment(at: float, form: str = "%d %b %Y %H:%M:%S") -> str:
    """A moment in UTC, as most machines of a run are in other time zones than their reader."""
    try:
        return datetime.fromtimestamp(at, timezone.utc).strftime(form)
    except (ValueError, OverflowError, OSError):  # a clock that was far off
        return NONE


def size(count: float | None) -> str:
    return NONE if count is None else scaled(count, "B")


def rate(bytes_a_second: float) -> str:
    return "0" if bytes_a_second == 0 else scaled(bytes_a_second, "B/s")


def quantity(value: float | None) -> str:
    """A count or a speed: 0.41, 1.5k, 38M."""
    return NONE if value is None else "0" if value == 0 else scaled(value)


def figure(value: float | None) -> str:
    """A loss."""
    return number(value, NONE)


def norm(value: float | None) -> str:
    """A norm: its size matters, and not so much its digits."""
    return NONE if value is None else f"{value:.3g}"


def on_axis(value: float) -> str:
    """The same beside a line of the grid: no more digits than it has."""
    if value and not 0.001 <= abs(value) < 100_000:
        return f"{value:.1e}"
    return f"{value:.6g}"


def plural(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def setting(value: Any) -> str:
    """A setting as it was given."""
    if value is None or value == "":
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value)
