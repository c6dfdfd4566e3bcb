"""The chunks that each process of a worker owns, as a separate layout. Pure.

A process sends and receives the chunks that it owns, and keeps vectors of nothing else. It owns chunks
of which it has most, so that little is exchanged within the worker, and no more than an even part of
all.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from diloco_protocol import Kind, Segment
from diloco_protocol.chunks import ChunkSpan, FragmentLayout, Place
from diloco_worker.model.spread.blocks import Block

_PIECE = re.compile(r"\[\d+:\d+\]$")

Blocks = Mapping[str, Sequence[Block | None]]  # by name, what each process has of a tensor


@dataclass(frozen=True)
class Piece:
    """The part of a tensor in a chunk: its flat elements [start, stop)."""

    name: str
    start: int
    stop: int
    chunk: int
    place: Place = field(compare=False)  # in the share of the chunk's owner

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's tensor."""
        found = getattr(torch, self.place.entry.dtype)
        assert isinstance(found, torch.dtype)
        return found


def owners_of(layout: FragmentLayout, blocks: Blocks, count: int) -> tuple[int, ...]:
    """The process that owns each chunk of a fragment.

    Averaged buffers have their values of the first process that has most of a chunk: where each has its
    own, as in BatchNorm, those are the worker's. They are small.
    """
    held = _held(layout, blocks, count)
    is_frozen = any(place.entry.kind is Kind.FROZEN for place in layout.places)
    chunks = [s.index for s in layout.spans if is_frozen or s.segment is Segment.PARAMETERS]
    spread = frozenset(chunks)
    owners = [0] * layout.chunks
    room = [-(-len(chunks) // count)] * count
    # Chunks of which one process has much more than others come first; of equals in order.
    for position, index in sorted(
        enumerate(chunks), key=lambda each: (-_lead(held[each[1]]), each[1])
    ):
        even = position * count // len(chunks)
        best = max(
            (rank for rank in range(count) if room[rank]),
            key=lambda rank: (held[index][rank], rank == even, room[rank], -rank),
        )
        owners[index] = best
        room[best] -= 1
    for span in layout.spans:
        if span.index not in spread:
            most = max(held[span.index])
            owners[span.index] = held[span.index].index(most)
    return tuple(owners)


def _lead(held: Sequence[int]) -> int:
    """How much more the first has than the next."""
    ordered = sorted(held, reverse=True)
    return ordered[0] - ordered[1] if len(ordered) > 1 else 0


def _held(layout: FragmentLayout, blocks: Blocks, count: int) -> list[list[int]]:
    """Of each chunk, how many elements each process has."""
    held = [[0] * count for _ in layout.spans]
    for span, place, low, high in overlaps(layout):
        for rank, block in enumerate(blocks[place.entry.name]):
            if block is not None:
                held[span.index][rank] += block.before(high) - block.before(low)
    return held


def piece_name(name: str, start: int, stop: int) -> str:
    """The name of the elements [start, stop) of a tensor."""
    return f"{name}[{start}:{stop}]"


def tensor_name(piece: str) -> str:
    """The tensor of a piece with this name; other names as they are."""
    return _PIECE.sub("", piece)


def overlaps(layout: FragmentLayout) -> Iterator[tuple[ChunkSpan, Place, int, int]]:
    """The tensors in each chunk, in order: the elements [low, high) of the tensor."""
    for segment in Segment:
        places = deque(p for p in layout.places if p.segment is segment and p.start < p.stop)
        for span in layout.spans:
            if span.segment is not segment:
                continue
            while places and places[0].stop <= span.start:
                places.popleft()
            for place in places:
                if place.start >= span.stop:
                    break
                start, stop = max(place.start, span.start), min(place.stop, span.stop)
                yield span, place, start - place.start, stop - place.start


def share_of(
    layout: FragmentLayout, owners: Sequence[int], rank: int
) -> tuple[FragmentLayout, tuple[Piece, ...]]:
    """The chunks of one process as a separate layout, and the pieces of tensors in them.

    Spans are numbered from 0. A place is a one-dimensional piece, named NAME[start:stop].
    """
    lengths = dict.fromkeys(Segment, 0)
    spans: list[ChunkSpan] = []
    pieces: list[Piece] = []
    bases: dict[int, int] = {}
    for span in layout.spans:
        if owners[span.index] == rank:
            base = bases[span.index] = lengths[span.segment]
            spans.append(ChunkSpan(len(spans), span.segment, base, base + span.elements))
            lengths[span.segment] = base + span.elements
    for span, place, low, high in overlaps(layout):
        if owners[span.index] == rank:
            entry = replace(
                place.entry,
                name=piece_name(place.entry.name, low, high),
                shape=(high - low,),
                aliases=(),
            )
            at = bases[span.index] + place.start + low - span.start
            made = Place(entry, span.segment, at, at + high - low)
            pieces.append(Piece(place.entry.name, low, high, span.index, made))
    places = tuple(piece.place for piece in pieces)
    return FragmentLayout(layout.fragment, places, tuple(spans), lengths), tuple(pieces)
