"""Moving values between a model that is spread over processes, and the owners of its chunks.

In bounded slices: of each exchange every process has a few of the chunks that it owns, so that nobody
ever has more than these besides its share. Values travel in the tensors' own dtypes. What a process owns
and has itself does not move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco_protocol.chunks import CHUNK_ELEMENTS, FragmentLayout
from diloco_worker.model.spread.blocks import Block
from diloco_worker.model.spread.ranks import Ranks
from diloco_worker.model.spread.shares import Blocks, Piece, share_of

# Elements of the chunks that all owners together have in one exchange: 8 MiB in fp32.
SLICE_ELEMENTS = 4 * CHUNK_ELEMENTS
# Each run of values begins at such a multiple of bytes, so that it can be looked at in any dtype.
ALIGNED = 8


# By name, the contiguous tensors that this process has of one of the model's: of tied ones several, with
# equal values.
Live = Mapping[str, Sequence[Tensor]]


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
        """Where these elements are within the piece."""
        return self.block.indices(self.first, self.last, self.piece.start)


@dataclass(frozen=True)
class Slice:
    """What is moved in one exchange."""

    pieces: tuple[Piece, ...]  # of the chunks that this process owns
    parts: tuple[Part, ...]  # of all pieces of it that this process has or owns, in a common order
    gathers: bool  # whether any process lacks something of what it owns
    scatters: bool  # whether any process has something that another one owns


@dataclass(eq=False)
class Buffers:
    """Memory for exchanges, kept and used again."""

    sent: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    room: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def of(self, sent: int, wanted: int) -> tuple[Tensor, Tensor]:
        if self.sent.numel() < sent:
            self.sent = torch.empty(sent, dtype=torch.uint8)
        if self.room.numel() < wanted:
            self.room = torch.empty(wanted, dtype=torch.uint8)
        return self.sent[:sent], self.room[:wanted]


def slices_of(
    layout: FragmentLayout, owners: Sequence[int], blocks: Blocks, rank: int, count: int
) -> list[Slice]:
    """What this process does in each exchange of a fragment; as many at all of them."""
    shares = [share_of(layout, owners, each) for each in range(count)]
    largest = max((span.stop - span.start for span in layout.spans), default=1)
    at_once = max(1, SLICE_ELEMENTS // (largest * count))
    mine = [[span.index for span in layout.spans if owners[span.index] == r] for r in range(count)]
    by_chunk = [_by_chunk(pieces) for _, pieces in shares]
    slices = []
    for start in range(0, max(map(len, mine), default=0), at_once):
        parts: list[Part] = []
        own: list[Piece] = []
        gathers = scatters = False
        for owner in range(count):
            for chunk in mine[owner][start : start + at_once]:
                for piece in by_chunk[owner].get(chunk, ()):
                    if owner == rank:
                        own.append(piece)
                    for part in _parts(piece, owner, blocks[piece.name]):
                        gathers |= part.is_source and part.holder != owner
                        scatters |= part.holder != owner
                        if rank in (part.holder, owner):
                            parts.append(part)
        slices.append(Slice(tuple(own), tuple(parts), gathers, scatters))
    return slices


def _by_chunk(pieces: Sequence[Piece]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.chunk, []).append(piece)
    return found


def _parts(piece: Piece, owner: int, blocks: Sequence[Block | None]) -> Iterator[Part]:
    """Who has what of a piece. Of several that have the same, one is its source."""
    holders: dict[Block, list[int]] = {}
    for rank, block in enumerate(blocks):
        if block is not None:
            holders.setdefault(block, []).append(rank)
    for block, found in holders.items():
        first, last = block.before(piece.start), block.before(piece.stop)
        if first < last:
            source = owner if owner in found else found[piece.chunk % len(found)]
            for holder in found:
                yield Part(piece, block, holder, owner, first, last, holder == source)


@dataclass(eq=False)
class Exchange:
    """Carries exchanges out for one process. Collective: all of them do the same slices in order."""

    ranks: Ranks
    buffers: Buffers = field(default_factory=Buffers)

    def gather(self, slice_: Slice, live: Live) -> dict[Piece, Tensor]:
        """The values of the pieces that this process owns, each of one dimension, on the host.

        They may share the memory of the model, and of the buffers: they are good until the next one.
        """
        rank = self.ranks.rank
        values: dict[Piece, Tensor] = {}
        for part in slice_.parts:
            if part.owner == rank == part.holder:
                held = _flat(live[part.piece.name][0])[part.first : part.last]
                if part.is_all and held.device.type == "cpu":
                    values[part.piece] = held
                else:
                    _room_in(values, part.piece)[part.where] = held.cpu()
        if slice_.gathers:
            sends = [p for p in slice_.parts if p.holder == rank != p.owner and p.is_source]
            takes = [p for p in slice_.parts if p.owner == rank != p.holder and p.is_source]
            for part, came in self._move(
                [(p, p.owner, _flat(live[p.piece.name][0])[p.first : p.last]) for p in sends],
                [(p, p.holder, p.piece.dtype) for p in takes],
            ):
                _room_in(values, part.piece)[part.where] = came
        return values

    def scatter(self, slice_: Slice, values: Mapping[Piece, Tensor], live: Live) -> None:
        """Give what this process owns to those who have it in their models, and take what is its own."""
        rank = self.ranks.rank
        for part in slice_.parts:
            if part.owner == rank == part.holder:
                _write(live[part.piece.name], part, values[part.piece][part.where])
        if slice_.scatters:
            sends = [p for p in slice_.parts if p.owner == rank != p.holder]
            takes = [p for p in slice_.parts if p.holder == rank != p.owner]
            for part, came in self._move(
                [(p, p.holder, values[p.piece][p.where]) for p in sends],
                [(p, p.owner, p.piece.dtype) for p in takes],
            ):
                _write(live[part.piece.name], part, came)

    def _move(
        self,
        sends: Sequence[tuple[Part, int, Tensor]],
        takes: Sequence[tuple[Part, int, torch.dtype]],
    ) -> Iterator[tuple[Part, Tensor]]:
        """Send each tensor to a process; returns what came of each part. Both ends have one order."""
        count = self.ranks.count
        sizes, wanted = [0] * count, [0] * count
        for _, to, tensor in sends:
            sizes[to] += _aligned(tensor.numel() * tensor.element_size())
        for part, of, dtype in takes:
            wanted[of] += _aligned((part.last - part.first) * dtype.itemsize)
        sent, room = self.buffers.of(sum(sizes), sum(wanted))
        places = _starts(sizes)
        for _, to, tensor in sends:
            size = tensor.numel() * tensor.element_size()
            sent[places[to] : places[to] + size].view(tensor.dtype).copy_(tensor)
            places[to] += _aligned(size)
        self.ranks.exchange(sent, sizes, room, wanted)
        places = _starts(wanted)
        for part, of, dtype in takes:
            size = (part.last - part.first) * dtype.itemsize
            yield part, room[places[of] : places[of] + size].view(dtype)
            places[of] += _aligned(size)


def _room_in(values: dict[Piece, Tensor], piece: Piece) -> Tensor:
    if piece not in values:
        values[piece] = torch.empty(piece.stop - piece.start, dtype=piece.dtype)
    return values[piece]


def _flat(tensor: Tensor) -> Tensor:
    """The values of a contiguous tensor in one dimension: a view."""
    return tensor.view(-1)


def _write(tensors: Sequence[Tensor], part: Part, values: Tensor) -> None:
    for tensor in tensors:
        _flat(tensor)[part.first : part.last].copy_(values)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:rank]) for rank in range(len(sizes))]
