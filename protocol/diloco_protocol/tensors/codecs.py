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

from diloco_protocol import kernels
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
    # The values of such bytes, of this number of elements, 1-D: fp32, int64, or a float dtype that
    # becomes fp32 exactly. Where they are not just the bytes, in a given fp32 tensor, if there is a
    # third argument.
    decode: Callable[..., Tensor]


def _plain(dtype: torch.dtype) -> Codec:
    """The elements as they lie in memory, and nothing else: no copy in either direction."""
    return Codec(
        dtype,
        lambda values, *_: as_bytes(values),
        lambda payload, *_: torch.frombuffer(payload, dtype=dtype),
    )


def _coded(encode: Callable[..., block_codecs.Encoded], decode: Callable[..., Tensor]) -> Codec:
    """Few bits for each element, kept in fp32 until then."""
    return Codec(torch.float32, lambda *given: encode(*given).payload, decode)


# Codecs of few bits that kernels know, by name.
BLOCKS = {
    "int8": block_codecs.INT8_CODEC,
    "int4": block_codecs.INT4_CODEC,
    "int4z": block_codecs.INT4Z_CODEC,
}
# By name; `dtypes.SIZES` has the bytes of each.
CODECS = {
    "fp32": _plain(torch.float32),
    "bf16": _plain(torch.bfloat16),
    "fp16": _plain(torch.float16),
    **{name: _coded(codec.encode, codec.decode) for name, codec in BLOCKS.items()},
    "top64": _coded(top_codec.encode_top64, top_codec.decode_top64),
    "int64": _plain(torch.int64),
}
# Of those of few bits, what also tells what is read of the bytes.
ENCODERS: dict[str, Callable[..., block_codecs.Encoded]] = {
    **{name: codec.encode for name, codec in BLOCKS.items()},
    "top64": top_codec.encode_top64,
}


def encode_sum(
    wire: str, values: Tensor, other: Tensor, new: block_codecs.NewBytes = block_codecs.new_bytes
) -> block_codecs.Encoded | None:
    """`values + other`, fp32, in a codec of few bits; None when the sum is not finite."""
    fast, block = kernels.ready(), BLOCKS.get(wire)
    if fast is not None and block is not None and on_host(values, other):
        found = block.encode_sum(fast, values, other, new)
        return None if found is None else found[0]
    total = values + other.to(values.device)
    return ENCODERS[wire](total, new) if is_finite(total) else None


def follow(
    wire: str,
    values: Tensor,
    held: Tensor,
    out: Tensor,
    new: block_codecs.NewBytes = block_codecs.new_bytes,
) -> tuple[memoryview, int] | None:
    """Encode `values - held` in a codec of few bits: out <- held + D(values - held).

    All fp32, on the host. Returns the bytes and the checksum of `out`; None when the difference or
    the result is not finite.
    """
    fast, block = kernels.ready(), BLOCKS.get(wire)
    if fast is not None and block is not None:
        found = block.encode_sum(fast, values, held, new, sign=-1.0, followed=out)
        return None if found is None else (found[0].payload, found[1])
    difference = values - held
    encoded = ENCODERS[wire](difference, new) if is_finite(difference) else None
    total = None if encoded is None else add_code(wire, encoded, held, out)
    return None if encoded is None or total is None else (encoded.payload, total)


def add_code(
    wire: str,
    code: Any,
    values: Tensor,
    out: Tensor,
    *,
    other: Tensor | None = None,
    sign: float = 1.0,
) -> int | None:
    """out <- (values + other) + sign x, where x is what the code says; all fp32, on the host.

    Args:
        wire: a codec of few bits.
        code: the bytes of a chunk, or what it was `Encoded` to.
        out: may be `values`.

    Returns:
        The checksum of the result; None when it is not finite. Raises as `decode_chunk`.
    """
    fast, block = kernels.ready(), BLOCKS.get(wire)
    encoded = code if isinstance(code, block_codecs.Encoded) else None
    if fast is not None and block is not None:
        source = encoded.source if encoded else block.source(code, values.numel())
        assert source is not None
        return fast.shift(source, values, other, sign, out)
    total = values if other is None else values + other
    room = None if out.data_ptr() == total.data_ptr() else out
    x = encoded.read(room) if encoded else CODECS[wire].decode(code, values.numel(), room)
    torch.add(total, x, alpha=sign, out=out)
    return checksum(out) if is_finite(out) else None


def on_host(*tensors: Tensor) -> bool:
    """Whether kernels can read them."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


def segment_dtype(segment: Segment, wire: str = "fp32") -> torch.dtype:
    """What a segment's values are kept in until they are encoded, where parameters travel in `wire`.

    By default as they are at the broker. Raises UsageError for an unknown wire dtype.
    """
    check_wire_dtype(wire)
    return CODECS[travels_in(segment, wire)].dtype


def encode_chunk(
    span: ChunkSpan, values: Tensor, wire: str, new: block_codecs.NewBytes | None = None
) -> memoryview:
    """The bytes of a chunk whose parameters travel in `wire`; `values` are in its `segment_dtype`.

    `new` returns uninitialised memory of the given size in bytes, for those that are not the values'
    own.

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
