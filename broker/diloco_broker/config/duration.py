"""A span of time as people write it: `90s`, `30m`, `36h`, `7d`, or a number of seconds."""

from __future__ import annotations

import re

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_TEXT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhd]?)")


def seconds(text: object) -> float:
    """So many seconds; raises ValueError for anything else, and for none at all."""
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{text!r:.60} is no span of time")
    return float(found[1]) * _SECONDS[found[2]]
