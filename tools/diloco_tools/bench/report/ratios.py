"""Medians, spreads, percentiles, and ratios of what was measured in turn. Pure.

Absolute figures do not hold on machines that are shared: they drift by a factor of two within
minutes. So a limit and the product are measured in turn (limit, product, limit, ..., limit), each
measurement of the product is divided by the mean of the two limits around it, and the median of
these ratios counts.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

L = TypeVar("L")
P = TypeVar("P")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed (nearest rank).

    >>> percentile([3.0, 1.0, 2.0, 4.0], 0.5), percentile([3.0, 1.0, 2.0, 4.0], 0.99)
    (2.0, 4.0)

    Raises:
        ValueError: there are no values, or the share is not within 0 to 1.
    """
    if not values:
        raise ValueError("no values were measured, so there is no percentile of them")
    if not 0 <= share <= 1:
        raise ValueError(f"the share is {share}; it must be within 0 to 1")
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
    """What each product is measured against: the mean of the limits before and behind it.

    >>> around([1.0, 3.0, 5.0])
    [2.0, 4.0]
    """
    return [statistics.fmean(pair) for pair in itertools.pairwise(limits)]


def against(products: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Each product divided by the limits around it.

    Raises:
        ValueError: there is not one limit more than products, or one of the means is 0.
    """
    if len(limits) != len(products) + 1:
        raise ValueError(
            f"{len(products)} products need {len(products) + 1} limits around them, "
            f"there are {len(limits)}"
        )
    means = around(limits)
    if not all(means):
        raise ValueError(f"a limit of 0 is none to compare with: {list(limits)}")
    return [product / mean for product, mean in zip(products, means, strict=True)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line closest to the points (least squares).

    >>> slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)])
    2.0

    Raises:
        ValueError: there are not two points with different x.
    """
    if len({x for x, _ in points}) < 2:
        raise ValueError(f"a line needs two points that differ in x, not {list(points)}")
    return statistics.linear_regression(*zip(*points, strict=True)).slope
