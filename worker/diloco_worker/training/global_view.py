"""The global parameters in the model for a while: evaluated without a message, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from diloco_protocol import Kind
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors


@contextmanager
def in_the_model(tensors: ModelTensors, states: Sequence[FlatState]) -> Iterator[None]:
    """These values are in the model as long as this lasts; then it is bit for bit what it was.

    Costs a copy of what is trained, on its device.
    """
    tensors.begin_view()
    local = {
        entry.name: tensor.clone()
        for entry, tensor in tensors.live()
        if entry.kind is not Kind.FROZEN
    }
    try:
        for state in states:
            tensors.put(state)
        yield
    finally:
        with torch.no_grad():
            for entry, tensor in tensors.live():
                if entry.name in local:
                    tensor.copy_(local[entry.name])
