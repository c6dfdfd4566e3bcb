"""Codecs: how the values of a chunk become bytes, and are read again.

Values are accumulated in fp32 whatever travels. bf16 on the wire means
`decode(encode(x)) == x.bfloat16().float()`. Bytes are little-endian, as torch keeps them on every
machine that it supports.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.dtypes import check_wire_dtype, travels_in
from diloco_protocol.tensors import block_codecs, top_codec


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    return tensor.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Codec:
    """How the values of a chunk travel."""

    dtype: torch.dtype  # what they are rounded to, and kept in, until they are encoded
    # The bytes, on the CPU, of a contiguous 1-D tensor: one of fp32 that travels in few bits may be on
    # any device, others are on the CPU. With a second argument, in memory that it returns for their
    # number, where they are not those of the tensor.
    encode: Callable[..., memoryview]
    # The values of such bytes, of so many elements, 1-D: fp32, int64, or a float dtype that becomes fp32
    # exactly. Where they are not just the bytes, in a given fp32 tensor, if there is a third argument.
    decode: Callable[..., Tensor]


def _plain(dtype: torch.dtype) -> Codec:
    """The elements as they lie in memory, and nothing else: no copy in either direction."""
    return Codec(
        dtype,
        lambda values, *_: as_bytes(values),
        lambda payload, *_: torch.frombuffer(payload, dtype=dtype),
    )


Encoder = Callable[..., block_codecs.Encoded]


def _coded(encoder: Encoder, decode: Callable[..., Tensor]) -> Codec:
    """Few bits for each element, kept in fp32 until then."""
    return Codec(torch.float32, lambda *given: encoder(*given).payload, decode)


# By name; `dtypes.SIZES` has the bytes of each.
CODECS = {
    "fp32": _plain(torch.float32),
    "bf16": _plain(torch.bfloat16),
    "fp16": _plain(torch.float16),
    "int8": _coded(block_codecs.encode_int8, block_codecs.decode_int8),
    "int4": _coded(block_codecs.encode_int4, block_codecs.decode_int4),
    "int4z": _coded(block_codecs.encode_int4z, block_codecs.decode_int4z),
    "top64": _coded(top_codec.encode_top64, top_codec.decode_top64),
    "int64": _plain(torch.int64),
}
# Of those of few bits, what also tells what is read of the bytes.
ENCODERS: dict[str, Encoder] = {
    "int8": block_codecs.encode_int8,
    "int4": block_codecs.encode_int4,
    "int4z": block_codecs.encode_int4z,
    "top64": top_codec.encode_top64,
}


def segment_dtype(segment: Segment, wire: str = "fp32") -> torch.dtype:
    """What a segment's values are kept in until they are encoded, where parameters travel in `wire`.

    By default as they are at the broker. Raises UsageError where there is no such wire dtype.
    """
    check_wire_dtype(wire)
    return CODECS[travels_in(segment, wire)].dtype


def encode_chunk(
    span: ChunkSpan, values: Tensor, wire: str, new: block_codecs.NewBytes | None = None
) -> memoryview:
    """The bytes of a chunk whose parameters travel in `wire`; `values` are in its `segment_dtype`.

    `new` returns uninitialised memory of so many bytes, for those that are not the values' own.

    They may share the memory of the values, which must not change while the bytes are being sent:
    ZeroMQ would put the changed ones on the wire.
    """
    encode = CODECS[travels_in(span.segment, wire)].encode
    return encode(values) if new is None else encode(values, new)


def decode_chunk(span: ChunkSpan, payload: Any, wire: str, out: Tensor | None = None) -> Tensor:
    """The values of a chunk whose parameters travel in `wire`, 1-D: see `Codec.decode`.

    They may share the memory of the payload, which must have the right length, and not be empty.
    Those in few bits are in `out`, if it is given: fp32, 1-D, contiguous, on any device.

    Raises:
        ProtocolError: the codes of a chunk in int4z cannot be unpacked, or the indices of one in top64
            are none.
    """
    return CODECS[travels_in(span.segment, wire)].decode(payload, span.elements, out)


def checksum(values: Tensor) -> int:
    """Sum of the bit patterns of fp32 values, two at a time as a number of 64 bits; modulo 2**64.

    Behind the last of an odd number there is a zero.
    """
    if values.storage_offset() % 2:  # torch would not see numbers of 64 bits there
        values = values.clone()
    even = values.numel() // 2 * 2
    total = int(values[:even].view(torch.int64).sum())
    if even < values.numel():
        total += int(values[even:].view(torch.int32)) % (1 << 32)
    return total % (1 << 64)


def has_nan(values: Tensor) -> bool:
    """True when an element is NaN; infinities do not count. One pass, no temporary."""
    if values.numel() == 0 or not values.is_floating_point():
        return False
    return bool(torch.isnan(torch.aminmax(values).min))  # aminmax hands NaN on


def is_finite(values: Tensor) -> bool:
    """True when no element is NaN or infinite; one pass, no temporary the size of the chunk."""
    if values.numel() == 0 or not values.is_floating_point():
        return True
    # A sum takes half as long as the extremes, and is finite only if every element is. One that is not
    # may be of large elements, and fp16 sums overflow at once.
    if values.dtype is not torch.float16 and math.isfinite(values.sum().item()):
        return True
    # aminmax hands NaN on, so the two extremes tell of every bad element.
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))
