"""Values of an untrusted line, read so that none of them can break a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_protocol.printable import printable

LARGEST = 1e18  # nothing that a run counts is larger, and 64 bits hold it
LONGEST_TEXT = 500  # characters
LONGEST_NAME = 64


def number(value: Any) -> float | None:
    """A finite number of a size that means something, or None."""
    if type(value) is float or type(value) is int:
        return float(value) if -LARGEST < value < LARGEST else None  # NaN is in no range
    return None


def count(value: Any) -> int | None:
    """A whole number that is not negative, or None."""
    found = number(value)
    return int(found) if found is not None and found >= 0 else None


def text(value: Any, longest: int = LONGEST_TEXT) -> str:
    """A text in one line of printable characters; empty for anything else."""
    if not isinstance(value, str):
        return ""
    shown = printable(value[: longest + 1])
    return shown if len(shown) <= longest else shown[:longest] + "…"


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings as "outer.lr": a number, a text, a truth, a list as text, or None."""
    found: dict[str, Any] = {}
    for key, each in value.items():
        name = f"{before}{text(key, LONGEST_NAME)}"
        if isinstance(each, dict) and before.count(".") < 3:
            found |= flat(each, f"{name}.")
        elif isinstance(each, bool) or each is None:
            found[name] = each
        elif isinstance(each, int | float):
            found[name] = each if number(each) is not None else None
        else:
            found[name] = text(each if isinstance(each, str) else repr(each))
    return found
