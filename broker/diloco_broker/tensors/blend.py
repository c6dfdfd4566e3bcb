"""The weighted mean of float buffers, which must stay within the range of its inputs.

A negative variance in a BatchNorm makes every evaluation NaN. So float buffers are sent as values, not
as differences from a base that may be old, and are combined convexly. The mean is computed in fp64, with
an error far below the precision of fp32, and rounded once, so it never leaves that range.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of a slice: a few fp64 slices of this size fit into the cache of a core.
PIECE_ELEMENTS = 1 << 15


class Blend:
    """sum(w_i x_i) / sum(w_i) of one chunk, as a running mean.

    m <- m W / (W + w) + x w / (W + w): both factors are at most 1 for any weights, so no product
    overflows or underflows as w x could.
    """

    def __init__(self) -> None:
        self._mean: Tensor | None = None
        self._weight = 0.0
        self._whole_weight = 0.0

    def add(self, values: Tensor, weight: float, scale: float = 1.0) -> None:
        """Add a contribution.

        Args:
            values: floats, 1-D; only read.
            weight: not negative; 0 adds nothing.
            scale: from 0 to 1, the part of the weight that counts for these values. The rest counts for
                the previous value of the buffer; see `onto`.
        """
        self._whole_weight += weight
        weight *= scale
        if not weight:
            return
        before, self._weight = self._weight, self._weight + weight
        if self._mean is None:
            self._mean = values.to(torch.float64, copy=True)
            return
        kept, new = before / self._weight, weight / self._weight
        places = torch.split(self._mean, PIECE_ELEMENTS)
        for place, part in zip(places, torch.split(values, PIECE_ELEMENTS), strict=True):
            place.mul_(kept).add_(part.double(), alpha=new)

    def whole(self) -> Tensor:
        """The mean, in fp32."""
        assert self._mean is not None, "a mean without contributions"
        return self._mean.float()

    def onto(self, old: Tensor, share: float) -> Tensor:
        """(1 - f) old + f mean in fp32, where f is `share` times the part of the weights that counts.

        Args:
            old: the previous value, fp32; not changed.
            share: from 0 to 1, the weight of all contributions together.
        """
        if self._mean is None:
            return old  # no contribution counts
        part = min(1.0, share * (self._weight / self._whole_weight))
        blend = Blend()
        blend.add(old, 1 - part)
        blend.add(self._mean, part)
        return blend.whole()
