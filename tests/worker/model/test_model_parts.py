"""A model in several modules is the same model: names, ties, buffers, values."""

import pytest
import torch
from torch import nn

from diloco_protocol import UsageError
from diloco_worker.model.model_manifest import live_tensors, manifest_of, unwrapped
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.wrappers import ModelParts


class Model(nn.Module):
    """Layers by name, as in pipelines; each stage has its own table."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layers = nn.ModuleDict({"0": nn.BatchNorm1d(3), "1": nn.BatchNorm1d(3)})
        self.output = nn.Linear(3, 5, bias=False)
        if tied:
            self.output.weight = self.embedding.weight
        self.register_buffer("table", torch.zeros(2), persistent=False)


def stages(whole: Model) -> list[nn.Module]:
    """The stages of a pipeline: some of the layers each, under the names of the complete model."""
    first, second = nn.Module(), nn.Module()
    first.embedding = whole.embedding
    first.layers = nn.ModuleDict({"0": whole.layers["0"]})
    second.layers = nn.ModuleDict({"1": whole.layers["1"]})
    second.output = whole.output
    for stage in (first, second):
        stage.register_buffer("table", torch.zeros(2), persistent=False)
    return [first, second]


@pytest.mark.parametrize("tied", [True, False])
def test_parts_of_a_pipeline_are_the_model_that_they_were_cut_from(tied: bool) -> None:
    whole = Model(tied)
    assert manifest_of(stages(whole)) == manifest_of(whole)


def test_shared_parameter_or_module_is_one() -> None:
    whole = Model(tied=True)
    parts = unwrapped(stages(whole))
    assert [id(p) for p in parts.parameters()] == [id(p) for p in whole.parameters()]
    part = nn.Linear(2, 2)
    assert manifest_of([part, part]) == manifest_of(part)
    assert len(list(ModelParts([part, part]).parameters())) == 2


def test_name_refers_to_the_saved_tensor_not_to_another_parts_table() -> None:
    """Where one part saves a buffer that another has under the same name for itself."""
    parts = stages(Model())
    parts[0].register_buffer("table", torch.ones(2))
    assert live_tensors(unwrapped(parts))["table"] is parts[0].table
    assert [e.name for e in ModelTensors.of_module(parts).manifest.entries].count("table") == 1


def test_values_go_into_the_tensors_of_the_parts() -> None:
    whole = Model()
    parts = stages(whole)
    tensors = ModelTensors.of_module(parts)
    for _, tensor in tensors.live():
        tensor.fill_(7)
    assert all(bool((value == 7).all()) for value in whole.state_dict().values())


def test_one_name_for_two_tensors_or_no_part_is_refused() -> None:
    parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(UsageError, match=r"Parts 0 and 1 .* 'weight'; .*nn\.ModuleDict"):
        ModelTensors.of_module(parts)
    named = nn.ModuleDict(dict(zip(("first", "second"), parts, strict=True)))
    assert len(manifest_of(named).entries) == 4
    with pytest.raises(UsageError, match="empty list"):
        unwrapped([])


def test_change_of_a_part_is_detected() -> None:
    whole = Model(tied=False)
    parts = stages(whole)
    watch = ModelTensors.of_module(parts).watch
    assert watch is not None and watch.look() is None
    parts[1].output = nn.Linear(3, 5, bias=False)
    assert "output.weight is another parameter" in str(watch.look())
