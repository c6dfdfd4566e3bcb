"""Codecs of few bits: blocks of 256 elements, each with a scale in bf16 (protocol/CODECS.md).

A chunk is the scales of its blocks, then their codes; the last block is filled up with zeros. A value is
its code times its block's scale. bf16 has 8 significant bits and a code 7 at most, so the product is
exact in fp32: whoever decodes comes to the same bits. Codes are rounded to the nearest; to round at
random would need the state of a generator in every checkpoint, and errs more.

- int8: scale = largest magnitude / 127, rounded up to bf16.
- int4: scale = largest magnitude / 7, rounded up to bf16.
- int4z: scale = root of the mean square, so few values are clipped and most are zero; what the codes say
  is then packed by zstd (RFC 8878).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import zstandard
from torch import Tensor

from diloco_protocol.dtypes import BLOCK, SCALE_BYTES, packed_least, packed_most
from diloco_protocol.errors import Code, ProtocolError

# Codes are -LARGEST to LARGEST.
LARGEST_OF_8_BITS, LARGEST_OF_4_BITS = 127, 7
ZSTD_LEVEL = 1
# Lengths of a block whose squares fp32 has room for.
SMALL, LARGE = 1e-14, 1e18
HALF = BLOCK // 2


@dataclass(frozen=True)
class Encoded:
    """What became of fp32 values, 1-D and finite."""

    payload: memoryview
    codes: Tensor  # fp32, a row for each block
    scales: Tensor  # bf16, of each block
    elements: int

    def read(self) -> Tensor:
        """What whoever decodes the payload reads, bit for bit, without doing so."""
        values = self.codes.mul_(self.scales.to(torch.float32)[:, None])
        return values.view(-1)[: self.elements]


def encode_int8(values: Tensor) -> Encoded:
    """In 8 bits."""
    blocks = _blocks_of(values)
    payload, scales, room = _room(blocks.shape[0], BLOCK)
    scales.copy_(_rounded_up(_largest(blocks), LARGEST_OF_8_BITS))
    codes = _codes(blocks, scales, LARGEST_OF_8_BITS)
    room.view(torch.int8).copy_(codes)
    return Encoded(payload.numpy().data, codes, scales, values.numel())


def decode_int8(payload: Any, elements: int) -> Tensor:
    """The fp32 values of such bytes."""
    scales, codes = _split(payload, elements, BLOCK)
    values = codes.view(torch.int8).view(-1, BLOCK).to(torch.float32)
    return values.mul_(scales.to(torch.float32)[:, None]).view(-1)[:elements]


def encode_int4(values: Tensor) -> Encoded:
    """In 4 bits."""
    blocks = _blocks_of(values)
    payload, scales, room = _room(blocks.shape[0], HALF)
    scales.copy_(_rounded_up(_largest(blocks), LARGEST_OF_4_BITS))
    codes = _codes(blocks, scales, LARGEST_OF_4_BITS)
    room.copy_(_nibbles(codes))
    return Encoded(payload.numpy().data, codes, scales, values.numel())


def decode_int4(payload: Any, elements: int) -> Tensor:
    """The fp32 values of such bytes."""
    scales, codes = _split(payload, elements, HALF)
    return _of_nibbles(codes, scales, elements)


def encode_int4z(values: Tensor) -> Encoded:
    """In 4 bits, packed; how many bytes depends on the values."""
    blocks = _blocks_of(values)
    scales = _capped(_root_mean_square(blocks).to(torch.bfloat16), LARGEST_OF_4_BITS)
    codes = _codes(blocks, scales, LARGEST_OF_4_BITS)
    nibbles = _nibbles(codes)
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(nibbles.numpy().data)
    # No `bytes`, which torch does not like to read.
    payload = bytearray(scales.view(torch.uint8).numpy().data)
    payload += packed
    return Encoded(memoryview(payload), codes, scales, values.numel())


def decode_int4z(payload: Any, elements: int) -> Tensor:
    """The fp32 values of such bytes.

    Raises:
        ProtocolError: they cannot be unpacked, or not to as many codes as there must be.
    """
    count = -(-elements // BLOCK)
    bytes_of_scales, wanted = count * SCALE_BYTES, count * HALF
    given = memoryview(payload)
    if not packed_least(elements) <= given.nbytes <= packed_most(elements):
        raise ProtocolError(Code.BAD_CHUNK, f"{given.nbytes} bytes cannot be {elements} elements.")
    packed = given[bytes_of_scales:]
    try:
        # What the frame says of its size is asked first: it would be believed, and the memory taken.
        size = zstandard.frame_content_size(packed)
        codes = zstandard.ZstdDecompressor().decompress(packed) if size == wanted else b""
    except zstandard.ZstdError as error:
        raise ProtocolError(Code.BAD_CHUNK, f"Its codes cannot be unpacked: {error}.") from error
    if len(codes) != wanted:
        text = f"Its codes unpack to {size} bytes, they must be {wanted}."
        raise ProtocolError(Code.BAD_CHUNK, text)
    scales = torch.frombuffer(given, dtype=torch.bfloat16, count=count)
    return _of_nibbles(torch.frombuffer(bytearray(codes), dtype=torch.uint8), scales, elements)


def _blocks_of(values: Tensor) -> Tensor:
    """In rows of a block; the last is filled up with zeros."""
    missing = -values.numel() % BLOCK
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, BLOCK)


def _room(blocks: int, code_bytes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for so many blocks; the part of the scales, and that of the codes, a row for each block."""
    payload = torch.empty(blocks * (SCALE_BYTES + code_bytes), dtype=torch.uint8)
    ends = blocks * SCALE_BYTES
    return payload, payload[:ends].view(torch.bfloat16), payload[ends:].view(blocks, code_bytes)


def _largest(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(1)


def _rounded_up(magnitudes: Tensor, largest: int) -> Tensor:
    """The least bf16 of which so many are not below."""
    values = magnitudes / largest
    rounded = values.to(torch.bfloat16)
    # Of positive floats the next one has the next bits.
    above = rounded.view(torch.int16) + (rounded.to(values.dtype) < values)
    return _capped(above.view(torch.bfloat16), largest)


def _capped(scales: Tensor, largest: int) -> Tensor:
    """So that no code makes a value that is not finite in fp32."""
    most = torch.tensor(torch.finfo(torch.float32).max / largest)
    rounded_down = (most.view(torch.int32) >> 16 << 16).view(torch.float32)
    return scales.clamp(max=float(rounded_down))


def _root_mean_square(blocks: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(blocks, dim=1)
    # fp32 has no room for the squares of large values, nor of small ones: these by the largest first.
    low, high = torch.aminmax(lengths)
    if low >= SMALL and high <= LARGE:
        return lengths.mul_(BLOCK**-0.5)
    largest = _largest(blocks)
    by = torch.where(largest > 0, largest, 1.0)
    return (blocks / by[:, None]).square_().mean(1).sqrt_().mul_(largest)


def _codes(blocks: Tensor, scales: Tensor, largest: int) -> Tensor:
    """fp32; a block whose scale is 0 has zeros."""
    by = scales.to(torch.float32)
    by = torch.where(by > 0, by, torch.inf)
    return torch.div(blocks, by[:, None]).round_().clamp_(-largest, largest)


def _nibbles(codes: Tensor) -> Tensor:
    """Two codes in each byte: j of the first half of a block with j of the second."""
    # By int8, to which torch is three times as fast.
    shifted = codes.to(torch.int8).add_(LARGEST_OF_4_BITS + 1).view(torch.uint8)
    return shifted[:, :HALF] | (shifted[:, HALF:] << 4)


def _of_nibbles(codes: Tensor, scales: Tensor, elements: int) -> Tensor:
    rows = codes.view(-1, HALF)
    values = torch.empty(rows.shape[0], BLOCK, dtype=torch.float32)
    values[:, :HALF] = rows & 15
    values[:, HALF:] = rows >> 4
    values.sub_(LARGEST_OF_4_BITS + 1).mul_(scales.to(torch.float32)[:, None])
    return values.view(-1)[:elements]


def _split(payload: Any, elements: int, code_bytes: int) -> tuple[Tensor, Tensor]:
    """Scales and codes."""
    blocks = -(-elements // BLOCK)
    both = torch.frombuffer(payload, dtype=torch.uint8, count=blocks * (SCALE_BYTES + code_bytes))
    return both[: blocks * SCALE_BYTES].view(torch.bfloat16), both[blocks * SCALE_BYTES :]
