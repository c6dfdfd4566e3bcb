"""A model with tensors of every kind, whole and in fragments: what travels when, and what comes back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from diloco_protocol import Segment
from diloco_worker import DiLoCoWorker
from kit.scripted_broker import Beside, Descent, ScriptedBroker, changed, run_config, version
from kit.uniform_model import Make, filled, values

pytest_plugins = ("kit.worker_fixtures",)


class Mixed(nn.Module):
    """Tied weights, bf16, BatchNorm (float and integer buffers), a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layers = nn.ModuleList(
            [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, dtype=torch.bfloat16)]
        )
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def mixed() -> Descent:
    """The model with two groups of parameters: one is lowered by 1, the other by 2 in each step."""
    descent = Descent(Mixed())
    slow = [p for name, p in descent.model.named_parameters() if name.startswith("layers")]
    fast = [descent.model.get_parameter("embedding.weight")]
    groups = [{"params": slow, "lr": 1.0}, {"params": fast, "lr": 2.0}]
    descent.optimizer = torch.optim.SGD(groups)
    return descent


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize(
    "merge", [{}, {"fragment_update_alpha": 0.5}, {"fragment_merge": "rebase"}]
)
def test_every_tensor_of_a_mixed_model_travels_once_in_a_cycle_and_comes_back(
    broker: ScriptedBroker,
    beside: Beside,
    workers: list[DiLoCoWorker],
    fragments: int,
    merge: dict[str, Any],
) -> None:
    broker.config = run_config(sync_every=6, num_fragments=fragments, **merge)
    descent = mixed()
    worker = DiLoCoWorker(descent.model, descent.optimizer, server=broker.address, worker_id="me")
    workers.append(worker)
    started = beside(worker.start)
    broker.welcomes(version(0))
    assert broker.layout is not None
    for part in broker.layout.all:
        broker.serves(filled(descent, 100, broker, part.fragment), version(0))
    started()
    with torch.no_grad():
        norm = descent.model.get_submodule("layers.1")
        norm.get_buffer("running_mean").sub_(0.5)
        norm.get_buffer("num_batches_tracked").add_(9)
    seen: list[str] = []
    half = 0.5 if merge.get("fragment_update_alpha") else 0.0
    for fragment in range(fragments):
        steps = beside(descent.steps, 6 // fragments)
        push, delta = broker.takes_push(fragment)
        taken = 6 // fragments * (fragment + 1)
        for place in delta.layout.places:
            name = place.entry.name
            seen.append(name)
            got = set(delta.of(place).flatten().tolist())
            if place.segment is Segment.PARAMETERS:
                assert got == {float(taken * (2 if name.startswith("embedding") else 1))}, name
            elif place.segment is Segment.BUFFERS:
                assert got == {99.5 if name.endswith("running_mean") else 100.0}, name
            else:
                assert got == {109}
        before = copy.deepcopy(values(descent, broker, fragment))
        broker.serves(filled(descent, 40, broker, fragment), version(1), push.push_id)
        steps()
        after = values(descent, broker, fragment)
        for segment, vector in after.vectors.items():
            weight = half if segment is not Segment.INTEGERS else 0
            expected = weight * before.vectors[segment] + (1 - weight) * 40
            assert torch.equal(vector, expected.to(vector.dtype)), segment
    trained = {n for n, p in descent.model.named_parameters() if p.requires_grad}
    buffers = {n for n, _ in descent.model.named_buffers()}
    assert sorted(seen) == sorted(trained | buffers)
    assert descent.model.get_parameter("head.weight") is descent.model.get_parameter(
        "embedding.weight"
    )


def test_buffers_travel_with_the_last_fragment(broker: ScriptedBroker, begin: Make) -> None:
    broker.config = run_config(sync_every=6, num_fragments=3, fragment_sync_delay=1)
    _, descent = begin(Mixed())
    assert broker.layout is not None
    lengths = [part.lengths[Segment.BUFFERS] for part in broker.layout.fragments]
    assert lengths == [0, 0, 6]
    assert changed(values(descent, broker, 2), torch.clone).vectors[Segment.INTEGERS].numel() == 1
