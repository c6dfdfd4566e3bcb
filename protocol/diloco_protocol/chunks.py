"""How a model is cut for the wire: fragments, segments, the flat vector, chunks.

The tensors of a fragment are laid end to end, in the manifest's order, in up to three flat vectors
called segments, since they follow different rules:

    parameters   trainable parameters; averaged pseudo-gradient, outer optimizer; wire dtype by choice
    buffers      float buffers (BatchNorm statistics); averaged as they are; always fp32 on the wire
    integers     integer and boolean buffers; element-wise maximum; always int64 on the wire

Each segment is cut every `CHUNK_ELEMENTS` elements, and the chunks of a fragment are numbered through
its segments in that order. Frozen parameters make one more fragment, numbered after the others, that
is never trained: it travels once, when a worker joins, with floats as `buffers` and the rest as
`integers`. Constants with infinities belong to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from diloco_protocol.manifest import Kind, Manifest, TensorEntry

# Elements of a chunk: 1 MiB in bf16, 2 MiB in fp32. At 1 MiB and a window of 4 to 16, ZeroMQ moves
# about as much as a raw TCP connection; at 256 KiB two thirds of it.
CHUNK_ELEMENTS = 524_288
# Chunks of a model, of each of which both ends keep books: more than any model has at the usual size.
# Bounds the cost of chunk sizes that a peer chooses.
MOST_CHUNKS = 1_000_000


class Segment(str, Enum):
    """One of the flat vectors of a fragment; see the head of this module."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    INTEGERS = "integers"


@dataclass(frozen=True)
class Place:
    """Where one tensor lies: elements [start, stop) of its segment's flat vector."""

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
class FragmentLayout:
    """The tensors of one fragment in their flat vectors, and the chunks these are cut into."""

    fragment: int
    places: tuple[Place, ...]
    spans: tuple[ChunkSpan, ...]
    lengths: Mapping[Segment, int]

    @property
    def chunks(self) -> int:
        """Number of chunks; 0 for a fragment without elements."""
        return len(self.spans)

    def names_in(self, index: int) -> list[str]:
        """Names of the tensors that a chunk has elements of."""
        span = self.spans[index]
        return [
            place.entry.name
            for place in self.places
            if place.segment is span.segment
            and max(place.start, span.start) < min(place.stop, span.stop)
        ]


@dataclass(frozen=True)
class ModelLayout:
    """The whole model: P fragments that are trained in turn, then the frozen one."""

    fragments: tuple[FragmentLayout, ...]  # 0 .. P - 1
    frozen: FragmentLayout  # fragment P; it may be empty

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

    `fragment_of` has trainable parameters by name; fragment 0 where it is silent. Buffers belong to the
    last of P fragments, so that they travel once in P rounds.
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
    """Cut a model by a plan as it travels: the fragment of each manifest entry, empty where P is 1.

    The numbers must fit the model, as `FragmentPlan.from_numbers` makes sure.
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
    """The chunks of a fragment with these numbers of elements in its segments."""
    spans: list[ChunkSpan] = []
    for segment in Segment:
        for start in range(0, lengths[segment], chunk_elements):
            stop = min(start + chunk_elements, lengths[segment])
            spans.append(ChunkSpan(len(spans), segment, start, stop))
    return tuple(spans)
