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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

L = TypeVar("L")
P = TypeVar("P")

# Bytes: less than any chunk, more than what travels on control while a round goes on.
CHUNK_IS_MORE_THAN = 32 << 10

PHASES = ("delta", "upload", "step", "download", "apply")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed (nearest rank).

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
    """What each product is measured against: the mean of the limits before and behind it."""
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

    Raises:
        ValueError: there are not two points with different x.
    """
    if len({x for x, _ in points}) < 2:
        raise ValueError(f"a line needs two points that differ in x, not {list(points)}")
    return statistics.linear_regression(*zip(*points, strict=True)).slope


@dataclass(frozen=True)
class Moments:
    """When the first and the last chunk went and came, in seconds of the monotonic clock."""

    began: float
    first_up: float
    last_up: float
    first_down: float
    last_down: float
    ended: float


def moments(
    samples: Sequence[tuple[float, int, int]], began: float, ended: float
) -> Moments | None:
    """What samples of (time, bytes sent, bytes received) tell; None where no chunk went or came."""
    if not samples:
        return None
    (_, up, down), (_, all_up, all_down) = samples[0], samples[-1]
    if all_up - up < CHUNK_IS_MORE_THAN or all_down - down < CHUNK_IS_MORE_THAN:
        return None

    def within(at: float) -> float:
        return min(max(at, began), ended)

    return Moments(
        began,
        within(next(t for t, sent, _ in samples if sent - up >= CHUNK_IS_MORE_THAN)),
        within(next(t for t, sent, _ in samples if all_up - sent < CHUNK_IS_MORE_THAN)),
        within(next(t for t, _, got in samples if got - down >= CHUNK_IS_MORE_THAN)),
        within(next(t for t, _, got in samples if all_down - got < CHUNK_IS_MORE_THAN)),
        ended,
    )


def phases(found: Moments) -> Mapping[str, float]:
    """Seconds that each phase adds; they sum up to the time from `began` to `ended`."""
    marks = [found.began]
    for at in (found.first_up, found.last_up, found.first_down, found.last_down, found.ended):
        marks.append(max(marks[-1], at))
    return {name: marks[i + 1] - marks[i] for i, name in enumerate(PHASES)}
