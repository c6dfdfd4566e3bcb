"""The role "attacked": a worker that trains a small model of many tensors."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from diloco_protocol.description import describe
from diloco_worker import DiLoCoWorker, manifest_of

SYNC_EVERY = 10  # H: a few rounds a second
INPUTS, HIDDEN, BATCH = 256, 1024, 4
REST_S = 0.01  # behind each step, which stands for a larger model
# Frozen numbers, which are not trained. They cost nothing, but make the manifest, and so the answers
# to requests for it, as long as that of a large model.
FROZEN = 1500


class Net(nn.Module):
    """A million parameters, and a long description."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(INPUTS, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 512),
            nn.ReLU(),
            nn.Linear(512, INPUTS),
        )
        for number in range(FROZEN):
            still = nn.Parameter(torch.zeros(1), requires_grad=False)
            name = f"a_frozen_number_with_a_name_as_long_as_of_a_layer_{number}"
            self.register_parameter(name, still)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def description() -> bytes:
    """The packed manifest of the model."""
    return describe(manifest_of(Net())).packed


class Training:
    """Trains until it is asked for something else."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self._is_asked = is_asked

    def train(self, address: str, name: str, keys: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        with DiLoCoWorker(model, optimizer, address, worker_id=name, keys=keys or None):
            while not self._is_asked():
                x = torch.randn(BATCH, INPUTS)
                loss = (model(x) - x.flip(1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(REST_S)
