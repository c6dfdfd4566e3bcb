"""Quantities as people write and read them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest

from diloco_protocol import quantities
from diloco_protocol.quantities import FORMATS, NONE


@pytest.mark.parametrize(
    ("written", "values", "shown"),
    [
        (
            quantities.byte_size,
            (0, 9, 999, 1000, 9_960, 38_000_000, 999_600_000, 1_500_000_000_000),
            ["0 B", "9 B", "999 B", "1.0 kB", "10 kB", "38 MB", "1.0 GB", "1.5 TB"],
        ),
        (
            quantities.duration,
            (0.04, 0.44, 9.94, 9.96, 41.4, 99.6, 3600 * 1.9, 3600 * 50, 86400 * 400),
            ["0.0 s", "0.4 s", "9.9 s", "10 s", "41 s", "2 min", "2 h", "50 h", "400 d"],
        ),
        (quantities.duration, (inf, nan, -1.0, 1e79), [NONE] * 4),
        (quantities.clock, (8000, 266_400), ["02:13:20", "3 d 02:00"]),
        (quantities.scaled, (0, 0.41, 5.23, 1500, 820_000), ["0", "0.41", "5.2", "1.5k", "820k"]),
        (quantities.figure, (0.0, 2.4131, 1234.5, nan), ["0.000", "2.413", "1.23e+03", NONE]),
        (quantities.percent, (0.0, 0.012, 0.12), ["0%", "1.2%", "12%"]),
        (quantities.parameters, (9_930_000, 1_300_000_000, 2), ["9.93M", "1.3B", "2"]),
        (
            quantities.estimate_s,
            (0.02, 1.234, 750, 8000),
            ["20 ms", "1.23 s", "12.5 min", "2.22 h"],
        ),
    ],
)
def test_quantities_take_few_characters(
    written: Callable[[Any], str], values: tuple[Any, ...], shown: list[str]
) -> None:
    assert [written(value) for value in values] == shown


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if name not in ("text", "names", "setting")]
)
@pytest.mark.parametrize("value", [None, inf, nan])
def test_what_is_unknown_is_written_the_same_everywhere(name: str, value: float | None) -> None:
    assert FORMATS[name](value) == NONE


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.02),
        ("0.5s", 0.5),
        ("30m", 1800.0),
        ("2min", 120.0),
        ("36h", 129_600.0),
        ("90", 90.0),
    ],
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert quantities.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 parsecs", "-1s", None, 5])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="5min"):
        quantities.parse_duration(text)
