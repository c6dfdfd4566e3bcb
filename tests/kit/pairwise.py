"""Fewer cases than a full product of three parameters."""

from collections.abc import Iterable
from typing import Any


def pairwise_cases(
    first: Iterable[Any], second: Iterable[Any], third: Iterable[Any]
) -> list[tuple[Any, Any, Any]]:
    """Every pair of values of any two parameters, in `len(first) * len(second)` cases.

    The third parameter has the fewest values: otherwise some pairs would be missing.
    """
    rows, columns, values = list(first), list(second), list(third)
    assert len(values) <= min(len(rows), len(columns))
    return [
        (row, column, values[(i + j) % len(values)])
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
