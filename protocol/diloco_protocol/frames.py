"""Multipart frames: [msgpack header][raw buffer]. Nothing is ever unpickled.

Every message has a header frame; a `chunk` is followed by a buffer frame, and a `probe` may be. Sizes
are checked here, before decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import LONGEST_PROBE, Chunk, Combined, Message, Probe, decode, encode

# Bytes of a header from the broker: a manifest of 50,000 tensors takes about 6 MB.
MAX_HEADER_BYTES = 8 << 20
# Bytes of a header to the broker from a peer that has not joined; decoding it takes at most 0.1 ms. The
# kinds that may be longer are recognised by their first bytes.
SHORT = 1 << 10
MAY_BE_LONG = (b"\xa4kind\xa4join", b"\xa4kind\xa8describe", b"\xa4kind\xa4lane")
# Bytes of a header to the broker: the longest `join`, which takes 5 ms to decode; and of a member, which
# may send a ledger (100 kB for 500 workers).
LONGEST_UNAUTHENTICATED = 64 << 10
LONGEST_OF_A_MEMBER = 1 << 20
# Bytes of the largest buffer: a chunk of integers, 8 bytes per element.
MAX_BUFFER_BYTES = CHUNK_ELEMENTS * 8
# Bytes of a frame above which ZeroMQ itself drops the connection.
MAX_FRAME_BYTES = max(MAX_HEADER_BYTES, MAX_BUFFER_BYTES)
MAX_FRAMES = 2
# Seconds of silence after which TCP sends a keepalive. The connection for chunks is silent for H steps,
# and routers drop idle connections, some after five minutes.
KEEPALIVE_IDLE_S = 60


def pack(message: Message, payload: Any = None) -> list[Any]:
    """The frames of a message. `payload` (bytes-like) goes with `chunk` and `probe` only."""
    header = encode(message)
    return [header] if payload is None else [header, payload]


def unpack(
    frames: Sequence[Any], longest_header: int = MAX_HEADER_BYTES
) -> tuple[Message, memoryview | None]:
    """Decode bytes-like frames (without the routing id) to a message and its buffer or None.

    Raises:
        ProtocolError: wrong number or sizes of frames, an invalid header, or a chunk without a buffer.
            Its message can be sent back.
    """
    count = len(frames)
    if not 0 < count <= MAX_FRAMES:
        raise _misfit(f"A message must have a header and at most one buffer, got {count} frames.")
    header = memoryview(frames[0])
    if header.nbytes > longest_header:
        raise _misfit(f"The header has {header.nbytes} bytes, the limit is {longest_header}.")
    message = decode(header)
    payload = memoryview(frames[1]) if count > 1 else None
    if isinstance(message, Chunk):
        if payload is None or payload.nbytes == 0:
            raise _misfit(
                f"Chunk {message.index} of fragment {message.fragment} has an empty buffer; send its "
                "elements in the frame after the header."
            )
        if payload.nbytes > MAX_BUFFER_BYTES:
            raise _misfit(
                f"The buffer has {payload.nbytes} bytes, the limit is {MAX_BUFFER_BYTES}."
            )
    elif isinstance(message, Combined):
        if bool(message.numbers) != bool(payload):
            raise _misfit("A sum has no buffer, or a buffer has no sum.")
    elif isinstance(message, Probe):
        if payload is not None and payload.nbytes > LONGEST_PROBE:
            raise _misfit(f"The buffer has {payload.nbytes} bytes, the limit is {LONGEST_PROBE}.")
    elif payload is not None:
        raise _misfit(f"A {message.kind} message must not have a buffer.")
    return message, payload


def _misfit(text: str) -> ProtocolError:
    return ProtocolError(Code.BAD_FRAMES, text)
