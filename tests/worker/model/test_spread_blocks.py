"""Blocks of tensors in processes, and the owners of chunks: pure, for arbitrary shapes."""

import math
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import Kind, Manifest, ModelLayout, Segment, TensorEntry, lay_out
from diloco_worker.model.spread.blocks import Block
from diloco_worker.model.spread.shares import Piece, owners_of, share_of
from diloco_worker.model.spread.slices import SLICE_ELEMENTS, slices_of

TRAINABLE, BUFFER, FROZEN = Kind.TRAINABLE, Kind.BUFFER, Kind.FROZEN


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """A rectangle of a tensor; any of its sizes may be 0."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    offset = [draw(st.integers(0, size)) for size in shape]
    size = [draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)]
    return Block(tuple(shape), tuple(offset), tuple(size))


def inside(block: Block) -> list[int]:
    """The flat indices of its elements in the whole tensor."""
    whole = torch.arange(math.prod(block.shape)).view(block.shape)
    ranges = [slice(o, o + n) for o, n in zip(block.offset, block.size, strict=True)]
    return [int(each) for each in whole[tuple(ranges)].reshape(-1)]


@given(blocks(), st.data())
def test_elements_before_an_index_are_counted(block: Block, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, math.prod(block.shape)))
    assert block.before(index) == sum(each < index for each in inside(block))


@given(blocks(), st.data())
def test_elements_of_a_range_are_a_range_of_the_block(block: Block, data: st.DataObject) -> None:
    total = math.prod(block.shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    first, last = block.before(start), block.before(stop)
    expected = [each - start for each in inside(block) if start <= each < stop]
    if first < last:
        where = block.indices(first, last, start)
        assert torch.arange(total)[where].tolist() == expected
    else:
        assert not expected


def halves(rows: int, columns: int, count: int) -> list[Block | None]:
    """Rows sharded as by FSDP2: the last processes have fewer or none."""
    each = -(-rows // count)
    starts = [min(rank * each, rows) for rank in range(count)]
    return [
        Block((rows, columns), (start, 0), (min(each, rows - start), columns)) for start in starts
    ]


def copies(shape: tuple[int, ...], count: int) -> list[Block | None]:
    return [Block.whole(shape)] * count


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelLayout, dict[str, list[Block | None]], int]:
    """Tensors that are sharded by rows, copied, or in one process alone."""
    count = draw(st.integers(1, 5))
    entries, held = [], {}
    for number in range(draw(st.integers(1, 6))):
        shape = (draw(st.integers(0, 9)), draw(st.integers(1, 6)))
        kind = draw(st.sampled_from([TRAINABLE, TRAINABLE, BUFFER, FROZEN]))
        name = f"t{number}"
        entries.append(TensorEntry(name, shape, "float32", kind))
        match draw(st.integers(0, 2)):
            case 0:
                held[name] = halves(*shape, count)
            case 1:
                held[name] = copies(shape, count)
            case _:
                alone = draw(st.integers(0, count - 1))
                held[name] = [
                    Block.whole(shape) if rank == alone else None for rank in range(count)
                ]
    layout = lay_out(Manifest(tuple(entries)), chunk_elements=draw(st.integers(1, 20)))
    return layout, held, count


Model = tuple[ModelLayout, dict[str, list[Block | None]], int]


@given(models())
def test_shares_are_even_and_have_all_elements_once(model: Model) -> None:
    layout, held, count = model
    for part in layout.all:
        owners = owners_of(part, held, count)
        is_dealt = part is layout.frozen
        dealt = [
            owner
            for owner, span in zip(owners, part.spans, strict=True)
            if is_dealt or span.segment is Segment.PARAMETERS
        ]
        assert all(dealt.count(rank) <= -(-len(dealt) // count) for rank in range(count))
        seen: dict[str, list[int]] = {}
        for rank in range(count):
            share, pieces = share_of(part, owners, rank)
            own = [s.elements for s, o in zip(part.spans, owners, strict=True) if o == rank]
            assert [span.elements for span in share.spans] == own
            for segment in Segment:
                places = sorted((p.start, p.stop) for p in share.places if p.segment is segment)
                stops = [0, *(stop for _, stop in places)]
                assert [start for start, _ in places] == stops[:-1]
                assert stops[-1] == share.lengths[segment]
            for piece in pieces:
                seen.setdefault(piece.name, []).extend(range(piece.start, piece.stop))
        for place in part.places:
            assert sorted(seen.get(place.entry.name, [])) == list(range(place.entry.elements))


@given(models())
def test_processes_agree_on_what_is_exchanged(model: Model) -> None:
    layout, held, count = model
    for part in layout.all:
        owners = owners_of(part, held, count)
        of_each = [slices_of(part, owners, held, rank, count) for rank in range(count)]
        for slices in zip(*of_each, strict=True):
            assert len({(each.gathers, each.scatters) for each in slices}) == 1
            for one, other in product(slices, repeat=2):
                for way in ("gathered", "scattered"):
                    sent = [p for p in getattr(one, way)[0] if p.other(one.rank) == other.rank]
                    taken = [p for p in getattr(other, way)[1] if p.other(other.rank) == one.rank]
                    assert sent == taken
                    assert not sent or (one.gathers if way == "gathered" else one.scatters)


def test_one_exchange_is_bounded_however_many_processes_there_are() -> None:
    shape = (3, SLICE_ELEMENTS)
    entry = TensorEntry("w", shape, "float32", TRAINABLE)
    layout = lay_out(Manifest((entry,))).fragments[0]
    for count in (1, 2, 8, 64):
        held = {"w": copies(shape, count)}
        owners = owners_of(layout, held, count)
        for rank in {0, count - 1}:
            seen: list[Piece] = []
            for slice_ in slices_of(layout, owners, held, rank, count):
                for moved in (*slice_.gathered, *slice_.scattered):
                    assert sum(part.bytes for part in moved) <= 4 * SLICE_ELEMENTS
                seen += slice_.pieces
            assert sum(p.stop - p.start for p in seen) == sum(
                s.elements for s, o in zip(layout.spans, owners, strict=True) if o == rank
            )
