"""Wire dtypes by name, and the bytes of a chunk in them: what can be known without torch."""

from __future__ import annotations

from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.errors import UsageError

# Bytes of an element of the parameters, by the name of what they travel in.
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
WIRE_DTYPES = tuple(ITEM_BYTES)
# What buffers and integers travel in, whatever the parameters do.
BUFFERS_DTYPE, INTEGERS_DTYPE = "fp32", "int64"
INTEGER_BYTES = 8


def check_wire_dtype(name: str) -> None:
    """Raise UsageError for a wire dtype that there is not."""
    if name not in ITEM_BYTES:
        known = ", ".join(WIRE_DTYPES)
        raise UsageError(f"Unknown wire dtype {name!r}; choose one of {known}.")


def span_bytes(span: ChunkSpan, wire_dtype: str) -> int:
    """Bytes of a chunk on the wire, where parameters travel in `wire_dtype`."""
    match span.segment:
        case Segment.PARAMETERS:
            return span.elements * ITEM_BYTES[wire_dtype]
        case Segment.BUFFERS:
            return span.elements * ITEM_BYTES[BUFFERS_DTYPE]
        case Segment.INTEGERS:
            return span.elements * INTEGER_BYTES
