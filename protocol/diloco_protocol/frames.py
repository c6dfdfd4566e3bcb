"""Multipart frames: [msgpack header][raw buffer]. Nothing is ever unpickled.

Every message is a header frame; `chunk` has one buffer frame behind it, and a `probe` may have one.
Sizes are limited here, before anything is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import LONGEST_PROBE, Chunk, Combined, Message, Probe, decode, encode

# A header from the broker: what it knows of a manifest of 50,000 tensors takes about 6 MB.
MAX_HEADER_BYTES = 8 << 20
# A header to the broker from a peer that has not joined takes 0.1 ms at most to read, if it is not
# longer than this. Longer kinds are named among the first bytes.
SHORT = 1 << 10
MAY_BE_LONG = (b"\xa4kind\xa4join", b"\xa4kind\xa8describe", b"\xa4kind\xa4lane")
# A header to the broker: the longest `join`, which takes 5 ms to read. A member may have to send a
# ledger: of 500 workers it takes 100 kB.
LONGEST_OF_A_STRANGER = 64 << 10
LONGEST_OF_A_MEMBER = 1 << 20
# A chunk of integers is the largest buffer: 8 bytes an element.
MAX_BUFFER_BYTES = CHUNK_ELEMENTS * 8
# What ZeroMQ itself refuses to receive in one frame (it drops the connection).
MAX_FRAME_BYTES = max(MAX_HEADER_BYTES, MAX_BUFFER_BYTES)
MAX_FRAMES = 2
# Seconds of silence after which TCP sends something by itself. The connection for chunks is silent for H
# steps, and routers forget connections, some after five minutes.
KEEPALIVE_IDLE_S = 60


def pack(message: Message, payload: Any = None) -> list[Any]:
    """The frames of a message. `payload` (bytes-like) goes with `chunk` and `probe` only."""
    header = encode(message)
    return [header] if payload is None else [header, payload]


def unpack(
    frames: Sequence[Any], longest_header: int = MAX_HEADER_BYTES
) -> tuple[Message, memoryview | None]:
    """The message, and its buffer or None, of bytes-like frames without the routing id.

    Raises:
        ProtocolError: wrong number or sizes of frames, a header that is not a message, or a chunk
            without a buffer. The sentence is fit to be sent back.
    """
    count = len(frames)
    if not 0 < count <= MAX_FRAMES:
        raise _misfit(
            f"A message has a header and at most one buffer, this one has {count} frames."
        )
    header = memoryview(frames[0])
    if header.nbytes > longest_header:
        raise _misfit(f"The header has {header.nbytes} bytes, the limit is {longest_header}.")
    message = decode(header)
    payload = memoryview(frames[1]) if count > 1 else None
    if isinstance(message, Chunk):
        if payload is None or payload.nbytes == 0:
            raise _misfit(
                f"Chunk {message.index} of fragment {message.fragment} came with an empty buffer; "
                "send its elements in the frame behind the header."
            )
        if payload.nbytes > MAX_BUFFER_BYTES:
            raise _misfit(
                f"The buffer has {payload.nbytes} bytes, the limit is {MAX_BUFFER_BYTES}."
            )
    elif isinstance(message, Combined):
        if bool(message.numbers) != bool(payload):
            raise _misfit("A sum came without its buffer, or a buffer without a sum.")
    elif isinstance(message, Probe):
        if payload is not None and payload.nbytes > LONGEST_PROBE:
            raise _misfit(f"The buffer has {payload.nbytes} bytes, the limit is {LONGEST_PROBE}.")
    elif payload is not None:
        raise _misfit(f"A {message.kind} message has no buffer, this one came with one.")
    return message, payload


def _misfit(text: str) -> ProtocolError:
    return ProtocolError(Code.BAD_FRAMES, text)
