"""Runs that an older release has saved, and how such a recording is made.

`python -m kit.recorded_runs FOLDER`, with the release that is to be recorded, trains each of `RUNS` for
five rounds, keeps its folder, and then trains on for four more from a copy. What that came to is kept
beside it as `after.safetensors`, so a test can ask whether another release gets there, too.
"""

import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from diloco_broker import Broker, BrokerConfig
from diloco_worker import DiLoCoClient

AFTER = "after.safetensors"
RECORDED, TRAINED_ON = 5, 9  # pushes

RUNS: dict[str, dict[str, Any]] = {
    "streaming": {},
    "staged": {"deterministic": True},
    "asynchronous": {"mode": "async", "workers": 2, "outer": "dn", "dn_buffer": 3},
    "fragments": {"num_fragments": 2, "sync_every": 8},
    "torch": {},
}


class Model(nn.Module):
    """Two layers to split, float and integer buffers, a tied and a frozen tensor: 43 parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.tied = self.layers[0]
        self.norm = nn.BatchNorm1d(1)
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)


def broker_of(name: str, folder: str) -> Broker:
    """A broker that continues the run in a folder, or begins it."""
    address = "tcp://127.0.0.1:*"
    options: dict[str, Any] = {"workers": 1, "chunk_elements": 16, "wire_dtype": "fp32", "keep": 1}
    options["outer_momentum_warmup"] = "constant"
    options |= {"bind": address, "feed": address, "save_dir": folder, **RUNS[name]}
    config = BrokerConfig(**options)
    if name != "torch":
        return Broker(config)
    return Broker(config, outer_optimizer_factory=lambda p: torch.optim.AdamW(p, lr=0.1))


def trained(name: str, folder: str, first: int, last: int) -> dict[str, Tensor]:
    """One worker makes these pushes; what the parameters are then."""
    pieces = RUNS[name].get("num_fragments", 1)
    with (
        broker_of(name, folder) as broker,
        DiLoCoClient(broker.address, worker_id="w", timeout=30.0) as client,
    ):
        found = client.join(Model())
        for number in range(first, last):
            generator = torch.Generator().manual_seed(number)
            delta = {
                key: torch.randn(value.shape, generator=generator)
                for key, value in found.tensors.items()
                if value.is_floating_point() and key.startswith(("layers", "norm"))
            }
            delta["norm.running_var"].abs_()
            client.push(delta, fragment=number % pieces, steps=8, loss=1.0 / (number + 1))
            found = client.pull()
        if last == RECORDED:
            client.control("save")
        return found.tensors


def record(folder: Path) -> None:
    """Record all of `RUNS` into this folder. The host has no name in it, and folders are relative."""
    socket.gethostname = lambda: "host"
    for name in RUNS:
        with tempfile.TemporaryDirectory() as place:
            os.chdir(place)
            trained(name, "run", 0, RECORDED)
            kept = folder / name
            shutil.copytree("run", kept, ignore=shutil.ignore_patterns(".*"))
            after = trained(name, "run", RECORDED, TRAINED_ON)
            save_file({key: value.clone() for key, value in after.items()}, kept / AFTER)


if __name__ == "__main__":
    record(Path(sys.argv[1]).absolute())
