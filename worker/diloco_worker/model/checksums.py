"""Checksums of a model's values: whether a saved state belongs to it, and the tag of its frozen part.

A model's distance from the worker's base is pushed as trained, so a stale model file would undo what
others have learnt. A script may save its model in a narrower dtype; only that rounding is accepted.
Frozen tensors are never pushed and not compared; their tag saves a worker from fetching its own values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from diloco_protocol.chunks import ChunkSpan, FragmentLayout
from diloco_protocol.tensors.codecs import as_bytes, segment_dtype
from diloco_protocol.version import digest_of, tag_of
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.spread.shares import tensor_name

# Narrower dtypes that a script may save a model in.
_NARROWER: Mapping[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
    torch.float32: (torch.bfloat16, torch.float16),
}

# Elements read at a time: so few that torch uses this thread alone. Its other threads are busy where
# data is loaded, and waiting for them at each piece takes many times longer than the work.
PIECE_ELEMENTS = 1 << 15


def checksums(tensors: ModelTensors) -> dict[str, tuple[int, ...]]:
    """By name, CRC-32 of each trained or averaged piece: as it is, then rounded to each
    narrower dtype. A few seconds for a billion fp32 parameters."""
    sums: dict[str, tuple[int, ...]] = {}

    def take(name: str, tensor: Tensor) -> None:
        sums[name] = crc32_of(tensor, tensor.dtype, *_NARROWER.get(tensor.dtype, ()))

    tensors.look_at(take)
    return sums


def differing(tensors: ModelTensors, saved: Mapping[str, Sequence[int]]) -> list[str]:
    """Names of the tensors whose values are neither those of the checksums nor a rounding of them.

    Pieces without a checksum are not compared: another process may have it.
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
    """Whether the values are exact in this dtype."""
    if dtype is tensor.dtype:
        return True
    return all(torch.equal(piece.to(dtype).to(piece.dtype), piece) for piece in _pieces(tensor))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.reshape(-1).cpu().contiguous()
    return (flat[at : at + PIECE_ELEMENTS] for at in range(0, flat.numel(), PIECE_ELEMENTS))


def frozen_tag(tensors: ModelTensors, layout: FragmentLayout) -> int:
    """The tag of a version with the model's own frozen values: see `diloco_protocol.version`.

    Half a second for 100 million parameters on one core; only tensors that are not contiguous are
    copied. Raises UsageError where the model lacks tensors of the layout.
    """
    asked = {place.entry.name for place in layout.places}
    live = {entry.name: each.reshape(-1) for entry, each in tensors.live() if entry.name in asked}
    with ThreadPoolExecutor() as pool:
        return tag_of(pool.map(partial(_digest, live, layout), layout.spans))


def _digest(live: dict[str, Tensor], layout: FragmentLayout, span: ChunkSpan) -> bytes:
    """The digest of a chunk's values in wire dtype."""

    def pieces() -> Iterator[memoryview]:
        for place in layout.places:
            start, stop = max(place.start, span.start), min(place.stop, span.stop)
            if place.segment is span.segment and start < stop:
                flat = live[place.entry.name][start - place.start : stop - place.start]
                yield as_bytes(flat.to("cpu", segment_dtype(span.segment)).contiguous())

    return digest_of(pieces())
