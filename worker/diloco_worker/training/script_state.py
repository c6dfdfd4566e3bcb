"""The dict that a script keeps of a worker: its counters, and what it resumes from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_protocol import UsageError
from diloco_worker.core.sync.metrics import SyncMetrics
from diloco_worker.model.checksums import checksums
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.training.driver import Driver
from diloco_worker.training.resumption import Resumption
from diloco_worker.training.saved_state import Plain, from_plain, to_plain

logger = logging.getLogger("diloco.worker")


@dataclass(frozen=True)
class Saved:
    """A dict that was loaded.

    Attributes:
        step, cycle_start: optimizer steps, and those when the cycle began.
        plain: what the resumption was made of.
        resumption: what to go on from; None where the dict has only counters.
    """

    counters: SyncMetrics
    step: int
    cycle_start: int
    tokens: int
    samples: int
    plain: object
    resumption: Resumption | None

    @classmethod
    def of(cls, state: Mapping[str, Any], tensors: ModelTensors | None) -> Saved:
        """Read a dict.

        Args:
            tensors: of the model that is to go on; None for a worker without a server.

        Raises:
            UsageError: it is not one of ours, or of another model.
        """
        try:
            counters = SyncMetrics(**state["metrics"])
            step, cycle_start = int(state["local_step"]), int(state.get("cycle_start", 0))
            tokens, samples = int(state["tokens"]), int(state.get("samples", 0))
            plain = state.get("resume")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"This is not the state of a DiLoCoWorker: {error!r}.") from None
        resumption = None
        if plain is not None and tensors is not None:
            resumption = from_plain(plain, tensors)
            if not 0 <= cycle_start <= step:
                raise UsageError(
                    f"This is not the state of a DiLoCoWorker: its cycle began at step {cycle_start}, "
                    f"and it is at step {step}."
                )
        return cls(counters, step, cycle_start, tokens, samples, plain, resumption)

    def resumption_of(self, worker_id: str, *, is_chosen: bool) -> Resumption | None:
        """What this worker goes on from. It needs the id that it had: its pushes are known by it.

        Args:
            is_chosen: the script has given it its id, so it keeps that.
        """
        resumption = self.resumption
        if resumption is not None and is_chosen and worker_id != resumption.worker_id:
            logger.warning(
                "The state is that of worker %r, this one is %r: it takes over the counters, and "
                "begins with the run's parameters. Give it the same worker_id to go on.",
                resumption.worker_id,
                worker_id,
            )
            return None
        return resumption


def resume_plain(worker_id: str, tensors: ModelTensors, driver: Driver) -> Plain | None:
    """The parameters and deltas of a worker in a run; None, with a warning, while a merge is broken off,
    or once the model has changed so much that the run's tensors are not in it."""
    if driver.is_torn:
        logger.warning(
            "A merge was interrupted, so the state does not contain the parameters: a worker that "
            "resumes from it begins with the run's. Save again after the next step."
        )
        return None
    try:
        sums = checksums(tensors)
    except UsageError as error:  # a script that saves must not end by it
        logger.warning(
            "%s Until then the worker's state does not contain the parameters: a worker that resumes "
            "from it begins with the run's.",
            error,
        )
        return None
    return to_plain(driver.resumption(worker_id, sums), tensors.manifest)
