"""Accounting of chunks of parameters that are in flight: given to ZeroMQ, not yet read by the peer.

All receivers share one copy of a chunk, and the newest versions stay in memory anyway. Only a chunk of
an older version has a cost: it stays until its last receiver has read it. Thirty slow readers could
keep thirty versions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from diloco_broker.core.versions.fragment import OLD_VERSIONS_KEPT
from diloco_protocol.relays import Piece

# Bytes of released versions that readers without a membership may keep alive: the credit of one reader.
UNAUTHENTICATED_MAY_KEEP = 32 << 20


@dataclass
class _Sent:
    begin: int  # offset in the bytes sent on this connection
    end: int
    piece: Piece
    since: float | None = None  # time of the first poll that saw it unread


@dataclass
class ChunksOnTheWay:
    """The chunks in flight on one connection. `left`: bytes unread as of the last poll."""

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
        """Buffers that only readers keep alive, with their bytes. `newest`: counter by fragment."""
        return {
            each.piece: each.end - each.begin
            for each in self._sent
            if each.piece.version.counter < newest[each.piece.fragment] - OLD_VERSIONS_KEPT
        }

    @property
    def waits_since(self) -> float:
        """When the oldest unread chunk was first seen; infinity if there is none."""
        return next((each.since for each in self._sent if each.since is not None), float("inf"))


class Reader(Protocol):
    """The part of a connection that this module needs."""

    @property
    def chunks(self) -> ChunksOnTheWay: ...

    def shut(self) -> None: ...


def end_keepers_of_old(readers: Iterable[Reader], newest: Mapping[int, int]) -> list[str]:
    """Close the readers that have waited longest until the rest keep at most `UNAUTHENTICATED_MAY_KEEP`.

    The last remaining reader stays: its credit bounds it. Returns a sentence for each closed one.
    """
    kept = [(each, each.chunks.old(newest)) for each in readers]
    kept = [(each, pieces) for each, pieces in kept if pieces]
    keepers = Counter(piece for _, pieces in kept for piece in pieces)
    total = sum({piece: size for _, pieces in kept for piece, size in pieces.items()}.values())
    ended: list[str] = []
    if total <= UNAUTHENTICATED_MAY_KEEP:
        return ended
    kept.sort(key=lambda one: one[0].chunks.waits_since)
    for reader, pieces in kept[:-1]:
        if total <= UNAUTHENTICATED_MAY_KEEP:
            break
        ended.append(f"{total >> 20} MiB of unread old parameters")
        reader.shut()
        keepers.subtract(pieces.keys())
        total -= sum(size for piece, size in pieces.items() if not keepers[piece])
    return ended
