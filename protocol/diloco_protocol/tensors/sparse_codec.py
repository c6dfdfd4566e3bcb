"""Sparse codecs: the largest of each 4096 elements, an index and 2 bits each (docs/codecs.md).

Other elements decode to 0, and are sent with a later delta (error feedback), after SparseLoCo (Sarfi et
al. 2025, arXiv 2508.15706). A block of 4096 has, in this order, of the K elements that it keeps:

- 3K/2 bytes: their indices in ascending order, 12 bits each, two in three bytes, lowest bit first;
- K/8 bytes of signs: bit i is set if element i is negative;
- K/8 bytes: bit i is set if element i has the larger of two magnitudes;
- the two magnitudes in bf16, the smaller first.

The magnitudes are the mean of those below the mean of all K, and the mean of the others. Of equal
magnitudes the first are kept, and sums are made half to half as in `block_codecs`, so the bytes do not
depend on the machine. K is a power of two for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diloco_protocol import kernels
from diloco_protocol.dtypes import SPARSE_BLOCK, SPARSE_KEPT
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.tensors.block_codecs import (
    BlockCodec,
    NewBytes,
    blocks_of,
    capped,
    halved,
    to_host,
)

INDEX_BITS = 12


class SparseCodec(BlockCodec):
    """Keeps `form` elements of each block."""

    def _unpacked(self, payload: Any, elements: int) -> Tensor:
        data, fast = super()._unpacked(payload, elements), kernels.ready()
        if fast is None:
            indices = self._indices(self._rows(data))
            is_fine = bool((indices[:, 1:] > indices[:, :-1]).all())
        else:
            is_fine = fast.ascends(self.form, data, elements)
        if not is_fine:
            text = f"Its indices are not {self.form} of {SPARSE_BLOCK} in ascending order."
            raise ProtocolError(Code.BAD_CHUNK, text)
        return data

    def _by_torch(self, rows: Tensor, new: NewBytes) -> Tensor:
        blocks, count = blocks_of(rows, SPARSE_BLOCK), self.form
        indices = _largest(blocks.abs(), count)
        kept = blocks.gather(1, indices)
        magnitudes = kept.abs()
        is_larger = magnitudes >= halved(magnitudes / count)[:, None]
        scales = torch.stack([_mean(magnitudes, group) for group in (~is_larger, is_larger)], 1)
        bits = (indices[:, :, None] >> torch.arange(INDEX_BITS, device=rows.device)) & 1
        parts = [_packed(bits.flatten(1)), _packed(kept < 0), _packed(is_larger)]
        return to_host(torch.cat([*parts, scales.view(torch.uint8)], 1).view(len(rows), -1), new)

    def _values(self, data: Tensor, room: Tensor) -> None:
        rows, ends = self._rows(data), 3 * self.form // 2
        signs, is_larger = _bits(rows[:, ends:-4]).bool().chunk(2, dim=1)
        scales = rows[:, -4:].contiguous().view(torch.bfloat16).to(torch.float32)
        kept = torch.where(is_larger, scales[:, 1:], scales[:, :1])
        kept = torch.where(signs, -kept, kept).add_(0.0)  # no -0.0
        room.zero_().scatter_(1, self._indices(rows).long(), kept)

    def _rows(self, data: Tensor) -> Tensor:
        return data.view(-1, 7 * self.form // 4 + 4)

    def _indices(self, rows: Tensor) -> Tensor:
        pairs = rows[:, : 3 * self.form // 2].view(len(rows), -1, 3).short()
        first = pairs[..., 0] | (pairs[..., 1] & 15) << 8
        return torch.stack([first, pairs[..., 1] >> 4 | pairs[..., 2] << 4], 2).flatten(1)


SPARSE_CODECS = {
    name: SparseCodec(count, block=SPARSE_BLOCK) for name, count in SPARSE_KEPT.items()
}


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """The indices of the largest of each row, of equal ones the first, in ascending order."""
    least = magnitudes.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)
    is_kept = magnitudes >= least
    if int(is_kept.sum()) > len(is_kept) * count:
        is_above = magnitudes > least
        is_equal = magnitudes == least
        is_first = is_equal.cumsum(1) <= count - is_above.sum(1, keepdim=True)
        is_kept = is_above | (is_equal & is_first)
    return is_kept.nonzero()[:, 1].view(-1, count)


def _mean(magnitudes: Tensor, which: Tensor) -> Tensor:
    """The mean of the selected elements of each row, in bf16; 0 if none is selected."""
    # Divide first, because the sum of the values could overflow.
    parts = magnitudes / which.sum(1, keepdim=True).clamp_(min=1)
    return capped(halved(torch.where(which, parts, 0.0)).to(torch.bfloat16), 1)


def _packed(bits: Tensor) -> Tensor:
    """Eight bits in a byte, row by row, the lowest first."""
    octets = bits.to(torch.uint8).view(len(bits), -1, 8)
    powers = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (octets * powers).sum(2, dtype=torch.uint8)


def _bits(packed: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, :, None] >> places & 1).flatten(1)
