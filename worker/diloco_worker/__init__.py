"""Take part in a DiLoCo run: `DiLoCoWorker` around a training loop, or `DiLoCoClient` call by call."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from diloco_worker.launching import RUN_IS_OVER

if TYPE_CHECKING:
    from diloco_worker.client import DiLoCoClient, GlobalParameters
    from diloco_worker.hook import DiLoCoWorker
    from diloco_worker.model.model_manifest import manifest_of
    from diloco_worker.model.spread.ranks import GroupBroken
    from diloco_worker.settings import WorkerOptions

__all__ = [
    "RUN_IS_OVER",
    "DiLoCoClient",
    "DiLoCoWorker",
    "GlobalParameters",
    "GroupBroken",
    "WorkerOptions",
    "manifest_of",
]

_HOMES = {
    "DiLoCoClient": "diloco_worker.client",
    "DiLoCoWorker": "diloco_worker.hook",
    "GlobalParameters": "diloco_worker.client",
    "GroupBroken": "diloco_worker.model.spread.ranks",
    "WorkerOptions": "diloco_worker.settings",
    "manifest_of": "diloco_worker.model.model_manifest",
}


def __getattr__(name: str) -> Any:
    # Only when asked for, so that the pure parts can be had without torch, sockets and threads.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
