"""A small model in chunks, and the outer steps of a broker on it, without core, loop or sockets."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco_broker.core.effects import WholePush
from diloco_broker.core.events import Stepped
from diloco_broker.tensors.outer.make import Outer
from diloco_broker.tensors.parameters import FragmentTensors, Parameters
from diloco_protocol.chunks import ChunkSpan, Segment, lay_out
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.tensors.codecs import as_bytes, segment_dtype

MANIFEST = Manifest(
    (
        TensorEntry("embedding", (3, 5), "float32", Kind.TRAINABLE, ("tied",)),
        TensorEntry("layer", (2, 3, 2), "bfloat16", Kind.TRAINABLE),
        TensorEntry("gain", (), "float32", Kind.TRAINABLE),
        TensorEntry("mean", (6,), "float32", Kind.BUFFER),
        TensorEntry("bias", (4,), "bfloat16", Kind.TRAINABLE),
        TensorEntry("head", (7,), "float32", Kind.TRAINABLE),
        TensorEntry("count", (2,), "int64", Kind.BUFFER),
    )
)
FRAGMENT_OF = {"embedding": 0, "bias": 0, "layer": 1, "gain": 1, "head": 1}


def wire(values: Tensor, dtype: torch.dtype = torch.float32) -> bytearray:
    """What arrives: bytes of its own, as a received frame has."""
    return bytearray(as_bytes(values.to(dtype).contiguous()))


def read(chunk: memoryview, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.frombuffer(bytearray(chunk), dtype=dtype)


def fold(
    tensors: Parameters, fragment: int, index: int, payload: Any, weight: float
) -> float | None:
    """Add a chunk, and add up what is held too long by then, as the loop does."""
    squares = tensors.fold(fragment, index, payload, weight)()
    for _, _, adding_up in tensors.overdue():
        adding_up()
    return squares


def a_part(payload: Any, **fields: Any) -> WholePush:
    defaults: dict[str, Any] = {"weight": 1.0, "scale": 1.0, "norm": 1.0, "wire_dtype": "fp32"}
    return WholePush("a", 1, payloads=[payload] * 64, **(defaults | fields))


class ChunkedModel:
    """Parameters that start from random values, stepped with gradients of whole fragments.

    Attributes:
        tensors: the broker's.
        start: first values of each fragment's parameters, flat, fp32.
    """

    def __init__(
        self,
        outer: Outer,
        *,
        fragments: int = 1,
        chunk_elements: int = 4,
        reply: str = "fp32",
        **options: Any,
    ) -> None:
        plan = {name: number % fragments for name, number in FRAGMENT_OF.items()}
        self.layout = lay_out(
            MANIFEST, plan, num_fragments=fragments, chunk_elements=chunk_elements
        )
        self.reply = reply
        self.tensors = Parameters(self.layout, outer, wire="fp32", reply=reply, **options)
        self.start = [torch.randn(self.elements(p)) for p in range(fragments)]
        self.counts = [0] * fragments
        self.handed_out: list[memoryview] = []
        for fragment, values in enumerate(self.start):
            self.place(fragment, values)

    def elements(self, fragment: int) -> int:
        return self.layout.fragments[fragment].lengths[Segment.PARAMETERS]

    def spans(self, fragment: int) -> list[ChunkSpan]:
        """The chunks of parameters."""
        spans = self.layout.fragments[fragment].spans
        return [span for span in spans if span.segment is Segment.PARAMETERS]

    def place(self, fragment: int, values: Tensor) -> None:
        """A seeding: these parameters, zeros for the rest."""
        for span in self.layout.fragments[fragment].spans:
            dtype = segment_dtype(span.segment)
            part = torch.zeros(span.elements, dtype=dtype)
            if span.segment is Segment.PARAMETERS:
                part = values[span.start : span.stop]
            chunk = self.tensors.place(fragment, span.index, wire(part, dtype))
            assert chunk is not None
            self.handed_out.append(chunk)

    def merges(
        self,
        *gradients: Tensor | None,
        fragment: int = 0,
        lacks: Sequence[int] = (),
        count: int | None = None,
    ) -> list[Stepped]:
        """A group of one submission for each gradient; none of them has the chunks in `lacks`.

        A gradient that is None is a group without parts.
        """
        turn = self.counts[fragment] if count is None else count
        done = []
        for span in self.spans(fragment):
            groups = tuple(
                (a_part(wire(gradient[span.start : span.stop])),)
                if gradient is not None and span.index not in lacks
                else ()
                for gradient in gradients
            )
            done += self.tensors.merge(fragment, span.index, groups, turn)()
        return self._took(fragment, done, len(gradients) if count is None else 0)

    def steps(self, gradient: Tensor, fragment: int = 0) -> list[Stepped]:
        """The same by streaming."""
        done = []
        for span in self.spans(fragment):
            payload = wire(gradient[span.start : span.stop], segment_dtype(span.segment, "fp32"))
            assert fold(self.tensors, fragment, span.index, payload, 1.0) is not None
            done += self.tensors.step(fragment, span.index, 1.0, self.counts[fragment])()
        return self._took(fragment, done, 1)

    def _took(self, fragment: int, done: list[Stepped], turns: int) -> list[Stepped]:
        self.counts[fragment] += turns
        indices = [span.index for span in self.spans(fragment)]
        assert sorted(one.index for one in done) == indices, "one answer for each chunk"
        self.handed_out += [one.wire for one in done]
        return done

    def theta(self, fragment: int = 0) -> Tensor:
        """All parameters of a fragment as they were last handed out, flat."""
        chunks = self.tensors.fragment_tensors(fragment).chunks
        return torch.cat([chunks[span.index] for span in self.spans(fragment)])

    def named(self, fragment: int, flat: Tensor) -> dict[str, Tensor]:
        """The flat parameters of a fragment as tensors by name, in the manifest's order."""
        found, start = {}, 0
        for entry in MANIFEST.entries:
            number = FRAGMENT_OF.get(entry.name)
            if number is not None and number % len(self.start) == fragment:
                stop = start + entry.elements
                found[entry.name] = flat[start:stop].reshape(entry.shape).clone()
                start = stop
        assert start == flat.numel()
        return found

    def memory(self, fragment: int = 0) -> FragmentTensors:
        """A deep copy of everything that a step may change."""
        return copy.deepcopy(self.tensors.fragment_tensors(fragment))


def same(one: Any, other: Any) -> bool:
    """Whether two nests of lists, dicts, records and tensors are equal, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, FragmentTensors):
        return same(vars(one), vars(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
