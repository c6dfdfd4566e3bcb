"""One island: a TorchTrainer of Ray whose processes are one worker of the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import train
from ray.train.torch import TorchTrainer

from diloco_tools.ray.last_metrics import LastMetrics
from diloco_tools.ray.storage import Storage
from diloco_worker import DiLoCoWorker

Loop = Callable[..., None]


@dataclass(frozen=True)
class Island:
    """What an island is started from, in whatever life."""

    number: int
    count: int  # of islands, at most: the number of shards
    storage: Storage
    loop: Loop
    takes_config: bool
    config: dict[str, Any] | None
    scaling: train.ScalingConfig
    run_config: train.RunConfig  # of the whole; the name and the storage are an island's own

    @property
    def worker_id(self) -> str:
        """The same in each life, on whatever node."""
        return f"island-{self.number}"

    @property
    def variables(self) -> dict[str, str]:
        """By which a `DiLoCoWorker(model, optimizer)` of the loop finds the run."""
        return {
            "DILOCO_SERVER": f"file://{self.storage.address_file}",
            "DILOCO_WORKER_ID": self.worker_id,
            "DILOCO_KEYS": str(self.storage.key_of(self.worker_id)),
            "DILOCO_SHARD_INDEX": str(self.number),
            "DILOCO_NUM_SHARDS": str(self.count),
        }

    def run(self) -> train.Result:
        """Train until the loop of all processes returns; Ray Train starts those again that die."""
        trainer = TorchTrainer(
            self.in_one_process,
            train_loop_config=self.config or {},
            scaling_config=self.scaling,
            run_config=replace(
                self.run_config,
                name=self.storage.island(self.number),
                storage_path=str(self.storage.root),
                callbacks=[
                    *(self.run_config.callbacks or []),
                    LastMetrics(self.storage.metrics_of(self.worker_id)),
                ],
            ),
        )
        return trainer.fit()

    def in_one_process(self, config: dict[str, Any]) -> None:
        """What Ray calls in each process of the island."""
        os.environ |= self.variables
        rank = train.get_context().get_world_rank()
        logging.basicConfig(
            format=f"{self.worker_id} rank {rank}: %(message)s", level=logging.INFO, force=True
        )
        if self.takes_config:
            self.loop(config)
        else:
            self.loop()


def start_island(island: Island) -> Any:
    """The task that drives an island; where its node is lost Ray starts it again, and it goes on."""
    return ray.remote(num_cpus=0, max_retries=-1)(Island.run).remote(island)


def report(
    worker: DiLoCoWorker,
    metrics: Mapping[str, Any] | None = None,
    checkpoint: train.Checkpoint | None = None,
) -> None:
    """`ray.train.report` with what this worker knows of the run beside your own metrics.

    Like that it is for all processes of an island to call, equally often.

    Args:
        metrics: yours; they count where a name is in both.
        checkpoint: as Ray takes it.
    """
    known = dict(worker.sync_metrics)
    own = {"round": worker.round, "global_loss": worker.global_loss, "worker": worker.worker_id}
    train.report({**known, **own, **(metrics or {})}, checkpoint=checkpoint)
