"""Relays: how their messages are wrapped, how connections behind them are called, what they cache.

A relay has two connections to its hub, one of them for chunks. A message of a worker behind it travels
as it is, with a `via` frame in front that says whose it is; so does each answer. The hub calls such a
connection by the way to it: that of the relay, and what the relay calls it. Relays behind relays make
longer ways.

A chunk of a version goes to each of the relay's workers, and over the line to the relay once. Both ends
keep account of which chunks the relay has (`Cache`), by one rule and in the order of one connection. So
the hub leaves out the buffer of a chunk that is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.frames import unpack
from diloco_protocol.messages import Chunk, Held, Message, Via, decode, encode
from diloco_protocol.version import VersionId

# A byte that names drawn by ZeroMQ begin with, and names given by peers cannot. Those drawn have five
# bytes; a way has more.
_WAY = b"\0"
LONGEST_NAME = 255  # of a connection, in bytes
# The longest way; a relay says what it likes, and its hub keeps it.
LONGEST_WAY = 1024
LONGEST_VIA = 2 << 10  # bytes of the frame that says whose a message is

V = TypeVar("V")


def way(route: bytes, who: bytes) -> bytes:
    """The way to connection `who` of the relay at `route`; raises ProtocolError for one too long."""
    found = _WAY + bytes([len(route)]) + route + who
    if not who or len(route) > LONGEST_NAME or len(found) > LONGEST_WAY:
        raise ProtocolError(Code.BAD_HEADER, "The way through the relays is too long.")
    return found


def first_step(route: bytes) -> tuple[bytes, bytes] | None:
    """The relay's connection and the rest of the way; None for a connection that is direct."""
    if len(route) < 8 or not route.startswith(_WAY):
        return None
    end = 2 + route[1]
    return route[2:end], route[end:]


def wrapped(who: bytes, message: Message, payload: Any = None, **of_via: Any) -> list[Any]:
    """The frames of a message from or to a connection of a relay."""
    frames = [encode(Via(who, **of_via)), encode(message)]
    return frames if payload is None else [*frames, payload]


def unwrap(frames: Sequence[Any]) -> tuple[Via | None, Sequence[Any]]:
    """Whose a message between a relay and its hub is, and its frames; None: it is one of the two's own.

    Raises ProtocolError as `unpack` does.
    """
    header = memoryview(frames[0] if frames else b"")
    if len(frames) < 2 or header.nbytes > LONGEST_VIA:
        return None, frames
    via = decode(header)
    return (via, frames[1:]) if isinstance(via, Via) else (None, frames)


def read(
    frames: Sequence[Any], longest_header: int, held: Held | None = None
) -> tuple[Message, Held | memoryview | None]:
    """A message that was unwrapped, as `unpack` reads it, but that a chunk may lack its buffer.

    In its place is `held`; None where the relay has it.
    """
    if len(frames) == 1 and memoryview(frames[0]).nbytes <= longest_header:
        message = decode(frames[0])
        return message, held if isinstance(message, Chunk) else None
    return unpack(frames, longest_header)


class Piece(NamedTuple):
    """A chunk of a version as it is sent: whole, or as a difference from an older one."""

    fragment: int
    number: int
    version: VersionId
    delta_of: VersionId | None


class Cache(Generic[V]):
    """The chunks of versions that a relay has, as both ends know; V is what they keep of each.

    Those of a fragment's newest version are kept, and of the one before.
    """

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}  # counter by fragment
        self._pieces: dict[int, dict[int, dict[Piece, V]]] = {}  # by fragment and counter

    def get(self, chunk: Chunk) -> V | None:
        found = _piece(chunk)
        of_fragment = self._pieces.get(found.fragment, {})
        return of_fragment.get(found.version.counter, {}).get(found)

    def put(self, chunk: Chunk, value: V) -> None:
        """A chunk goes to the relay with its buffer."""
        found = _piece(chunk)
        counter, fragment = found.version.counter, found.fragment
        newest = self._newest[fragment] = max(self._newest.get(fragment, counter), counter)
        kept = self._pieces.setdefault(fragment, {})
        for old in [each for each in kept if each < newest - 1]:
            del kept[old]
        if counter >= newest - 1:
            kept.setdefault(counter, {})[found] = value


def _piece(chunk: Chunk) -> Piece:
    assert chunk.version is not None, "no chunk of a version"
    return Piece(chunk.fragment, chunk.index, chunk.version, chunk.delta_of)
