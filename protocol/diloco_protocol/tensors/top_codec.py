"""The experimental codec `top64`: the 64 largest of 4096 elements, 2 bits each (protocol/CODECS.md).

Other elements decode to 0, and are sent with a later delta (error feedback), after SparseLoCo (Sarfi et
al. 2025, arXiv 2508.15706).

A block has, in this order:

- 48 bytes: the low 6 bits of each index, in ascending order of indices, lowest bit first;
- 16 bytes: the high 6 bits h of the indices in Elias-Fano coding: of 128 bits those at h[i] + i are set;
- 8 bytes of signs: bit i is set if element i is negative;
- 8 bytes: bit i is set if element i has the larger of two magnitudes;
- the two magnitudes in bf16, the smaller first.

The magnitudes are the mean of those below the mean of all 64, and the mean of the others. The first bit
of a byte is the lowest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco_protocol.dtypes import TOP_BLOCK, TOP_BYTES, TOP_KEPT
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.tensors.block_codecs import Encoded, NewBytes, new_bytes

LOW_BITS = 6
LOW, HIGH, SIGNS, LARGER, SCALES = (
    slice(0, 48),
    slice(48, 64),
    slice(64, 72),
    slice(72, 80),
    slice(80, 84),
)
HIGH_BITS = 8 * (HIGH.stop - HIGH.start)


def encode_top64(values: Tensor, new: NewBytes = new_bytes) -> Encoded:
    """Encode fp32 values, 1-D and finite."""
    elements = values.numel()
    missing = -elements % TOP_BLOCK
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    blocks = values.view(-1, TOP_BLOCK)
    indices = blocks.abs().topk(TOP_KEPT, dim=1, sorted=False).indices.sort(dim=1).values
    kept = blocks.gather(1, indices)
    magnitudes = kept.abs()
    is_larger = magnitudes >= magnitudes.mean(1, keepdim=True)
    scales = torch.stack([_mean(magnitudes, ~is_larger), _mean(magnitudes, is_larger)], dim=1)
    payload = new(blocks.shape[0] * TOP_BYTES)
    rows = payload.numpy().reshape(-1, TOP_BYTES)
    at = indices.to(torch.int16).cpu().numpy()
    rows[:, LOW] = _packed((at[:, :, None] >> np.arange(LOW_BITS) & 1).reshape(len(at), -1))
    high = np.zeros((len(at), HIGH_BITS), dtype=np.uint8)
    np.put_along_axis(high, (at >> LOW_BITS) + np.arange(TOP_KEPT), 1, axis=1)
    rows[:, HIGH] = _packed(high)
    rows[:, SIGNS] = _packed(kept.signbit().cpu().numpy())
    rows[:, LARGER] = _packed(is_larger.cpu().numpy())
    rows[:, SCALES] = scales.cpu().view(torch.uint8).numpy()
    made = payload.numpy().data
    return Encoded(made, elements, decode_top64, made)


def decode_top64(payload: Any, elements: int, out: Tensor | None = None) -> Tensor:
    """Decode a payload to fp32 values, in `out` if given.

    Raises:
        ProtocolError: a block does not have 64 indices in ascending order.
    """
    rows = np.frombuffer(payload, dtype=np.uint8).reshape(-1, TOP_BYTES)
    high = _bits(rows[:, HIGH])
    if not (high.sum(1) == TOP_KEPT).all():
        raise _bad()
    # The positions of the set bits of each row, in order.
    places = np.nonzero(high)[1].reshape(-1, TOP_KEPT) - np.arange(TOP_KEPT)
    low = _bits(rows[:, LOW]).reshape(-1, TOP_KEPT, LOW_BITS) @ (1 << np.arange(LOW_BITS))
    at = (places << LOW_BITS) + low
    if at.max(initial=0) >= TOP_BLOCK or (np.diff(at, axis=1) <= 0).any():
        raise _bad()
    scales = torch.from_numpy(rows[:, SCALES].copy()).view(torch.bfloat16).to(torch.float32)
    is_larger = torch.from_numpy(_bits(rows[:, LARGER])).bool()
    signs = 1.0 - 2.0 * torch.from_numpy(_bits(rows[:, SIGNS])).float()
    kept = torch.where(is_larger, scales[:, 1:], scales[:, :1]).mul_(signs).add_(0.0)  # no -0.0
    device = kept.device if out is None else out.device
    found = torch.zeros(len(rows), TOP_BLOCK, device=device)
    values = found.scatter_(1, torch.from_numpy(at).to(device), kept.to(device)).view(-1)[:elements]
    return values if out is None else out.copy_(values)


def _mean(magnitudes: Tensor, which: Tensor) -> Tensor:
    """The mean of the selected elements of each row, in bf16; 0 if none is selected."""
    count = which.sum(1).clamp_(min=1)
    # Divide first, because the sum of the values could overflow.
    return ((magnitudes / count[:, None]) * which).sum(1).to(torch.bfloat16)


def _packed(bits: Any) -> Any:
    return np.packbits(np.asarray(bits, dtype=np.uint8), axis=1, bitorder="little")


def _bits(packed: Any) -> Any:
    return np.unpackbits(packed, axis=1, bitorder="little").astype(np.int64)


def _bad() -> ProtocolError:
    text = f"Its indices are not {TOP_KEPT} of {TOP_BLOCK} in ascending order."
    return ProtocolError(Code.BAD_CHUNK, text)
