"""Codecs, which convert the values of a chunk to bytes and back.

Values are accumulated in fp32 for any wire dtype. bf16 on the wire means
`decode(encode(x)) == x.bfloat16().float()`. Bytes are little-endian, as on every machine that torch
supports.
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
from diloco_protocol.tensors import block_codecs
from diloco_protocol.tensors.sparse_codec import SPARSE_CODECS


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    return tensor.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Codec:
    """Encoder and decoder of one wire dtype."""

    dtype: torch.dtype  # dtype of the values before encoding
    # Returns the bytes, on the CPU, of a contiguous 1-D tensor, which may be on any device if the codec
    # is quantized, and must be on the CPU otherwise. The optional second argument allocates memory for
    # bytes that are not those of the tensor.
    encode: Callable[..., memoryview]
    # Returns the values of bytes with this number of elements, 1-D: fp32, int64, or a float dtype that
    # converts to fp32 exactly. The optional third argument is an fp32 tensor for values that are not
    # just the bytes.
    decode: Callable[..., Tensor]


def _plain(dtype: torch.dtype) -> Codec:
    """A codec of the plain elements, without a copy in either direction."""
    return Codec(
        dtype,
        lambda values, *_: as_bytes(values),
        lambda payload, *_: torch.frombuffer(payload, dtype=dtype),
    )


def _coded(encode: Callable[..., block_codecs.Encoded], decode: Callable[..., Tensor]) -> Codec:
    """A quantized codec, whose values are fp32 before encoding."""
    return Codec(torch.float32, lambda *given: encode(*given).payload, decode)


# Quantized codecs by name.
BLOCKS: dict[str, block_codecs.BlockCodec] = {
    "int8": block_codecs.INT8_CODEC,
    "int4": block_codecs.INT4_CODEC,
    "int4z": block_codecs.INT4Z_CODEC,
    **SPARSE_CODECS,
}
# By name; `dtypes.SIZES` has the bytes of each.
CODECS = {
    "fp32": _plain(torch.float32),
    "bf16": _plain(torch.bfloat16),
    "fp16": _plain(torch.float16),
    **{name: _coded(codec.encode, codec.decode) for name, codec in BLOCKS.items()},
    "int64": _plain(torch.int64),
}


def encode_sum(
    wire: str, values: Tensor, other: Tensor, new: block_codecs.NewBytes = block_codecs.new_bytes
) -> block_codecs.Encoded | None:
    """Encode `values + other` (fp32) in a quantized codec; None if the sum is not finite."""
    fast, block = kernels.ready(), BLOCKS[wire]
    if fast is not None and on_host(values, other):
        found = block.encode_sum(fast, values, other, new)
        return None if found is None else found[0]
    total = values + other.to(values.device)
    return block.encode(total, new) if is_finite(total) else None


def follow(
    wire: str,
    values: Tensor,
    held: Tensor,
    out: Tensor,
    new: block_codecs.NewBytes = block_codecs.new_bytes,
) -> tuple[memoryview, int] | None:
    """Encode `values - held` in a quantized codec, and set out <- held + D(values - held).

    All tensors are fp32, on the host. Returns the bytes and the checksum of `out`; None if the
    difference or the result is not finite.
    """
    fast, block = kernels.ready(), BLOCKS[wire]
    if fast is not None:
        found = block.encode_sum(fast, values, held, new, sign=-1.0, followed=out)
        return None if found is None else (found[0].payload, found[1])
    difference = values - held
    encoded = block.encode(difference, new) if is_finite(difference) else None
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
    """out <- (values + other) + sign x, where x is the decoded code; all fp32, on the host.

    Args:
        wire: a quantized codec.
        code: the bytes of a chunk, or an `Encoded`.
        out: may be `values`.

    Returns:
        The checksum of the result; None if it is not finite. Raises as `decode_chunk`.
    """
    fast, block = kernels.ready(), BLOCKS[wire]
    encoded = code if isinstance(code, block_codecs.Encoded) else None
    if fast is not None:
        source = encoded.source if encoded else block.source(code, values.numel())
        assert source is not None
        return fast.shift(source, values, other, sign, out)
    total = values if other is None else values + other
    room = None if out.data_ptr() == total.data_ptr() else out
    x = encoded.read(room) if encoded else block.decode(code, values.numel(), room)
    torch.add(total, x, alpha=sign, out=out)
    return checksum(out) if is_finite(out) else None


def on_host(*tensors: Tensor) -> bool:
    """Whether kernels can access these tensors."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


def segment_dtype(segment: Segment, wire: str = "fp32") -> torch.dtype:
    """The dtype of a segment's values before encoding, if parameters are sent in `wire`.

    The default is the dtype at the broker. Raises UsageError for an unknown wire dtype.
    """
    check_wire_dtype(wire)
    return CODECS[travels_in(segment, wire)].dtype


def encode_chunk(
    span: ChunkSpan, values: Tensor, wire: str, new: block_codecs.NewBytes | None = None
) -> memoryview:
    """Encode a chunk whose parameters are sent in `wire`; `values` are in its `segment_dtype`.

    `new` allocates uninitialised memory for bytes that are not those of the values.

    The result may share the memory of the values, which must not be modified while it is being sent:
    ZeroMQ would send the modified bytes.
    """
    encode = CODECS[travels_in(span.segment, wire)].encode
    return encode(values) if new is None else encode(values, new)


def decode_chunk(span: ChunkSpan, payload: Any, wire: str, out: Tensor | None = None) -> Tensor:
    """Decode a chunk whose parameters are sent in `wire`, to 1-D; see `Codec.decode`.

    The result may share the memory of the payload, which must have the correct length and not be empty.
    Quantized values are written to `out`, if given: fp32, 1-D, contiguous, on any device.

    Raises:
        ProtocolError: the codes of a chunk in int4z cannot be unpacked, or the indices of a sparse one
            are invalid.
    """
    return CODECS[travels_in(span.segment, wire)].decode(payload, span.elements, out)


def checksum(values: Tensor) -> int:
    """The sum of the bit patterns of fp32 values, in pairs as 64-bit integers, modulo 2**64.

    An odd number of values is padded with a zero.
    """
    if values.storage_offset() % 2:  # not aligned to 64 bits, which torch requires
        values = values.clone()
    even = values.numel() // 2 * 2
    total = int(values[:even].view(torch.int64).sum())
    if even < values.numel():
        total += int(values[even:].view(torch.int32)) % (1 << 32)
    return total % (1 << 64)


def has_nan(values: Tensor) -> bool:
    """Whether an element is NaN. One pass, no temporary."""
    if values.numel() == 0 or not values.is_floating_point():
        return False
    return bool(torch.isnan(torch.aminmax(values).min))  # aminmax propagates NaN


def is_finite(values: Tensor) -> bool:
    """Whether all elements are finite; one pass, no temporary of the size of the chunk."""
    if values.numel() == 0 or not values.is_floating_point():
        return True
    # A sum takes half as long as the extremes, and is finite only if every element is. An infinite sum
    # may be due to large elements, and fp16 sums overflow easily.
    if values.dtype is not torch.float16 and math.isfinite(values.sum().item()):
        return True
    # aminmax propagates NaN, so the two extremes reveal every element that is not finite.
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))
