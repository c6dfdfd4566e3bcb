"""Aggregates: how one chunk of several whole submissions becomes one gradient.

Each is a function of the same form, a row of `AGGREGATES`. The mean trusts every worker;
`clip_median_norm` bounds how long a submission is; the two others look at each number by itself, leave
out its extremes, and so need no bound: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates" (arXiv 1803.01498), definitions 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from statistics import median

import torch
from torch import Tensor

from diloco_broker.core.effects import WholePush

# Elements of each submission that are put in order at a time: those of sixteen stay in the cache.
SORTED_ELEMENTS = 1 << 14

Aggregate = Callable[[Iterable[Tensor], Sequence[WholePush]], Tensor]
"""Makes a gradient of the same chunk of several submissions.

The chunks come one at a time, in the order of the parts; each may be read until the next one is asked
for, and must not be changed. The result is a new tensor of their dtype, which is fp32 for parameters.
"""


def mean(chunks: Iterable[Tensor], parts: Sequence[WholePush]) -> Tensor:
    """sum(w_i s_i x_i) / sum(w_i), with weight w_i, scale s_i and chunk x_i of part i.

    The same operations in the same order as `StreamingMean`: where scales are 1, the same bits.
    """
    return _weighted_mean(chunks, parts, [1.0] * len(parts))


def clip_median_norm(chunks: Iterable[Tensor], parts: Sequence[WholePush]) -> Tensor:
    """The mean of x_i min(1, median/|x_i|): none counts longer than the median submission.

    |x_i| is the length of the whole submission, so its direction stays as it was.
    """
    middle = median(part.norm for part in parts)
    return _weighted_mean(
        chunks, parts, [min(1.0, middle / part.norm) if part.norm else 1.0 for part in parts]
    )


def trimmed_mean(trim: float) -> Aggregate:
    """The mean of what is left of each number without its k largest and k smallest values.

    k is `trim` times the submissions, rounded up, as far as one is left: definition 2 with a whole
    number of workers, so that one of four is left out as well. Of fewer than three it is the mean.
    Weights are not used: who may say what its work weighs could outweigh all others.
    """

    def aggregate(chunks: Iterable[Tensor], parts: Sequence[WholePush]) -> Tensor:
        return middle_mean(list(map(torch.clone, chunks)), trimmed(len(parts), trim))

    return aggregate


def coordinate_median(chunks: Iterable[Tensor], parts: Sequence[WholePush]) -> Tensor:
    """The median of each number, of an even count the mean of the two in the middle: definition 1.

    Weights are not used, as in `trimmed_mean`.
    """
    return middle_mean(list(map(torch.clone, chunks)), (len(parts) - 1) // 2)


AGGREGATES: dict[str, Callable[[float], Aggregate]] = {
    "mean": lambda trim: mean,
    "clip-median-norm": lambda trim: clip_median_norm,
    "trimmed-mean": trimmed_mean,
    "coordinate-median": lambda trim: coordinate_median,
}
"""By name, what makes each of `--trim`."""
# Those that put each number in order: they do so with the model's buffers too.
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
    """How many of these submissions are left out at each end."""
    wanted = math.ceil(trim * submissions - 1e-9)  # 0.07 x 100 is a little above 7 in binary
    return min(wanted, (submissions - 1) // 2)


def middle_mean(rows: Sequence[Tensor], left_out: int) -> Tensor:
    """The mean of each element over the rows, without its largest and smallest `left_out` values.

    Args:
        rows: 1-D, of one float dtype, finite; their memory is used up, and the result is in it.
    """
    kept = len(rows) - 2 * left_out
    assert kept > 0, f"nothing is left of {len(rows)} rows"
    for parts in zip(*(torch.split(row, SORTED_ELEMENTS) for row in rows), strict=True):
        middle = _in_order(parts)[left_out : left_out + kept]
        # What is left out is never added: of an enormous value nothing would be left to subtract it
        # from. And parts of values do not overflow where their sum would.
        total = middle[0] / kept
        for row in middle[1:]:
            total.add_(row, alpha=1 / kept)
        # A rounding outside of what went in would be outside of what a buffer may be.
        torch.clamp(total, middle[0], middle[-1], out=parts[0])
    return rows[0]


def largest_of_the_middle(rows: Sequence[Tensor]) -> Tensor:
    """The upper median of each element: one of the values, so that it suits counters.

    Args:
        rows: 1-D, of one dtype; their memory is used up, and the result is in it.
    """
    for parts in zip(*(torch.split(row, SORTED_ELEMENTS) for row in rows), strict=True):
        parts[0].copy_(_in_order(parts)[len(rows) // 2])
    return rows[0]


def _in_order(rows: Sequence[Tensor]) -> list[Tensor]:
    """Every column ascending. The rows' memory is used up.

    Whole rows are compared at a time, many elements in one instruction: twenty times as fast as a sort
    along a column.
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
    """Pairs of places that, put in order one after the other, sort this number of values.

    Batcher's merge exchange: Knuth, The Art of Computer Programming, volume 3, 5.2.2, algorithm M. About
    n (log n)^2 / 4 of them: 9 for 5, 63 for 16, 543 for 64.
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
