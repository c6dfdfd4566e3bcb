"""What a worker tells its script of the run, and of itself: all of it is only read.

In a worker of several processes it is the same in all of them, as of the last step.
"""

from __future__ import annotations

from diloco_protocol import RunConfig
from diloco_protocol.messages import Progress
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.training.driver import Driver
from diloco_worker.training.ports import RunFacts
from diloco_worker.transport.link import Link


class RunView:
    """See the head of this module: a part of `DiLoCoWorker`, which has what it reads."""

    _link: Link | None
    _driver: Driver | None
    _counters: SyncMetrics
    _step: int

    @property
    def _facts(self) -> RunFacts:
        """What is known of the run; at all ranks of a worker the same."""
        return self._driver.ports.facts if self._driver else RunFacts()

    @property
    def config(self) -> RunConfig | None:
        """How the run is trained, as the broker says; None before joining."""
        return self._link.config if self._link else None

    @property
    def sync_every(self) -> int | None:
        """H in use, which Dynamic Local Updates may change from cycle to cycle; None before joining."""
        return self._driver.state.schedule.sync_every if self._driver else None

    @property
    def progress(self) -> Progress:
        """How far the run is, by the version that came last; all 0 before joining.

        A worker that comes late places its learning-rate schedule by `progress.steps`: optimizer steps
        that one which was there from the beginning has behind it.
        """
        return self._facts.progress

    @property
    def round(self) -> int:
        """Rounds that the run has made; in asynchronous mode pushes that were applied."""
        return self.progress.rounds

    @property
    def global_loss(self) -> float | None:
        """Mean of the losses that the workers have reported with the last round; None before.

        In asynchronous mode of the latest loss of each worker.
        """
        return self._facts.loss

    @property
    def local_step(self) -> int:
        """Optimizer steps so far."""
        return self._step

    @property
    def sync_count(self) -> int:
        """Pseudo-gradients of this worker that are in the global parameters."""
        return self._counters.pushes
