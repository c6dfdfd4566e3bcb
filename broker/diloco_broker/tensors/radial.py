"""Radial-directional averaging: the mean length times the mean direction of each tensor.

Decoupled DiLoCo (arXiv 2604.21428) merges pushes v_i of weights w_i to

    L phi(U),   L = sum(w_i |v_i|) / sum(w_i),   U = sum(w_i phi(v_i)),   phi(v) = v / |v|, phi(0) = 0

because the pushes of M workers are nearly orthogonal, so their mean is shorter by sqrt(M). It is a
weighted mean in which each push has a factor for each tensor:

    L phi(U) = sum(w_i f_i v_i) / sum(w_i),   f_i = sum(w_j |v_j|) / (|U| |v_i|)

The norms are those of complete tensors: no fragment splits one, the processes of a worker send chunks
of the complete model, and relays pass each push on. Before the first chunk of a tensor is stepped, its
pushes are read twice in the loop's thread, with the memory of two decoded chunks. This takes about as
long as the mean itself.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from diloco_broker.core.effects import WholePush
from diloco_broker.tensors.aggregate import squares_of
from diloco_broker.tensors.robust import Stretches
from diloco_protocol.chunks import (
    ChunkSpan,
    FragmentLayout,
    ModelLayout,
    Overlap,
    Segment,
    overlaps,
)
from diloco_protocol.manifest import TensorEntry

# Words of a parameter's name: `model.embed_tokens.weight`, `transformer.wte.weight`, `tok_emb.weight`.
_EMBEDDING = re.compile(r"embed|(?<![a-z])(?:emb|wte|wpe)(?![a-z])", re.IGNORECASE)
# Shorter vectors count as zero: the square of their length underflows in fp32.
SHORTEST = 1e-15
# If the mean of the unit vectors is shorter, their directions cancel, and it is rounding errors of fp32.
CANCELLED = 1e-6


def is_averaged_plainly(entry: TensorEntry) -> bool:
    """Whether a tensor takes the plain weighted mean: embeddings, vectors and scalars.

    Pushes of an embedding are not nearly orthogonal: each moves the rows of the tokens that it has seen,
    and frequent tokens are the same for all workers. Its name identifies it, because an output layer has
    the same shape; a tied output layer has both names.
    """
    names = (entry.name, *entry.aliases)
    return len(entry.shape) < 2 or any(map(_EMBEDDING.search, names))


def factors_of(weights: Sequence[float], norms: Sequence[float], resultant: float) -> list[float]:
    """f_i of each push, from the w_i, |v_i| and |U|."""
    if resultant <= CANCELLED * sum(weights):
        return [0.0] * len(norms)
    length = sum(weight * norm for weight, norm in zip(weights, norms, strict=True))
    return [length / (resultant * norm) if norm > SHORTEST else 0.0 for norm in norms]


class Radial:
    """Computes the factors of pushes, for each tensor once a version.

    Args:
        decode: decodes a chunk in wire form; its result is valid until the next call.
    """

    def __init__(
        self, layout: ModelLayout, decode: Callable[[ChunkSpan, Any, str], Tensor]
    ) -> None:
        self._fragments = [_Fragment(each) for each in layout.fragments]
        self._decode = decode

    def stretches(
        self, fragment: int, index: int, pushes: Sequence[WholePush], count: int
    ) -> Stretches:
        """The factors in a chunk, for the pushes of a version that `count` gradients precede.

        Empty, for the plain mean, if there is one push, or the chunk has no parameters. A tensor also
        takes the plain mean if a push lacks one of its chunks: after a restart, a broker that counted
        single chunks before it has a part of a push in an earlier version.
        """
        known, pieces = self._fragments[fragment], self._fragments[fragment].overlaps[index]
        is_shared = len(pushes) > 1 and all(each.payloads[index] is not None for each in pushes)
        if not (pieces and is_shared):
            return ()
        version = (count, tuple((each.worker_id, each.push_id) for each in pushes))
        if version != known.version:
            known.version, known.factors = version, {}
        unknown = {each.place for each in pieces} - known.factors.keys()
        if unknown:
            known.factors |= self._factors(known, unknown, pushes)
        return [(each.in_chunk, known.factors[each.place]) for each in pieces]

    def _factors(
        self, known: _Fragment, places: set[int], pushes: Sequence[WholePush]
    ) -> dict[int, list[float]]:
        weights = [each.weight for each in pushes]
        found = dict.fromkeys(places, [1.0] * len(pushes))
        places = {
            place
            for place in places - known.plain
            if all(each.payloads[i] is not None for i in known.chunks[place] for each in pushes)
        }
        squares = {place: [0.0] * len(pushes) for place in places}
        for _, pieces, chunks in self._read(known, places, pushes):
            for number, chunk in enumerate(chunks):
                for each in pieces:
                    squares[each.place][number] += squares_of(chunk[each.in_chunk]) or 0.0
        norms = {place: list(map(math.sqrt, of)) for place, of in squares.items()}
        resultants = dict.fromkeys(places, 0.0)  # |U|, squared
        for span, pieces, chunks in self._read(known, places, pushes):
            total = torch.zeros(span.elements)
            for number, chunk in enumerate(chunks):
                for each in pieces:
                    if (norm := norms[each.place][number]) > SHORTEST:
                        part = chunk[each.in_chunk]
                        total[each.in_chunk].add_(part, alpha=weights[number] / norm)
            for each in pieces:
                resultants[each.place] += squares_of(total[each.in_chunk]) or 0.0
        for place in places:
            found[place] = factors_of(weights, norms[place], math.sqrt(resultants[place]))
        return found

    def _read(
        self, known: _Fragment, places: Set[int], pushes: Sequence[WholePush]
    ) -> Iterator[tuple[ChunkSpan, list[Overlap], Iterator[Tensor]]]:
        """Each chunk of these tensors, its overlaps with them, and its values in each push."""
        for index in sorted({index for place in places for index in known.chunks[place]}):
            span = known.layout.spans[index]
            pieces = [each for each in known.overlaps[index] if each.place in places]
            payloads = ((each.payloads[index], each.wire_dtype) for each in pushes)
            yield span, pieces, (self._decode(span, *each) for each in payloads)


class _Fragment:
    """Where the tensors of a fragment are, and their factors in the newest version."""

    def __init__(self, layout: FragmentLayout) -> None:
        self.layout = layout
        places = [each for each in layout.places if each.segment is Segment.PARAMETERS]
        self.plain = {n for n, each in enumerate(places) if is_averaged_plainly(each.entry)}
        self.overlaps = [list(overlaps(places, span)) for span in layout.spans]
        self.chunks: dict[int, list[int]] = defaultdict(list)  # by place
        for span, pieces in zip(layout.spans, self.overlaps, strict=True):
            for each in pieces:
                self.chunks[each.place].append(span.index)
        self.version: object = None
        self.factors: dict[int, list[float]] = {}  # by place
