"""One island: a TorchTrainer of Ray whose processes are one worker of the run."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import train
from ray.train.torch import TorchTrainer

from diloco_tools.ray.storage import Storage
from diloco_worker import DiLoCoWorker

Loop = Callable[..., None]


@dataclass(frozen=True)
class Island:
    """The settings of an island; the same after a restart."""

    number: int
    count: int  # most islands: the number of shards
    storage: Storage
    loop: Loop
    takes_config: bool
    config: dict[str, Any] | None
    scaling: train.ScalingConfig
    run_config: train.RunConfig  # of the whole run; an island has its own name and storage

    @property
    def worker_id(self) -> str:
        """The same after a restart and on any node."""
        return f"island-{self.number}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment by which `DiLoCoWorker(model, optimizer)` in the loop finds the run."""
        return {
            "DILOCO_SERVER": f"file://{self.storage.address_file}",
            "DILOCO_WORKER_ID": self.worker_id,
            "DILOCO_KEYS": str(self.storage.key_of(self.worker_id)),
            "DILOCO_SHARD_INDEX": str(self.number),
            "DILOCO_NUM_SHARDS": str(self.count),
        }

    def run(self) -> train.Result:
        """Train until the loop returns in all processes; Ray Train restarts those that die."""
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
        """Ray calls this in each process of the island."""
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
    """The task that drives an island; Ray restarts it if its node is lost, and it resumes."""
    return ray.remote(num_cpus=0, max_retries=-1)(Island.run).remote(island)


class LastMetrics(train.UserCallback):  # type: ignore[misc]  # ray has no types for mypy
    """Writes the last report of an island's first process to a file, since Ray Train keeps metrics
    only with a checkpoint. It runs in the process that drives the island.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def after_report(
        self, run_context: object, metrics: list[dict[str, Any]], checkpoint: object
    ) -> None:
        aside = self._file.with_suffix(".new")
        with suppress(OSError):  # a full disk must not end the training
            aside.write_text(json.dumps(metrics[0], default=str))
            aside.replace(self._file)


def last_metrics(file: Path) -> dict[str, Any] | None:
    """What `LastMetrics` has written; None before the first report."""
    try:
        read: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return read


def report(
    worker: DiLoCoWorker,
    metrics: Mapping[str, Any] | None = None,
    checkpoint: train.Checkpoint | None = None,
) -> None:
    """`ray.train.report` with this worker's metrics of the run beside your own.

    As with that, all processes of an island must call it equally often.

    Args:
        metrics: your own; they override ours of the same name.
        checkpoint: as for `ray.train.report`.
    """
    known = dict(worker.sync_metrics)
    own = {"round": worker.round, "global_loss": worker.global_loss, "worker": worker.worker_id}
    train.report({**known, **own, **(metrics or {})}, checkpoint=checkpoint)
