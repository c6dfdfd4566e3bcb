"""Is this model the one that a worker's state was taken with? Compared bit for bit, by checksums.

The distance of a model from the worker's base is pushed as if it had been trained, so a stale model file
would take back what others have learnt. A script may save its model in a narrower dtype; only that
rounding is let pass. Frozen tensors are never pushed and not compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diloco_protocol import Kind
from diloco_protocol.codecs import as_bytes
from diloco_worker.snapshot import PIECE_ELEMENTS, ModelTensors

# Narrower dtypes that a script may save a model in.
_NARROWER: Mapping[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
    torch.float32: (torch.bfloat16, torch.float16),
}


def checksums(tensors: ModelTensors) -> dict[str, tuple[int, ...]]:
    """By name, CRC-32 of each tensor that is trained or averaged: as it is, then rounded to each
    narrower dtype."""
    return {
        entry.name: _of(tensor, (None, *_NARROWER.get(tensor.dtype, ())))
        for entry, tensor in tensors.live()
        if entry.kind is not Kind.FROZEN
    }


def differing(tensors: ModelTensors, saved: Mapping[str, Sequence[int]]) -> list[str]:
    """Names of the tensors whose values are not those of the checksums, nor a rounding of them."""
    return [
        entry.name
        for entry, tensor in tensors.live()
        if entry.kind is not Kind.FROZEN and _of(tensor, (None,))[0] not in saved[entry.name]
    ]


def _of(tensor: Tensor, dtypes: Sequence[torch.dtype | None]) -> tuple[int, ...]:
    """One checksum for each dtype that the values are rounded to; None: as they are."""
    flat = tensor.reshape(-1).cpu().contiguous()
    sums = [0] * len(dtypes)
    for start in range(0, flat.numel(), PIECE_ELEMENTS):
        piece = flat[start : start + PIECE_ELEMENTS]
        for number, dtype in enumerate(dtypes):
            rounded = piece if dtype is None else piece.to(dtype).to(piece.dtype)
            sums[number] = zlib.crc32(as_bytes(rounded), sums[number])
    return tuple(sums)
