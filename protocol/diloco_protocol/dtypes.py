"""What chunks travel in, by name, and the bytes that they take: what can be known without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.errors import UsageError

# Elements that have a scale together, in codecs of few bits, and the bytes of a scale.
BLOCK = 256
SCALE_BYTES = 2
# Elements of a block of `top64`, how many of them it keeps, and its bytes.
TOP_BLOCK, TOP_KEPT, TOP_BYTES = 4096, 64, 84


def packed_most(elements: int) -> int:
    """Bytes that a chunk in int4z may have: zstd adds a little to codes that it cannot shorten."""
    blocks = -(-elements // BLOCK)
    codes = blocks * BLOCK // 2
    return blocks * SCALE_BYTES + codes + (codes >> 8) + 64


def packed_least(elements: int) -> int:
    """Bytes that it has at least: its scales, and an empty frame of zstd."""
    return -(-elements // BLOCK) * SCALE_BYTES + 9


@dataclass(frozen=True)
class WireSize:
    """Bytes of a chunk on the wire.

    Attributes:
        element: bytes of one, with its part of all that comes with it; for `packed` as in training.
        block: elements that are encoded together, the last of a chunk with zeros behind them; and the
            bytes of such a block, 0 where `element` says it all.
        packed: how many they are depends on the values: between `packed_least` and `packed_most`.
    """

    element: float
    block: tuple[int, int] = (1, 0)
    packed: bool = False

    def most(self, elements: int) -> int:
        """Bytes of a chunk of `elements` elements; of a packed one the most that it may have."""
        if self.packed:
            return packed_most(elements)
        size, of_block = self.block
        return -(-elements // size) * (of_block or int(self.element))

    def least(self, elements: int) -> int:
        """Bytes that it has at least."""
        return packed_least(elements) if self.packed else self.most(elements)


# By the name of the codec (`codecs.CODECS` has the other half of each row): what parameters may travel
# in, and what integers do.
SIZES = {
    "fp32": WireSize(4),
    "bf16": WireSize(2),
    "fp16": WireSize(2),
    "int8": WireSize((BLOCK + SCALE_BYTES) / BLOCK, (BLOCK, BLOCK + SCALE_BYTES)),
    "int4": WireSize((BLOCK // 2 + SCALE_BYTES) / BLOCK, (BLOCK, BLOCK // 2 + SCALE_BYTES)),
    "int4z": WireSize(0.275, packed=True),  # 2.2 bits
    "top64": WireSize(TOP_BYTES / TOP_BLOCK, (TOP_BLOCK, TOP_BYTES)),  # 0.16 bits
    "int64": WireSize(8),
}
# What buffers and integers travel in, whatever the parameters do.
BUFFERS_DTYPE, INTEGERS_DTYPE = "fp32", "int64"
# What pseudo-gradients may travel in, and what parameters.
WIRE_DTYPES = tuple(name for name in SIZES if name != INTEGERS_DTYPE)
# Experiments, not recommended: for pseudo-gradients alone.
EXPERIMENTAL = ("top64",)
REPLY_DTYPES = tuple(name for name in WIRE_DTYPES if name not in EXPERIMENTAL)


def in_few_bits(name: str) -> bool:
    """Whether encoding in it loses a noticeable part of the values, so that the rest is kept."""
    return SIZES[name].element < SIZES["bf16"].element


def whole_dtype(reply_dtype: str) -> str:
    """What parameters travel in that come whole, not as a difference: few bits are for differences."""
    return "fp32" if in_few_bits(reply_dtype) else reply_dtype


def check_wire_dtype(name: str, known: Sequence[str] = WIRE_DTYPES) -> None:
    """Raise UsageError for a wire dtype that there is not."""
    if name not in known:
        raise UsageError(f"Unknown wire dtype {name!r}; choose one of {', '.join(known)}.")


def travels_in(segment: Segment, wire_dtype: str) -> str:
    """What a segment travels in, where parameters travel in `wire_dtype`."""
    match segment:
        case Segment.PARAMETERS:
            return wire_dtype
        case Segment.BUFFERS:
            return BUFFERS_DTYPE
        case Segment.INTEGERS:
            return INTEGERS_DTYPE


def span_bytes(span: ChunkSpan, wire_dtype: str) -> int:
    """Bytes of a chunk on the wire, where parameters travel in `wire_dtype`: the most in int4z."""
    return SIZES[travels_in(span.segment, wire_dtype)].most(span.elements)


def least_bytes(span: ChunkSpan, wire_dtype: str) -> int:
    """Bytes that such a chunk has at least: the same but in int4z."""
    return SIZES[travels_in(span.segment, wire_dtype)].least(span.elements)
