"""The parts moved in each exchange between a sharded model and the owners of its chunks. Pure.

In each exchange every process handles a bounded part of what it owns, which bounds its memory. What a
process owns and has itself is not moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from diloco_protocol.chunks import CHUNK_ELEMENTS, FragmentLayout, Place
from diloco_worker.model.spread.blocks import Block
from diloco_worker.model.spread.shares import Blocks, Piece, piece_name, share_of

# Elements that all owners together handle in one exchange. A process sends and receives at most as
# many: 4 MiB each in fp32.
SLICE_ELEMENTS = 2 * CHUNK_ELEMENTS

Holders = Mapping[Block, Sequence[int]]  # the processes that have a block


@dataclass(frozen=True)
class Part:
    """What a process has of a piece: its block's flat elements [first, last)."""

    piece: Piece
    block: Block
    holder: int
    owner: int
    first: int
    last: int
    is_source: bool  # the owner's values are those of this process

    @property
    def is_all(self) -> bool:
        """Whether it is the whole piece, in its order."""
        return self.last - self.first == self.piece.stop - self.piece.start

    @property
    def where(self) -> slice | Tensor:
        """The position of these elements in the piece."""
        return self.block.indices(self.first, self.last, self.piece.start)

    @property
    def bytes(self) -> int:
        return (self.last - self.first) * self.piece.dtype.itemsize

    def other(self, rank: int) -> int:
        """The process at the other end."""
        return self.holder if self.owner == rank else self.owner


@dataclass(frozen=True)
class Slice:
    """One exchange."""

    rank: int  # of this process
    pieces: tuple[Piece, ...]  # that this process owns
    parts: tuple[Part, ...]  # of all pieces of it that this process has or owns, in a common order
    gathers: bool  # whether any process lacks a part that it owns
    scatters: bool  # whether any process has something that another one owns

    @cached_property
    def kept(self) -> list[Part]:
        """What this process owns and has itself."""
        return [part for part in self.parts if part.holder == part.owner]

    @cached_property
    def gathered(self) -> tuple[list[Part], list[Part]]:
        """What this process sends and receives when owners gather values."""
        moved = [part for part in self.parts if part.is_source and part.holder != part.owner]
        return (
            [part for part in moved if part.holder == self.rank],
            [part for part in moved if part.owner == self.rank],
        )

    @cached_property
    def scattered(self) -> tuple[list[Part], list[Part]]:
        """What this process sends and receives when owners distribute values."""
        moved = [part for part in self.parts if part.holder != part.owner]
        return (
            [part for part in moved if part.owner == self.rank],
            [part for part in moved if part.holder == self.rank],
        )


def slices_of(
    layout: FragmentLayout, owners: Sequence[int], blocks: Blocks, rank: int, count: int
) -> list[Slice]:
    """The exchanges of a fragment for this process; as many in all processes."""
    most = max(1, SLICE_ELEMENTS // count)
    holders = {p.entry.name: _holders(blocks[p.entry.name]) for p in layout.places}
    batches = [list(_batches(share_of(layout, owners, r)[1], most)) for r in range(count)]
    slices = []
    for number in range(max(map(len, batches))):
        parts: list[Part] = []
        gathers = scatters = False
        of_each = [batch[number] if number < len(batch) else [] for batch in batches]
        for owner, piece in ((r, piece) for r, pieces in enumerate(of_each) for piece in pieces):
            for block, found, first, last in _runs(piece, holders[piece.name]):
                source = owner if owner in found else found[piece.chunk % len(found)]
                gathers |= source != owner
                scatters |= any(holder != owner for holder in found)
                parts += (
                    Part(piece, block, holder, owner, first, last, holder == source)
                    for holder in found
                    if rank in (holder, owner)
                )
        slices.append(Slice(rank, tuple(of_each[rank]), tuple(parts), gathers, scatters))
    return slices


def _holders(blocks: Sequence[Block | None]) -> Holders:
    holders: dict[Block, list[int]] = {}
    for rank, block in enumerate(blocks):
        if block is not None and block.elements:
            holders.setdefault(block, []).append(rank)
    return holders


def _runs(piece: Piece, holders: Holders) -> Iterator[tuple[Block, Sequence[int], int, int]]:
    """The elements [first, last) of each block that belong to a piece, and who has them."""
    for block, found in holders.items():
        first, last = block.before(piece.start), block.before(piece.stop)
        if first < last:
            yield block, found, first, last


def _batches(pieces: Sequence[Piece], most: int) -> Iterator[list[Piece]]:
    """Pieces, cut where they are large, in batches of at most this many elements."""
    batch: list[Piece] = []
    left = most
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            stop = min(piece.stop, start + left)
            batch.append(_cut(piece, start, stop))
            left -= stop - start
            start = stop
            if not left:
                yield batch
                batch, left = [], most
    if batch:
        yield batch


def _cut(piece: Piece, start: int, stop: int) -> Piece:
    if (start, stop) == (piece.start, piece.stop):
        return piece
    at = piece.place.start + start - piece.start
    entry = replace(
        piece.place.entry, name=piece_name(piece.name, start, stop), shape=(stop - start,)
    )
    place = Place(entry, piece.place.segment, at, at + stop - start)
    return replace(piece, start=start, stop=stop, place=place)
