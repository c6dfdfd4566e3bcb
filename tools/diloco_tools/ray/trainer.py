"""`DiLoCoTrainer`: one broker and several islands on a Ray cluster, as one training.

    trainer = DiLoCoTrainer(
        train_loop, islands=(2, 8), scaling_config=ScalingConfig(num_workers=4),
        broker=BrokerConfig(sync_every=500, max_rounds=200),
        run_config=RunConfig(name="llama", storage_path="/mnt/shared/runs"),
    )
    result = trainer.fit()

Ray places, restarts and scales; nothing here is a scheduler. The broker is an actor that needs no CPU of
Ray's books. Each island is a `TorchTrainer` of its own, so that one that loses a process is started
again alone while the others train on.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import train

from diloco_broker import BrokerConfig
from diloco_protocol.errors import UsageError
from diloco_tools.launch.commands import make_keys
from diloco_tools.ray.broker_actor import start_broker
from diloco_tools.ray.island import Island, Loop, last_metrics, start_island
from diloco_tools.ray.storage import Storage

logger = logging.getLogger("diloco.ray")

POLL_S = 2.0  # between two checks whether the cluster has room for one more island
# Restarts of an island without a failure_config. Lost nodes count, so there are several; the limit
# ends a run whose loop always fails.
FAILURES = 10


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        metrics: those that the first island reported last.
        checkpoint: the final global parameters, `model.safetensors` in a folder.
        path: of the run in the storage.
        islands: the result of each island; None for one that failed.
        error: why an island failed, if one has.
    """

    metrics: dict[str, Any] | None
    checkpoint: train.Checkpoint
    path: Path
    islands: tuple[train.Result | None, ...]
    error: Exception | None


class DiLoCoTrainer:
    """See the head of this module.

    Args:
        train_loop_per_worker: an ordinary loop of Ray Train with a `DiLoCoWorker(model, optimizer)` in
            it; with `process_group="world"` where an island has several processes. It takes the config,
            or nothing.
        train_loop_config: what the loop is called with.
        islands: how many workers the run has, or the least and the most. It begins with the least, and
            takes more while the cluster has room for them.
        scaling_config: of each island.
        broker: of the run. Addresses, keys and where it saves are set here.
        run_config: name, storage_path (a folder that all nodes share; default: Ray's), and what holds
            for each island, such as failure_config: without one an island is started again 10 times.

    Raises:
        UsageError: something of it cannot be.
    """

    def __init__(
        self,
        train_loop_per_worker: Loop,
        *,
        train_loop_config: dict[str, Any] | None = None,
        islands: int | tuple[int, int] = 2,
        scaling_config: train.ScalingConfig | None = None,
        broker: BrokerConfig | None = None,
        run_config: train.RunConfig | None = None,
    ) -> None:
        self.least, self.most = _least_and_most(islands)
        self._scaling = scaling_config or train.ScalingConfig(num_workers=1)
        if not isinstance(self._scaling.num_workers, int):
            raise UsageError(
                "num_workers of an island is a number; the islands are what may be more."
            )
        run = run_config or train.RunConfig()
        self._storage = Storage.of(run.storage_path, run.name or "diloco")
        if run.failure_config is None or run.failure_config == train.FailureConfig():
            run = replace(run, failure_config=train.FailureConfig(max_failures=FAILURES))
        self._run = run
        config = broker or BrokerConfig()
        self._broker = replace(config, workers=self.least) if config.workers == 1 else config
        self._loop, self._config = train_loop_per_worker, train_loop_config

    def fit(self) -> Result:
        """Train until the run is over and all islands have returned.

        Where `broker` sets no end (max_rounds, token_budget, max_time), the loops decide when to return.

        Raises:
            UsageError: keys cannot be made, or the storage cannot be written.
        """
        storage = self._storage
        try:
            storage.folder.mkdir(parents=True, exist_ok=True)
        except OSError as wrong:
            raise UsageError(f"{storage.folder} cannot be made: {wrong.strerror}.") from None
        make_keys(storage.keys, [f"island-{number}" for number in range(self.most)])
        storage.address_file.unlink(missing_ok=True)
        if not ray.is_initialized():
            ray.init()
        self._warn_of_own_folders()
        broker = start_broker(self._broker, storage)
        try:
            control, feed = ray.get(broker.addresses.remote())
            logger.info("The broker of %s is at %s, its feed at %s.", storage.name, control, feed)
            results, error = self._train()
            final = ray.get(broker.finish.remote())
        finally:
            ray.kill(broker)
        return Result(
            metrics=last_metrics(storage.metrics_of("island-0")),
            checkpoint=train.Checkpoint.from_directory(str(final)),
            path=storage.folder,
            islands=tuple(results),
            error=error,
        )

    def _warn_of_own_folders(self) -> None:
        """Ray's usual folder is in the home directory, which each machine may have for itself."""
        hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
        if len(hosts) > 1 and str(self._storage.root) == train.RunConfig().storage_path:
            logger.warning(
                "run_config has no storage_path, so the run is in %s, and the cluster has %d machines: "
                "unless they share that folder, give one that they do.",
                self._storage.folder,
                len(hosts),
            )

    def _train(self) -> tuple[Sequence[train.Result | None], Exception | None]:
        """Start islands, more of them while there is room, until all have returned."""
        tasks = [self._start(number) for number in range(self.least)]
        pending = list(tasks)
        try:
            while pending:
                _, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
                # Once one has returned the run is about to end: start no further islands.
                if len(tasks) == len(pending) < self.most and self._has_room():
                    tasks.append(self._start(len(tasks)))
                    pending.append(tasks[-1])
        except BaseException:
            for task in pending:
                ray.cancel(task)
            raise
        results: list[train.Result | None] = []
        failed: Exception | None = None
        for number, task in enumerate(tasks):
            try:
                result = ray.get(task)
            except Exception as failure:  # noqa: BLE001  of the loop: whatever it raises
                logger.error("Island %d failed: %s", number, failure)
                results.append(None)
                failed = failed or failure
            else:
                results.append(result)
                failed = failed or result.error
        return results, failed

    def _start(self, number: int) -> Any:
        logger.info("Island %d of %d to %d begins.", number, self.least, self.most)
        island = Island(
            number,
            self.most,
            self._storage,
            self._loop,
            bool(inspect.signature(self._loop).parameters),
            self._config,
            self._scaling,
            self._run,
        )
        return start_island(island)

    def _has_room(self) -> bool:
        """Whether the cluster has what one more island takes, by Ray's books."""
        free = ray.available_resources()
        needed = dict(self._scaling.total_resources)
        return all(free.get(name, 0.0) >= amount for name, amount in needed.items() if amount)


def _least_and_most(islands: int | tuple[int, int]) -> tuple[int, int]:
    pair = (islands, islands) if isinstance(islands, int) else tuple(islands)
    numbers = all(isinstance(each, int) and not isinstance(each, bool) for each in pair)
    if len(pair) != 2 or not numbers or not 1 <= pair[0] <= pair[1]:
        raise UsageError(
            f"islands is {islands!r:.80}; give a number, or the least and the most: (2, 8)."
        )
    return pair[0], pair[1]
