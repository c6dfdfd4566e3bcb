"""The name of a model's own frozen values: the same however they lie, and each copied once at most."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from diloco_protocol import lay_out
from diloco_worker.model.checksums import frozen_tag
from diloco_worker.model.model_tensors import ModelTensors


class Frozen(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.adapter = nn.Parameter(torch.zeros(2))
        self.base = nn.Parameter(values, requires_grad=False)


class Noted:
    """The tensors of a model; says how often each was laid out flat, which copies one with gaps."""

    def __init__(self, tensors: ModelTensors) -> None:
        self.tensors, self.flattened = tensors, 0

    def live(self) -> Any:
        return ((entry, self.Each(self, tensor)) for entry, tensor in self.tensors.live())

    class Each:
        def __init__(self, noted: Noted, tensor: Tensor) -> None:
            self.noted, self.tensor = noted, tensor

        def reshape(self, *shape: int) -> Tensor:
            self.noted.flattened += 1
            return self.tensor.reshape(*shape)


def test_tensor_with_gaps_has_the_same_tag_and_is_laid_out_once() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    tags = []
    for each in (values, values.t().contiguous().t()):
        tensors = ModelTensors.of_module(Frozen(each))
        noted = Noted(tensors)
        layout = lay_out(tensors.manifest, chunk_elements=1).frozen
        assert layout.chunks == 12
        tags.append(frozen_tag(cast(ModelTensors, noted), layout))
        assert noted.flattened == 1
    assert tags[0] == tags[1]
