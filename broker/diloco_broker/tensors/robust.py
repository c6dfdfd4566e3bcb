"""Aggregates: functions that turn the same chunk of several complete pushes into one gradient.

All have the same signature, and are listed in `AGGREGATES`. The mean trusts every worker, and so does
`rda`, a mean with a factor for each tensor (see `radial`); `clip_median_norm` bounds the norm of a
push; the other two leave out the extremes of each element, and so need no bound: Yin et al. 2018,
"Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (arXiv 1803.01498),
definitions 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from statistics import median

import torch
from torch import Tensor

from diloco_broker.core.effects import WholePush

# Elements of each push that are sorted at a time: those of 16 pushes fit into the cache.
SORTED_ELEMENTS = 1 << 14

LARGEST = torch.finfo(torch.float32).max

Aggregate = Callable[[Iterable[Tensor], Sequence[WholePush]], Tensor]
"""Aggregates the same chunk of several pushes.

The iterator yields chunks in the order of the parts; each is valid until the next one is requested, and
must not be modified. The result is a new tensor of their dtype, which is fp32 for parameters.
"""


def mean(chunks: Iterable[Tensor], parts: Sequence[WholePush]) -> Tensor:
    """sum(w_i s_i x_i) / sum(w_i), with weight w_i, scale s_i and chunk x_i of part i.

    It uses the same operations in the same order as `StreamingMean`: with scales of 1 the result is
    identical bit for bit.
    """
    return _weighted_mean(chunks, parts, [1.0] * len(parts))


def clip_median_norm(chunks: Iterable[Tensor], parts: Sequence[WholePush]) -> Tensor:
    """The mean of x_i min(1, median/|x_i|): norms are clipped to the median norm.

    |x_i| is the norm of the complete push, so its direction is unchanged.
    """
    middle = median(part.norm for part in parts)
    return _weighted_mean(
        chunks, parts, [min(1.0, middle / part.norm) if part.norm else 1.0 for part in parts]
    )


def trimmed_mean(trim: float) -> Aggregate:
    """The mean of each element without its k largest and k smallest values.

    k is `trim` times the number of pushes, rounded up, but at least one value remains: definition 2 with
    an integer k, so that with four workers one is left out too. For fewer than three pushes it is the
    mean. Weights are ignored: workers report them, and one could outweigh all others.
    """

    def aggregate(chunks: Iterable[Tensor], parts: Sequence[WholePush]) -> Tensor:
        return middle_mean(list(map(torch.clone, chunks)), trimmed(len(parts), trim))

    return aggregate


def coordinate_median(chunks: Iterable[Tensor], parts: Sequence[WholePush]) -> Tensor:
    """The median of each element; for an even count the mean of the middle two (definition 1).

    Weights are ignored, as in `trimmed_mean`.
    """
    return middle_mean(list(map(torch.clone, chunks)), (len(parts) - 1) // 2)


Stretches = Sequence[tuple[slice, Sequence[float]]]
"""Slices of a chunk, each with a factor for each push."""


def mean_by_stretch(
    chunks: Iterable[Tensor], parts: Sequence[WholePush], stretches: Stretches
) -> Tensor:
    """sum(w_i f_i x_i) / sum(w_i) with factors f_i; where they are 1 it has the bits of `mean`."""
    total: Tensor | None = None
    for number, (chunk, part) in enumerate(zip(chunks, parts, strict=True)):
        total = torch.zeros_like(chunk) if total is None else total
        for where, factors in stretches:
            weight = part.weight * part.scale * factors[number]
            # torch raises for a number beyond fp32; infinity makes the gradient unusable instead.
            alpha = weight if weight < LARGEST else math.inf
            total[where].add_(chunk[where], alpha=alpha)
    assert total is not None, "a group without parts has no mean"
    return total.div_(sum(part.weight for part in parts))


AGGREGATES: dict[str, Callable[[float], Aggregate]] = {
    "mean": lambda trim: mean,
    "clip-median-norm": lambda trim: clip_median_norm,
    "trimmed-mean": trimmed_mean,
    "coordinate-median": lambda trim: coordinate_median,
    "rda": lambda trim: mean,  # of the stretches that `Radial` finds
}
"""By name: functions of `--trim` that return the aggregate."""
# Aggregates that sort each element; they apply to the model's buffers too.
BY_COORDINATE = frozenset({"trimmed-mean", "coordinate-median"})


def _weighted_mean(
    chunks: Iterable[Tensor], parts: Sequence[WholePush], factors: Sequence[float]
) -> Tensor:
    total: Tensor | None = None
    for chunk, part, factor in zip(chunks, parts, factors, strict=True):
        weight = part.weight * part.scale * factor
        if total is None:
            total = torch.mul(chunk, weight)
        else:
            total.add_(chunk, alpha=weight)
    assert total is not None, "a group without parts has no mean"
    return total.div_(sum(part.weight for part in parts))


def trimmed(submissions: int, trim: float) -> int:
    """The number of values that are left out at each end, for this number of pushes."""
    wanted = math.ceil(trim * submissions - 1e-9)  # 0.07 x 100 is slightly above 7 in binary
    return min(wanted, (submissions - 1) // 2)


def middle_mean(rows: Sequence[Tensor], left_out: int) -> Tensor:
    """The mean of each element over the rows, without its largest and smallest `left_out` values.

    Args:
        rows: 1-D, of one float dtype, finite; their memory is overwritten, and has the result.
    """
    kept = len(rows) - 2 * left_out
    assert kept > 0, f"{len(rows)} rows, {left_out} left out at each end"
    for parts in zip(*(torch.split(row, SORTED_ELEMENTS) for row in rows), strict=True):
        middle = _in_order(parts)[left_out : left_out + kept]
        # Extremes are never added: subtracting an enormous value again would leave no precision. Each
        # value is divided first, because their sum could overflow.
        total = middle[0] / kept
        for row in middle[1:]:
            total.add_(row, alpha=1 / kept)
        # Clamp rounding errors: a buffer must stay within the range of its inputs.
        torch.clamp(total, middle[0], middle[-1], out=parts[0])
    return rows[0]


def largest_of_the_middle(rows: Sequence[Tensor]) -> Tensor:
    """The upper median of each element. It is one of the inputs, so it suits counters.

    Args:
        rows: 1-D, of one dtype; their memory is overwritten, and has the result.
    """
    for parts in zip(*(torch.split(row, SORTED_ELEMENTS) for row in rows), strict=True):
        parts[0].copy_(_in_order(parts)[len(rows) // 2])
    return rows[0]


def _in_order(rows: Sequence[Tensor]) -> list[Tensor]:
    """Sort every column in ascending order. Overwrites the rows' memory.

    Entire rows are compared at a time, with many elements per instruction: 20 times as fast as sorting
    along columns.
    """
    ordered, spare = list(rows), torch.empty_like(rows[0])
    for low, high in comparators(len(rows)):
        below, above = ordered[low], ordered[high]
        torch.minimum(below, above, out=spare)
        torch.maximum(below, above, out=above)
        ordered[low], spare = spare, below
    return ordered


@cache
def comparators(count: int) -> tuple[tuple[int, int], ...]:
    """A sorting network: pairs of positions to compare and exchange in order, for `count` values.

    Batcher's merge exchange: Knuth, The Art of Computer Programming, volume 3, 5.2.2, algorithm M. It
    has about n (log n)^2 / 4 pairs: 9 for 5, 63 for 16, 543 for 64.
    """
    return tuple(_merge_exchange(count))


def _merge_exchange(count: int) -> Iterator[tuple[int, int]]:
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = top if count > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            yield from ((i, i + d) for i in range(count - d) if i & p == r)
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
