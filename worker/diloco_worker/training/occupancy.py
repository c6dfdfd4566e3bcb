"""One DiLoCoWorker to a model at a time, in one process.

Two would wait for each other: both are in the round, and the thread that waits for it with the one makes
no step for the other. It happens where a notebook's cell is run again.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

from torch import nn

from diloco_protocol import UsageError
from diloco_worker.model.model_manifest import unwrapped


@dataclass(frozen=True)
class Occupant:
    """The DiLoCoWorker that trains a model, by its `id`, and the process that it does so in."""

    number: int
    worker_id: str
    pid: int


_occupants: weakref.WeakKeyDictionary[nn.Module, Occupant] = weakref.WeakKeyDictionary()


def check_free(model: nn.Module) -> None:
    """Raise UsageError if a worker of this process is in a run with this model."""
    occupant = _occupants.get(unwrapped(model))
    if occupant is not None and occupant.pid == os.getpid():
        raise UsageError(
            f"This model is in a run already, as worker {occupant.worker_id!r}; close() that "
            "DiLoCoWorker before you make another one for it."
        )


def occupy(model: nn.Module, worker: object, worker_id: str) -> None:
    """This worker takes part with this model; raises UsageError as `check_free` does."""
    check_free(model)
    _occupants[unwrapped(model)] = Occupant(id(worker), worker_id, os.getpid())


def vacate(model: nn.Module, worker: object) -> None:
    """This worker has left, if it was ever in."""
    occupant = _occupants.get(unwrapped(model))
    if occupant is not None and occupant.number == id(worker):
        del _occupants[unwrapped(model)]
