"""What chunks travel in, by name, and the bytes that they take: what can be known without torch."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.errors import UsageError


@dataclass(frozen=True)
class WireSize:
    """Bytes of one element on the wire, and of what a chunk has beside its elements (a scale, say)."""

    element: int
    chunk: int = 0


# By the name of the codec (`codecs.CODECS` has the other half of each row): what parameters may travel
# in, and what integers do.
SIZES = {
    "fp32": WireSize(4),
    "bf16": WireSize(2),
    "fp16": WireSize(2),
    "int64": WireSize(8),
}
# What buffers and integers travel in, whatever the parameters do.
BUFFERS_DTYPE, INTEGERS_DTYPE = "fp32", "int64"
WIRE_DTYPES = tuple(name for name in SIZES if name != INTEGERS_DTYPE)


def check_wire_dtype(name: str) -> None:
    """Raise UsageError for a wire dtype that there is not."""
    if name not in WIRE_DTYPES:
        known = ", ".join(WIRE_DTYPES)
        raise UsageError(f"Unknown wire dtype {name!r}; choose one of {known}.")


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
    """Bytes of a chunk on the wire, where parameters travel in `wire_dtype`."""
    size = SIZES[travels_in(span.segment, wire_dtype)]
    return span.elements * size.element + size.chunk
