"""Chunks of parameters that were handed to ZeroMQ and that the other side has not read.

A chunk lies in memory once, for all who are sent it, and the newest versions lie there anyway. What
costs is a chunk of an older version: it stays in memory until all its readers have read it. Thirty
readers that read next to nothing would keep thirty versions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from diloco_broker.core.versions.fragment import OLD_VERSIONS_KEPT
from diloco_protocol.messages import Chunk, Message

# Of versions that the broker itself has let go of, bytes: what one reader of ours has credit for.
STRANGERS_MAY_KEEP = 32 << 20


class Piece(NamedTuple):
    """What lies in memory: chunk `number` of a fragment, in its version `counter`.

    Whole, or as a difference from the version `held`.
    """

    fragment: int
    number: int
    counter: int
    held: int | None = None


def piece_of(message: Message) -> Piece | None:
    """Which chunk of the parameters a message of ours carries, if any."""
    if not isinstance(message, Chunk) or message.version is None:
        return None
    held = None if message.delta_of is None else message.delta_of.counter
    return Piece(message.fragment, message.index, message.version.counter, held)


@dataclass
class _Sent:
    begin: int  # of the bytes that this connection was sent
    end: int
    piece: Piece
    since: float | None = None  # the first look at it


@dataclass
class ChunksOnTheWay:
    """Those of one connection. `left`: bytes of them that were not read as of the last look."""

    left: int = 0
    _sent: deque[_Sent] = field(default_factory=deque)

    def add(self, begin: int, end: int, piece: Piece) -> None:
        self._sent.append(_Sent(begin, end, piece))

    def clear(self) -> None:
        self._sent.clear()
        self.left = 0

    def see(self, had: int, now: float) -> None:
        """The peer has received the first `had` bytes of this connection."""
        while self._sent and self._sent[0].end <= had:
            self._sent.popleft()
        for each in reversed(self._sent):
            if each.since is not None:
                break
            each.since = now
        self.left = sum(each.end - max(each.begin, had) for each in self._sent)

    def old(self, newest: Mapping[int, int]) -> dict[Piece, int]:
        """What only readers keep in memory, with its bytes. `newest` has a counter for each fragment."""
        return {
            each.piece: each.end - each.begin
            for each in self._sent
            if each.piece.counter < newest[each.piece.fragment] - OLD_VERSIONS_KEPT
        }

    @property
    def waits_since(self) -> float:
        """When the first of them was seen first; infinite without one."""
        return next((each.since for each in self._sent if each.since is not None), float("inf"))


class Reader(Protocol):
    """A connection, as far as it concerns this."""

    @property
    def chunks(self) -> ChunksOnTheWay: ...

    def shut(self) -> None: ...


def end_keepers_of_old(readers: Iterable[Reader], newest: Mapping[int, int]) -> list[str]:
    """End those, who waits longest first, without whom the others keep no more than all may.

    The last one that keeps something goes on: its credit bounds it. Returns a sentence for each.
    """
    kept = [(each, each.chunks.old(newest)) for each in readers]
    kept = [(each, pieces) for each, pieces in kept if pieces]
    keepers = Counter(piece for _, pieces in kept for piece in pieces)
    total = sum({piece: size for _, pieces in kept for piece, size in pieces.items()}.values())
    ended: list[str] = []
    if total <= STRANGERS_MAY_KEEP:
        return ended
    kept.sort(key=lambda one: one[0].chunks.waits_since)
    for reader, pieces in kept[:-1]:
        if total <= STRANGERS_MAY_KEEP:
            break
        ended.append(f"{total >> 20} MiB of old parameters that were not read")
        reader.shut()
        keepers.subtract(pieces.keys())
        total -= sum(size for piece, size in pieces.items() if not keepers[piece])
    return ended
