"""A training worker of the drill: a small model of many tensors, until it is ended.

python -m diloco_lab.chaos.attacks.worker JOB.json
"""

from __future__ import annotations

import json
import logging
import struct
import sys
import time
from pathlib import Path

import torch
from torch import nn

from diloco_protocol.description import describe
from diloco_worker import DiLoCoWorker, manifest_of

SYNC_EVERY = 10  # H: a few rounds a second
INPUTS, HIDDEN, BATCH = 256, 1024, 4
REST_S = 0.01  # behind each step, which stands for a larger model
# Frozen numbers that nobody trains. They cost nothing, but they make the manifest as long as that of a
# large model, and the answers to questions for it.
FROZEN = 1500
TIME = struct.Struct("=d")


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
            self.register_parameter(
                f"a_frozen_number_with_a_name_as_long_as_of_a_layer_{number}", still
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def description() -> bytes:
    """The packed manifest of the model."""
    return describe(manifest_of(Net())).packed


def main(job: dict[str, str]) -> None:
    """Train; the time of each round is appended to the file `rounds`, of the monotonic clock."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    rounds = 0
    with (
        Path(job["rounds"]).open("ab", buffering=0) as written,
        DiLoCoWorker(
            model, optimizer, job["address"], worker_id=job["name"], keys=job["keys"] or None
        ) as diloco,
    ):
        while True:
            x = torch.randn(BATCH, INPUTS)
            loss = (model(x) - x.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if diloco.sync_metrics.rounds != rounds:
                rounds = diloco.sync_metrics.rounds
                written.write(TIME.pack(time.monotonic()))
            time.sleep(REST_S)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s")
    main(json.loads(Path(sys.argv[1]).read_text()))
