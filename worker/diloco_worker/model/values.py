"""Which values a model may start a run with, and the constants among its buffers.

A float buffer that holds an infinity when the worker is made (a causal mask) cannot be averaged. It is
a constant of the frozen part, which travels once, as it is. NaN never travels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from diloco_protocol import Kind, UsageError
from diloco_protocol.tensors.codecs import has_nan, is_finite
from diloco_worker.model.model_tensors import ModelTensors


def check_values(tensors: ModelTensors) -> None:
    """Raise UsageError for values that no run can start with: NaN, infinities in values trained or
    averaged, fp64 values beyond the range of fp32.
    """
    for entry, tensor in tensors.live():
        is_wide = tensor.dtype is torch.float64
        if not entry.is_floating_point or is_finite(tensor.float() if is_wide else tensor):
            continue
        if has_nan(tensor):
            raise UsageError(
                f"{entry.name} holds NaN, so no run can start with it; fix the initialisation of the "
                "model, or load another checkpoint."
            )
        if is_finite(tensor):
            raise UsageError(
                f"{entry.name} is {entry.dtype} and holds values beyond the range of fp32, in which "
                "models travel; scale it down."
            )
        if entry.kind is Kind.TRAINABLE:
            raise UsageError(
                f"{entry.name} is trained and holds infinities; fix the initialisation of the model, "
                "or load another checkpoint."
            )
        if entry.kind is Kind.BUFFER:
            raise UsageError(
                f"{entry.name} is a buffer that is averaged, and holds infinities; a constant must hold "
                "them when the DiLoCoWorker is made, or be frozen in the client's manifest."
            )


class Constants:
    """Watches constant buffers: changes of them are not sent."""

    def __init__(self, tensors: ModelTensors) -> None:
        self._tensors = tensors
        self._values = {
            entry.name: tensor.clone()
            for entry, tensor in tensors.live()
            if entry.kind is Kind.FROZEN and entry.is_floating_point and not is_finite(tensor)
        }

    def warnings(self) -> Iterator[str]:
        """A sentence for each one that changed, once."""
        if not self._values:
            return
        for entry, tensor in self._tensors.live():
            before = self._values.get(entry.name)
            if before is not None and not torch.equal(before, tensor):
                del self._values[entry.name]
                yield (
                    f"{entry.name} has changed: it held infinities at the start, so it is a constant "
                    "and is not synchronised. Start with finite values, or make it persistent=False if "
                    "it is this worker's own."
                )
