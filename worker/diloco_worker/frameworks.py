"""What the callbacks for training frameworks have in common."""

from __future__ import annotations

from collections.abc import Callable

from diloco_protocol import UsageError
from diloco_worker.hook import DiLoCoWorker
from diloco_worker.training.settings import warn_once

# Of `sync_metrics`, what a framework logs.
LOGGED = ("pushes", "bytes_up", "bytes_down", "seconds_waited", "staleness", "unsynced_steps")


def figures(worker: DiLoCoWorker) -> dict[str, float]:
    """What a framework's logs get of a run; nothing where the worker is in none."""
    if worker.config is None:
        return {}
    metrics = worker.sync_metrics
    found = {name: metrics[name] for name in LOGGED} | {"round": worker.round}
    if worker.global_loss is not None:
        found["global_loss"] = worker.global_loss
    return {f"diloco/{name}": float(value) for name, value in found.items()}


def report_loss(report: Callable[..., None], loss: object) -> None:
    """Report the loss that a framework's trainer gives; warn once if it is not a single number.

    Args:
        report: that of a `DiLoCoWorker`.
        loss: any value; a string is read as a number.
    """
    try:
        report(loss=float(loss) if isinstance(loss, str) else loss)
    except (UsageError, ValueError) as error:
        warn_once(f"The broker gets no loss from this training: {error}")
