"""What a version of the model's own frozen parameters is called, so that nobody fetches what it has.

Read in pieces of a chunk, by several threads: half a second for 100 million parameters on one core. No
copy of the model is made, but of tensors that are not contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from diloco_protocol.chunks import ChunkSpan, FragmentLayout
from diloco_protocol.tensors.codecs import as_bytes, segment_dtype
from diloco_protocol.version import digest_of, tag_of
from diloco_worker.model.model_tensors import ModelTensors


def frozen_tag(tensors: ModelTensors, layout: FragmentLayout) -> int:
    """The tag that a version of these values has: see `diloco_protocol.version`.

    Raises UsageError when the model has not the tensors of the layout any more.
    """
    asked = {place.entry.name for place in layout.places}
    live = {entry.name: each.reshape(-1) for entry, each in tensors.live() if entry.name in asked}
    with ThreadPoolExecutor() as pool:
        return tag_of(pool.map(partial(_digest, live, layout), layout.spans))


def _digest(live: dict[str, Tensor], layout: FragmentLayout, span: ChunkSpan) -> bytes:
    return digest_of(as_bytes(piece) for piece in _pieces(live, layout, span))


def _pieces(live: dict[str, Tensor], layout: FragmentLayout, span: ChunkSpan) -> Iterator[Tensor]:
    """The values of a chunk as they travel, tensor by tensor."""
    for place in layout.places:
        start, stop = max(place.start, span.start), min(place.stop, span.stop)
        if place.segment is span.segment and start < stop:
            flat = live[place.entry.name][start - place.start : stop - place.start]
            yield flat.to("cpu", segment_dtype(span.segment)).contiguous()
