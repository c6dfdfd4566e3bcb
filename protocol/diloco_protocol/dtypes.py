"""Wire dtypes by name, and the sizes of chunks in them, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.errors import UsageError

# Elements that share a scale in quantized codecs, and the bytes of a scale.
BLOCK = 256
SCALE_BYTES = 2
# Elements of a block of the sparse codecs, and by name how many of them are kept (a power of two).
SPARSE_BLOCK = 4096
SPARSE_KEPT = {"sparse": 64, **{f"sparse:{kept}": kept for kept in (32, 64, 128, 256, 512)}}


def sparse_bytes(kept: int) -> int:
    """Bytes of a sparse block: 12 bits of index and 2 bits of each kept element, and two magnitudes."""
    return 14 * kept // 8 + 2 * SCALE_BYTES


def packed_most(elements: int) -> int:
    """Maximum bytes of a chunk in int4z: zstd adds a little to incompressible codes."""
    blocks = -(-elements // BLOCK)
    codes = blocks * BLOCK // 2
    return blocks * SCALE_BYTES + codes + (codes >> 8) + 64


def packed_least(elements: int) -> int:
    """Minimum bytes of a chunk in int4z: its scales and an empty zstd frame."""
    return -(-elements // BLOCK) * SCALE_BYTES + 9


@dataclass(frozen=True)
class WireSize:
    """Bytes of a chunk on the wire.

    Attributes:
        element: bytes per element, including its share of the overhead; for `packed` as in training.
        block: elements that are encoded together (the last block of a chunk is padded with zeros), and
            the bytes of a block; 0 if `element` suffices.
        packed: the size depends on the values, and is between `packed_least` and `packed_most`.
    """

    element: float
    block: tuple[int, int] = (1, 0)
    packed: bool = False

    def most(self, elements: int) -> int:
        """Bytes of a chunk with this number of elements; for a packed one the maximum."""
        if self.packed:
            return packed_most(elements)
        size, of_block = self.block
        return -(-elements // size) * (of_block or int(self.element))

    def least(self, elements: int) -> int:
        """Minimum bytes of a chunk with this number of elements."""
        return packed_least(elements) if self.packed else self.most(elements)


# Sizes by codec name (`codecs.CODECS` has the codecs), for parameters and for integers (int64).
SIZES = {
    "fp32": WireSize(4),
    "bf16": WireSize(2),
    "fp16": WireSize(2),
    "int8": WireSize((BLOCK + SCALE_BYTES) / BLOCK, (BLOCK, BLOCK + SCALE_BYTES)),
    "int4": WireSize((BLOCK // 2 + SCALE_BYTES) / BLOCK, (BLOCK, BLOCK // 2 + SCALE_BYTES)),
    "int4z": WireSize(0.275, packed=True),  # 2.2 bits
    **{  # 0.23 bits with 64 elements
        name: WireSize(sparse_bytes(kept) / SPARSE_BLOCK, (SPARSE_BLOCK, sparse_bytes(kept)))
        for name, kept in SPARSE_KEPT.items()
    },
    "int64": WireSize(8),
}
# The wire dtypes of buffers and integers, independent of that of parameters.
BUFFERS_DTYPE, INTEGERS_DTYPE = "fp32", "int64"
# Valid dtypes of pseudo-gradients (`WIRE_DTYPES`) and of parameters in replies (`REPLY_DTYPES`).
WIRE_DTYPES = tuple(name for name in SIZES if name != INTEGERS_DTYPE)
# Without the sparse ones: most of a version would be late by many rounds.
REPLY_DTYPES = tuple(name for name in WIRE_DTYPES if name not in SPARSE_KEPT)


def is_quantized(name: str) -> bool:
    """Whether a wire dtype is quantized, so that its error must be fed back."""
    return SIZES[name].element < SIZES["bf16"].element


def whole_dtype(reply_dtype: str) -> str:
    """The dtype of full parameters in replies: only differences are quantized."""
    return "fp32" if is_quantized(reply_dtype) else reply_dtype


def check_wire_dtype(name: str, known: Sequence[str] = WIRE_DTYPES) -> None:
    """Raise UsageError for an unknown wire dtype."""
    if name not in known:
        raise UsageError(f"Unknown wire dtype {name!r}; choose one of {', '.join(known)}.")


def travels_in(segment: Segment, wire_dtype: str) -> str:
    """The wire dtype of a segment, if that of parameters is `wire_dtype`."""
    match segment:
        case Segment.PARAMETERS:
            return wire_dtype
        case Segment.BUFFERS:
            return BUFFERS_DTYPE
        case Segment.INTEGERS:
            return INTEGERS_DTYPE


def span_bytes(span: ChunkSpan, wire_dtype: str) -> int:
    """Bytes of a chunk on the wire, if parameters are sent in `wire_dtype`; for int4z the maximum."""
    return SIZES[travels_in(span.segment, wire_dtype)].most(span.elements)


def least_bytes(span: ChunkSpan, wire_dtype: str) -> int:
    """Minimum bytes of such a chunk; differs from `span_bytes` only for int4z."""
    return SIZES[travels_in(span.segment, wire_dtype)].least(span.elements)
