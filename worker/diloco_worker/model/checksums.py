"""Is this model the one that a worker's state was taken with? Compared bit for bit, by checksums.

The distance of a model from the worker's base is pushed as if it had been trained, so a stale model file
would take back what others have learnt. A script may save its model in a narrower dtype; only that
rounding is let pass. Frozen tensors are never pushed and not compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from diloco_protocol.tensors.codecs import as_bytes
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.spread.shares import tensor_name

# Narrower dtypes that a script may save a model in.
_NARROWER: Mapping[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
    torch.float32: (torch.bfloat16, torch.float16),
}

# Elements looked at in one go: so few that torch keeps to this thread. Its others are busy where data is
# loaded, and to wait for them at each piece takes many times longer than the work.
PIECE_ELEMENTS = 1 << 15


def checksums(tensors: ModelTensors) -> dict[str, tuple[int, ...]]:
    """By name, CRC-32 of each piece of what is trained or averaged: as it is, then rounded to each
    narrower dtype. A few seconds for a billion fp32 parameters."""
    sums: dict[str, tuple[int, ...]] = {}

    def take(name: str, tensor: Tensor) -> None:
        sums[name] = crc32_of(tensor, tensor.dtype, *_NARROWER.get(tensor.dtype, ()))

    tensors.look_at(take)
    return sums


def differing(tensors: ModelTensors, saved: Mapping[str, Sequence[int]]) -> list[str]:
    """Names of the tensors whose values are not those of the checksums, nor a rounding of them.

    What has no checksum is not compared: that of a piece may be with another process.
    """
    names: dict[str, None] = {}

    def take(name: str, tensor: Tensor) -> None:
        if name in saved and not _is_of(tensor, saved[name]):
            names[tensor_name(name)] = None

    tensors.look_at(take)
    return list(names)


def _is_of(tensor: Tensor, saved: Sequence[int]) -> bool:
    dtypes = (tensor.dtype, *_NARROWER.get(tensor.dtype, ()))
    return any(
        crc32_of(tensor, dtype) == (then,) and _fits(tensor, dtype)
        for dtype, then in zip(dtypes, saved, strict=False)
    )


def crc32_of(tensor: Tensor, *dtypes: torch.dtype) -> tuple[int, ...]:
    """One checksum for each dtype that the values are rounded to."""
    sums = [0] * len(dtypes)
    for piece in _pieces(tensor):
        for number, dtype in enumerate(dtypes):
            sums[number] = zlib.crc32(as_bytes(piece.to(dtype)), sums[number])
    return tuple(sums)


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the values stay what they are in this dtype."""
    if dtype is tensor.dtype:
        return True
    return all(torch.equal(piece.to(dtype).to(piece.dtype), piece) for piece in _pieces(tensor))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.reshape(-1).cpu().contiguous()
    return (flat[at : at + PIECE_ELEMENTS] for at in range(0, flat.numel(), PIECE_ELEMENTS))
