"""Medians, ratios of what was measured in turn, and the phases of a round. Pure.

The phases of a round overlap: chunks come back while others are still being sent. What is told here
is the time that each phase adds behind the one before it, seen from a worker by what its counters say,
so that they sum up to the round:

    delta     from the start to the first chunk on its way up
    upload    to the last chunk on its way up
    step      to the first chunk that comes down; 0 where it came before the last went up
    download  to the last chunk that comes down
    apply     until the parameters are in the model
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

L = TypeVar("L")
P = TypeVar("P")

# Bytes: less than any chunk, more than what travels on control while a round goes on.
CHUNK_IS_MORE_THAN = 32 << 10

PHASES = ("delta", "upload", "step", "download", "apply")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def in_turn(
    limit: Callable[[], L], product: Callable[[], P], repeats: int
) -> tuple[list[L], list[P]]:
    """Measure the limit, the product, the limit, ...; one limit more than products."""
    limits, products = [limit()], []
    for _ in range(repeats):
        products.append(product())
        limits.append(limit())
    return limits, products


def around(limits: Sequence[float]) -> list[float]:
    """What each product is measured against: the mean of the limits before and behind it."""
    return [statistics.fmean(pair) for pair in itertools.pairwise(limits)]


def against(products: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Each product divided by the limits around it."""
    return [each / limit for each, limit in zip(products, around(limits), strict=True)]


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Of the straight line closest to the points (least squares); None where all have one x."""
    if len({x for x, _ in points}) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def phases(
    samples: Sequence[tuple[float, int, int]], began: float, ended: float
) -> dict[str, float] | None:
    """Seconds that each phase adds, and when the first chunk came down; None where none went or came.

    Args:
        samples: time, and the bytes that had been sent and received by then.
    """
    marks = [began]
    for way in (1, 2):
        before, after = (samples[i][way] if samples else 0 for i in (0, -1))
        if after - before < CHUNK_IS_MORE_THAN:
            return None
        first = next(each for each in samples if each[way] - before >= CHUNK_IS_MORE_THAN)
        last = next(each for each in samples if after - each[way] < CHUNK_IS_MORE_THAN)
        marks += [min(max(at, began), ended) for at, *_ in (first, last)]
    first_down = marks[3]
    ends = list(itertools.accumulate([*marks, ended], max))
    found = {name: ends[i + 1] - ends[i] for i, name in enumerate(PHASES)}
    return found | {"first_down": first_down}
