"""The layout of a model on the wire: fragments, segments (flat vectors), chunks.

The tensors of a fragment are concatenated, in the manifest's order, to up to three flat vectors called
segments, which follow different rules:

    parameters   trainable parameters; averaged pseudo-gradient, outer optimizer; wire dtype by choice
    buffers      float buffers (BatchNorm statistics); averaged as they are; always fp32 on the wire
    integers     integer and boolean buffers; element-wise maximum; always int64 on the wire

Each segment is cut every `CHUNK_ELEMENTS` elements, and the chunks of a fragment are numbered through
its segments in that order. Frozen parameters form one more fragment, numbered after the others, which
is never trained: it is sent once, when a worker joins, with floats as `buffers` and other values as
`integers`. It includes constants with infinities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from diloco_protocol.manifest import Kind, Manifest, TensorEntry

# Elements of a chunk: 1 MiB in bf16, 2 MiB in fp32. At 1 MiB and a window of 4 to 16, ZeroMQ is about as
# fast as a raw TCP connection; at 256 KiB it has two thirds of the throughput.
CHUNK_ELEMENTS = 524_288
# Limit of the chunks of a model, for each of which both ends keep state. No model has this many at the
# default size; the limit matters if a peer chooses a smaller size.
MOST_CHUNKS = 1_000_000


class Segment(str, Enum):
    """The kinds of flat vectors of a fragment; the module docstring has their rules."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    INTEGERS = "integers"


@dataclass(frozen=True)
class Place:
    """The position of a tensor: elements [start, stop) of its segment's flat vector."""

    entry: TensorEntry
    segment: Segment
    start: int
    stop: int


@dataclass(frozen=True)
class ChunkSpan:
    """One chunk: elements [start, stop) of a segment's flat vector."""

    index: int
    segment: Segment
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Overlap:
    """The elements that a chunk shares with a tensor, as slices of either."""

    place: int  # the tensor's number
    in_tensor: slice
    in_chunk: slice


def overlaps(places: Sequence[Place], span: ChunkSpan) -> Iterator[Overlap]:
    """The overlaps of a chunk with these tensors, which are numbered in this order."""
    for number, place in enumerate(places):
        start, stop = max(place.start, span.start), min(place.stop, span.stop)
        if place.segment is span.segment and start < stop:
            yield Overlap(
                number,
                slice(start - place.start, stop - place.start),
                slice(start - span.start, stop - span.start),
            )


@dataclass(frozen=True)
class FragmentLayout:
    """The positions of a fragment's tensors in its flat vectors, and the chunks of these."""

    fragment: int
    places: tuple[Place, ...]
    spans: tuple[ChunkSpan, ...]
    lengths: Mapping[Segment, int]

    @property
    def chunks(self) -> int:
        """Number of chunks; 0 for a fragment without elements."""
        return len(self.spans)

    def names_in(self, index: int) -> list[str]:
        """Names of the tensors that have elements in a chunk."""
        found = overlaps(self.places, self.spans[index])
        return [self.places[each.place].entry.name for each in found]


@dataclass(frozen=True)
class ModelLayout:
    """The layout of a model: P fragments that are trained in turn, then the frozen one."""

    fragments: tuple[FragmentLayout, ...]  # 0 .. P - 1
    frozen: FragmentLayout  # fragment P; may be empty

    @property
    def all(self) -> tuple[FragmentLayout, ...]:
        return (*self.fragments, self.frozen)


def lay_out(
    manifest: Manifest,
    fragment_of: Mapping[str, int] | None = None,
    *,
    num_fragments: int = 1,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> ModelLayout:
    """Cut a model into fragments, segments and chunks; both ends must use the same `chunk_elements`.

    `fragment_of` maps names of trainable parameters to fragments, by default to 0. Buffers belong to the
    last of P fragments, so they are sent once in P rounds.
    """
    fragment_of = fragment_of or {}
    members: list[list[TensorEntry]] = [[] for _ in range(num_fragments + 1)]
    for entry in manifest.entries:
        match entry.kind:
            case Kind.TRAINABLE:
                members[fragment_of.get(entry.name, 0)].append(entry)
            case Kind.BUFFER:
                members[num_fragments - 1].append(entry)
            case Kind.FROZEN:
                members[num_fragments].append(entry)
    layouts = [_fragment(index, entries, chunk_elements) for index, entries in enumerate(members)]
    return ModelLayout(tuple(layouts[:-1]), layouts[-1])


def lay_out_plan(
    manifest: Manifest, plan: Sequence[int], *, num_fragments: int, chunk_elements: int
) -> ModelLayout:
    """Cut a model by a plan in wire form: the fragment of each manifest entry, empty if P is 1.

    The numbers must fit the model, as checked by `FragmentPlan.from_numbers`.
    """
    names = (entry.name for entry in manifest.entries)
    fragment_of = dict(zip(names, plan, strict=True)) if plan else None
    return lay_out(
        manifest, fragment_of, num_fragments=num_fragments, chunk_elements=chunk_elements
    )


def _segment_of(entry: TensorEntry) -> Segment:
    if entry.kind is Kind.TRAINABLE:
        return Segment.PARAMETERS
    return Segment.BUFFERS if entry.is_floating_point else Segment.INTEGERS


def _fragment(fragment: int, entries: list[TensorEntry], chunk_elements: int) -> FragmentLayout:
    lengths = dict.fromkeys(Segment, 0)
    places = []
    for entry in entries:
        segment = _segment_of(entry)
        start = lengths[segment]
        lengths[segment] = start + entry.elements
        places.append(Place(entry, segment, start, lengths[segment]))
    return FragmentLayout(fragment, tuple(places), cut(lengths, chunk_elements), lengths)


def cut(lengths: Mapping[Segment, int], chunk_elements: int) -> tuple[ChunkSpan, ...]:
    """The chunks of a fragment whose segments have these lengths, in elements."""
    spans: list[ChunkSpan] = []
    for segment in Segment:
        for start in range(0, lengths[segment], chunk_elements):
            stop = min(start + chunk_elements, lengths[segment])
            spans.append(ChunkSpan(len(spans), segment, start, stop))
    return tuple(spans)
