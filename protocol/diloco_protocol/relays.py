"""Relays: envelopes of their messages, paths to downstream connections, and their cache of chunks.

A relay has two connections to its hub, a control and a data connection. A message of a downstream worker
is sent unchanged after a `via` frame that identifies the worker; so is each reply. The hub identifies
such a connection by its path: the route of the relay, and the relay's name of the connection. With
several relays in a row paths are longer.

A chunk of a version goes to each of the relay's workers, but only once over the link to the relay. Both
ends track the chunks that the relay has (`Cache`), by the same rule and in the order of one connection.
So the hub omits the buffer of a chunk that the relay has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.frames import unpack
from diloco_protocol.messages import Chunk, Held, Message, Via, decode, encode
from diloco_protocol.version import VersionId

# First byte of routes that ZeroMQ generates, which peers cannot choose. Generated routes have five
# bytes; paths are longer.
_WAY = b"\0"
LONGEST_NAME = 255  # bytes of the name of a connection
# Bytes of a path, which a relay chooses and its hub stores.
LONGEST_WAY = 1024
LONGEST_VIA = 2 << 10  # bytes of a `via` frame

V = TypeVar("V")


def way(route: bytes, who: bytes) -> bytes:
    """The path to connection `who` of the relay at `route`; raises ProtocolError if it is too long."""
    found = _WAY + bytes([len(route)]) + route + who
    if not who or len(route) > LONGEST_NAME or len(found) > LONGEST_WAY:
        raise ProtocolError(Code.BAD_HEADER, "The path through the relays is too long.")
    return found


def first_step(route: bytes) -> tuple[bytes, bytes] | None:
    """The relay's connection and the rest of the path; None for a direct connection."""
    if len(route) < 8 or not route.startswith(_WAY):
        return None
    end = 2 + route[1]
    return route[2:end], route[end:]


def wrapped(who: bytes, message: Message, payload: Any = None, **of_via: Any) -> list[Any]:
    """The frames of a message from or to a downstream connection of a relay."""
    frames = [encode(Via(who, **of_via)), encode(message)]
    return frames if payload is None else [*frames, payload]


def unwrap(frames: Sequence[Any]) -> tuple[Via | None, Sequence[Any]]:
    """Split a message between a relay and its hub into envelope and frames.

    The envelope is None for a message of relay or hub themselves. Raises ProtocolError as `unpack` does.
    """
    header = memoryview(frames[0] if frames else b"")
    if len(frames) < 2 or header.nbytes > LONGEST_VIA:
        return None, frames
    via = decode(header)
    return (via, frames[1:]) if isinstance(via, Via) else (None, frames)


def read(
    frames: Sequence[Any], longest_header: int, held: Held | None = None
) -> tuple[Message, Held | memoryview | None]:
    """Read an unwrapped message as `unpack` does, except that a chunk may lack its buffer.

    The second result is then `held`; None if the relay has the chunk.
    """
    if len(frames) == 1 and memoryview(frames[0]).nbytes <= longest_header:
        message = decode(frames[0])
        return message, held if isinstance(message, Chunk) else None
    return unpack(frames, longest_header)


class Piece(NamedTuple):
    """A chunk of a version in wire form: in full, or as a difference from an older version."""

    fragment: int
    number: int
    version: VersionId
    delta_of: VersionId | None


def piece_of(message: Message) -> Piece | None:
    """The chunk of a version that a message contains; None if it contains none."""
    if not isinstance(message, Chunk) or message.version is None:
        return None
    return Piece(message.fragment, message.index, message.version, message.delta_of)


class Cache(Generic[V]):
    """The chunks of versions that a relay has, as tracked by both ends; V is the value kept for each.

    It keeps the chunks of the newest two versions of each fragment.
    """

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}  # counter by fragment
        self._pieces: dict[int, dict[int, dict[Piece, V]]] = {}  # by fragment and counter

    def get(self, chunk: Chunk) -> V | None:
        found = piece_of(chunk)
        assert found is not None
        of_fragment = self._pieces.get(found.fragment, {})
        return of_fragment.get(found.version.counter, {}).get(found)

    def put(self, chunk: Chunk, value: V) -> None:
        """Record that a chunk is sent to the relay with its buffer."""
        found = piece_of(chunk)
        assert found is not None
        counter, fragment = found.version.counter, found.fragment
        newest = self._newest[fragment] = max(self._newest.get(fragment, counter), counter)
        kept = self._pieces.setdefault(fragment, {})
        for old in [each for each in kept if each < newest - 1]:
            del kept[old]
        if counter >= newest - 1:
            kept.setdefault(counter, {})[found] = value
