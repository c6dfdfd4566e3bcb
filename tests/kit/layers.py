"""A model of layers that are fragments, pseudo-gradients for it, and the command line of its broker."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from diloco_worker import DiLoCoClient, GlobalParameters
from kit.process_kit import PATIENCE_S

SIZE = 24  # of a layer: 576 parameters, 36 chunks


class Layers(nn.Module):
    """So many layers without biases: with as many fragments, layer i is fragment i."""

    def __init__(self, layers: int = 1, size: int = SIZE) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(layers))
        generator = torch.Generator().manual_seed(1)  # of its own: threads make models as well
        for weight in self.parameters():
            weight.data.copy_(torch.randn(size, size, generator=generator))


def name_of(fragment: int) -> str:
    return f"layers.{fragment}.weight"


def delta(worker: int, number: int) -> Tensor:
    """The pseudo-gradient of a worker's push 0, 1, ..."""
    generator = torch.Generator().manual_seed(1000 * worker + number)
    return torch.randn(SIZE, SIZE, generator=generator)


@contextmanager
def a_client(address: str, worker_id: str = "w") -> Iterator[DiLoCoClient]:
    """One that has joined with one layer."""
    with DiLoCoClient(address, worker_id=worker_id, timeout=PATIENCE_S) as client:
        client.join(Layers())
        yield client


def pushes_and_pulls(client: DiLoCoClient, first: int, last: int) -> GlobalParameters:
    """Make these pushes of worker 0; returns the parameters after them."""
    for number in range(first, last):
        client.push({name_of(0): delta(0, number)})
        final = client.pull()
    return final


def serve_options(folder: Path, *more: str) -> tuple[str, ...]:
    """The daemon's command line, on free ports."""
    address = "tcp://127.0.0.1:*"
    where = ("--bind", address, "--feed", address, "--save-dir", str(folder))
    return ("serve", *where, "--wire-dtype", "fp32", *more)
