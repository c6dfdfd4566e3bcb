"""DiLoCoCallback: the hook for Lightning's `Trainer`, in one line.

    trainer = Trainer(max_steps=1000, callbacks=[DiLoCoCallback("tcp://10.0.0.1:8512")])
    trainer.fit(model)  # or trainer.fit(model, ckpt_path="last")

It joins when training begins, after a checkpoint was loaded, and leaves when training ends. It counts
the steps of the module's optimizers, so accumulated batches and steps skipped by a scaler come out
right, in automatic and manual optimization. Each checkpoint of the Trainer has the state of the worker.
With several processes (DDP) all of them are one worker, as with `process_group="world"`.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from diloco_protocol import UsageError
from diloco_worker.frameworks import figures, give_own_order, report_loss
from diloco_worker.hook import DiLoCoWorker
from diloco_worker.settings import handed_on, resolve
from diloco_worker.transport.broker_address import Given

logger = logging.getLogger("diloco.worker")

# Parts of the names of strategies that shard the model, or step without torch's hooks.
REFUSED = ("DeepSpeed", "FSDP", "ModelParallel", "XLA")
OF_EACH = "processes"  # key of the states of several processes in a checkpoint


class DiLoCoCallback(Callback):
    """Makes a `Trainer` a worker of a run.

    Args:
        server: the broker's address. Without one here and in DILOCO_SERVER the callback does nothing.
        shard_data: shuffle the training data from another seed than other workers. False leaves the
            seeds alone, for scripts that give each worker its own data.
        keywords: those of `DiLoCoWorker`, each with its variable DILOCO_<KEYWORD>.

    Attributes:
        diloco: the `DiLoCoWorker`, from `on_train_start` on; None before.

    Logged with the module's values, each as diloco/NAME: `round` of the run, `global_loss`, and of this
    worker `pushes`, `bytes_up`, `bytes_down`, `seconds_waited`, `staleness`, `unsynced_steps`. When the
    run ends the Trainer stops; one with `min_steps` or `min_epochs` first makes these, alone. When an
    operator requests a save, a Trainer with a `ModelCheckpoint` writes `asked-step=N.ckpt` into its
    folder.

    Raises:
        UsageError: an unknown keyword. When training begins: what `DiLoCoWorker` raises, a strategy that
            shards the model, or two of these callbacks.
    """

    def __init__(
        self, server: Given | None = None, *, shard_data: bool = True, **keywords: Any
    ) -> None:
        self.diloco: DiLoCoWorker | None = None
        self._given = handed_on("DiLoCoCallback", {"server": server, **keywords})
        self._shard_data = shard_data
        self._loaded: dict[str, Any] = {}  # the worker's state in the checkpoint
        self._theirs: Any = None  # Lightning's handler of SIGTERM
        self._is_in = False
        self._ordered: object = None  # the loaders with this worker's order
        self._processes: Any = None  # a gloo group of the Trainer's processes, if several

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        callbacks = trainer.callbacks
        if sum(isinstance(each, DiLoCoCallback) for each in callbacks) > 1:
            raise UsageError("The Trainer has two DiLoCoCallbacks; remove one of them.")
        if resolve(self._given).server is not None:
            _require_whole_model(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1 and resolve(self._given).server is not None:
            self._given.setdefault("process_group", "world")
            self._processes = dist.new_group(backend="gloo")
        worker = DiLoCoWorker(pl_module, trainer.optimizers, **self._given)
        if self._loaded:
            worker.load_state_dict(self._loaded.get(OF_EACH, self._loaded))
        elif trainer.ckpt_path and resolve(self._given).server is not None:
            logger.warning(
                "The checkpoint has no state of this worker; it begins with the run's parameters."
            )
        self.diloco, self._loaded = worker, {}
        is_main = threading.current_thread() is threading.main_thread()
        if resolve(self._given).handle_signals is not False and is_main:
            # For the worker: Lightning's handler would not end a wait for a round.
            self._theirs = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            worker.start()
        except BaseException:
            self._give_sigterm_back()
            raise
        self._is_in = True
        self._give_own_order(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._give_own_order(trainer)  # loaders may be new

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        worker = self.diloco
        if worker is None or worker.config is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            report_loss(worker.report, loss)
        pl_module.log_dict(figures(worker), on_step=True, on_epoch=False, batch_size=1)
        if worker.should_save:
            _save(trainer, worker)
        reason = worker.stop_reason
        if reason is not None and not trainer.should_stop:
            logger.info("The Trainer stops: %s", reason)
            trainer.should_stop = True
            if reason.startswith("SIGTERM") and callable(self._theirs):
                self._theirs(signal.SIGTERM, None)  # Lightning's way to end the training

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._leave(exception)

    def state_dict(self) -> dict[str, Any]:
        worker = self.diloco
        if worker is None or worker.config is None:
            return self._loaded
        state = worker.state_dict()
        if self._processes is None:
            return state
        # The Trainer saves the state of its first process.
        states = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(state, states, group=self._processes)
        return {OF_EACH: states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = dict(state_dict)

    def _leave(self, error: BaseException | None) -> None:
        if self.diloco is None or not self._is_in:
            return
        self._is_in = False
        try:
            self.diloco.__exit__(type(error), error, None)
        finally:
            self._give_sigterm_back()

    def _give_own_order(self, trainer: Trainer) -> None:
        """Shuffle the Trainer's data from seeds of this worker.

        A loader that keeps its own state is left alone: it may resume within an epoch.
        """
        worker, given = self.diloco, trainer.train_dataloader
        if worker is None or worker.config is None or not self._shard_data:
            return
        if given is self._ordered:
            return
        self._ordered = given
        flat = CombinedLoader(given).flattened  # of one loader, or several in lists and dicts
        loaders = [each for each in flat if not hasattr(each, "state_dict")]
        is_changed = give_own_order(loaders, lambda: worker.shard)
        # Processes of a loader have prefetched batches in the old order.
        if is_changed and any(getattr(each, "num_workers", 0) for each in loaders):
            iter(trainer.fit_loop._data_fetcher)

    def _give_sigterm_back(self) -> None:
        if self._theirs is not None:
            signal.signal(signal.SIGTERM, self._theirs)
            self._theirs = None


def _save(trainer: Trainer, worker: DiLoCoWorker) -> None:
    """Write a checkpoint beside those of the Trainer, if it keeps any, and notify the operator."""
    keeper = trainer.checkpoint_callback
    if isinstance(keeper, ModelCheckpoint) and keeper.dirpath is not None:
        trainer.save_checkpoint(Path(keeper.dirpath, f"asked-step={trainer.global_step}.ckpt"))
        worker.saved()


def _require_whole_model(trainer: Trainer) -> None:
    """Raise UsageError where a model is sharded, or stepped without torch's hooks."""
    strategy = type(trainer.strategy).__name__
    if any(name in strategy for name in REFUSED):
        raise UsageError(
            f"The Trainer uses {strategy}, which shards the model or steps without torch's hooks; "
            'DiLoCoCallback needs the whole model in each process: use strategy="ddp", or train with '
            "your own loop (docs/frameworks.md)."
        )
