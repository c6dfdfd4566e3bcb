"""Medians, ratios of what was measured in turn, and the phases of a round. Pure.

Absolute figures do not hold on machines that are shared: they drift by a factor of two within
minutes. So a limit and the product are measured in turn (limit, product, limit, ..., limit), each
measurement of the product is divided by the mean of the two limits around it, and the median of
these ratios counts.

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
FIRST_DOWN = 3  # of the moments between which they are


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


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line closest to the points (least squares), which differ in x."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def is_a_line(points: Sequence[tuple[float, float]]) -> bool:
    """Whether some differ in x."""
    return len({x for x, _ in points}) > 1


def moments(
    samples: Sequence[tuple[float, int, int]], began: float, ended: float
) -> list[float] | None:
    """When a round began, its first and last chunk went, the first and last came, and it ended.

    Args:
        samples: of the monotonic clock, and the bytes sent and received up to then.

    Returns:
        Six moments; None where no chunk went or came.
    """
    found = [began]
    for way in (1, 2):
        before, after = (samples[i][way] if samples else 0 for i in (0, -1))
        if after - before < CHUNK_IS_MORE_THAN:
            return None
        first = next(each for each in samples if each[way] - before >= CHUNK_IS_MORE_THAN)
        last = next(each for each in samples if after - each[way] < CHUNK_IS_MORE_THAN)
        found += [min(max(at, began), ended) for at, *_ in (first, last)]
    return [*found, ended]


def phases(found: Sequence[float]) -> dict[str, float]:
    """Seconds that each phase adds between these moments; they sum up to the time between all."""
    marks = itertools.pairwise(itertools.accumulate(found, max))
    return {name: later - at for name, (at, later) in zip(PHASES, marks, strict=True)}
