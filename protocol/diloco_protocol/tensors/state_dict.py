"""Converts between the chunks of a model and its state dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diloco_protocol.chunks import ChunkSpan, FragmentLayout, ModelLayout, Segment, overlaps
from diloco_protocol.tensors.codecs import segment_dtype


def assemble(layout: ModelLayout, chunks: Mapping[int, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Tensors by name, in the model's shapes and dtypes; tied tensors appear under all their names.

    `chunks` has the chunks (fp32 and int64) of each fragment with elements, by its number.
    """
    model: dict[str, Tensor] = {}
    for part in layout.all:
        if not part.chunks:
            continue
        flat = _segments(part, chunks[part.fragment])
        for place in part.places:
            entry = place.entry
            values = flat[place.segment][place.start : place.stop].reshape(entry.shape)
            for name in (entry.name, *entry.aliases):
                model[name] = values.to(getattr(torch, entry.dtype), copy=True)
    return model


def _segments(part: FragmentLayout, chunks: Sequence[Tensor]) -> dict[Segment, Tensor]:
    pieces: dict[Segment, list[Tensor]] = {}
    for span in part.spans:
        pieces.setdefault(span.segment, []).append(chunks[span.index])
    flat = {segment: torch.cat(found) for segment, found in pieces.items()}
    for segment, length in part.lengths.items():  # tensors without elements are in no chunk
        if not length:
            flat[segment] = torch.empty(0, dtype=segment_dtype(segment))
    return flat


def cut_chunk(
    model: Mapping[str, Tensor], part: FragmentLayout, span: ChunkSpan, into: Tensor
) -> None:
    """Copy one chunk of a state dict into a 1-D tensor of its length, fp32 or int64."""
    for each in overlaps(part.places, span):
        entry = part.places[each.place].entry
        tensor = next(model[name] for name in (entry.name, *entry.aliases) if name in model)
        into[each.in_chunk].copy_(tensor.reshape(-1)[each.in_tensor])
