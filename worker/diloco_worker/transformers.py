"""DiLoCoCallback: the hook for Hugging Face's `Trainer`, in one line.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[DiLoCoCallback("tcp://10.0.0.1:8512")])
    trainer.train()  # or trainer.train(resume_from_checkpoint=True)

It joins when the Trainer has prepared model and optimizer and loaded a checkpoint, and leaves when
training ends. It counts the steps of the optimizer inside Accelerate's, so accumulation and steps
skipped by a scaler come out right. Each checkpoint of the Trainer gets a file `diloco.pt`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from diloco_protocol import UsageError
from diloco_worker.frameworks import figures, give_own_order, report_loss
from diloco_worker.hook import DiLoCoWorker
from diloco_worker.settings import WorkerOptions, handed_on, resolve
from diloco_worker.transport.broker_address import Given

logger = logging.getLogger("diloco.worker")

STATE_FILE = "diloco.pt"  # in a checkpoint of the Trainer
# By model, the callback in a run with it; it has not left if training failed.
_callbacks: weakref.WeakKeyDictionary[nn.Module, DiLoCoCallback] = weakref.WeakKeyDictionary()


class DiLoCoCallback(TrainerCallback, ExportableState):
    """Makes a `Trainer` a worker of a run.

    Args:
        server: the broker's address. Without one here and in DILOCO_SERVER the callback does nothing.
        evaluate_global: evaluate the global parameters received last instead of this worker's own; they
            are in the model while it is in evaluation mode.
        shard_data: shuffle the training data from another seed than other workers. False leaves the
            seeds alone, for scripts that give each worker its own data.
        keywords: those of `DiLoCoWorker`, each with its variable DILOCO_<KEYWORD>.

    Added to the Trainer's logs, each as diloco/NAME: `round` of the run, `global_loss`, and of this
    worker `pushes`, `bytes_up`, `bytes_down`, `seconds_waited`, `staleness`, `unsynced_steps`.

    With several processes (torchrun) all of them are one worker, as with `process_group="world"`.

    Raises:
        UsageError: an unknown keyword. When training begins: what `DiLoCoWorker` raises, or a Trainer
            with FSDP, DeepSpeed or two of these callbacks.
    """

    def __init__(
        self,
        server: Given | None = None,
        *,
        evaluate_global: bool = False,
        shard_data: bool = True,
        **keywords: Any,
    ) -> None:
        self.diloco: DiLoCoWorker | None = None  # None before training
        self.saved_in: str | None = None  # the last checkpoint
        self._given = handed_on("DiLoCoCallback", {"server": server, **keywords})
        self._evaluate_global = evaluate_global
        self._shard_data = shard_data
        self._global_parameters = ExitStack()  # in the model until it is closed
        self._shows_global = False
        self._hooks: list[Any] = []
        self._tokens = 0  # reported so far
        self._has_left = False

    # The Trainer's events.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        self._comes_first(sys._getframe(1).f_locals.get("self"))
        model, optimizer = objects["model"], objects["optimizer"]
        if resolve(self._given).server is not None:
            _require_whole_model(args)
            _require_one_training(args)
            if args.world_size > 1:
                self._given.setdefault("process_group", "world")
        former = _callbacks.pop(model, self)
        former._leave(failed=True)
        diloco = DiLoCoWorker(model, optimizer, **self._given)
        if state.global_step and (saved := self._find(args, state)) is not None:
            diloco.load_state_dict(_read(saved, args))
        self.diloco, self._has_left = diloco.start(), False
        self._tokens = state.num_input_tokens_seen
        if self._is_in_a_run:
            _callbacks[model] = self
            if self._shard_data:
                give_own_order([objects.get("train_dataloader")], lambda: diloco.shard)
            if self._evaluate_global:
                self._hooks = [
                    model.register_forward_pre_hook(self._before_forward),
                    model.register_state_dict_pre_hook(lambda *_: self._hide_global()),
                ]

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.diloco is not None:
            samples = args.train_batch_size * args.gradient_accumulation_steps
            tokens = state.num_input_tokens_seen - self._tokens  # 0 where the Trainer counts none
            self._tokens += tokens
            # The Trainer counts the tokens of all its processes.
            is_counted = tokens and args.process_index == 0
            self.diloco.report(samples=samples, tokens=tokens if is_counted else None)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        self.saved_in = str(_checkpoint(args, state))
        if self.diloco is None:
            return control
        is_asked = self.diloco.should_save
        if self.diloco.should_stop and not control.should_training_stop:
            logger.info("The Trainer stops: %s", self.diloco.stop_reason)
            control.should_training_stop = is_asked = True
        control.should_save = control.should_save or (is_asked and args.save_strategy != "no")
        return control

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._hide_global()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if self.diloco is None or logs is None:
            return
        if "loss" in logs:
            report_loss(self.diloco.report, logs["loss"])
        if "loss" in logs or "train_loss" in logs:  # the latter once, at the end
            self._log_figures(state, logs)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        folder = _checkpoint(args, state)
        if self.diloco is None or not self._is_in_a_run:
            return
        if args.world_size > 1:  # another process may not have made it yet
            folder.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            file = _state_file(args)
            aside = folder / f"{file}.new"
            torch.save(self.diloco.state_dict(), aside)
            os.replace(aside, folder / file)
            self.diloco.saved()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._leave()
        self._log_figures(state, {})

    def state(self) -> dict[str, Any]:
        given = {
            **self._given,
            "evaluate_global": self._evaluate_global,
            "shard_data": self._shard_data,
        }
        plain = json.loads(json.dumps(given, default=_plain))
        return {"args": plain, "attributes": {"saved_in": self.saved_in}}

    @property
    def _is_in_a_run(self) -> bool:
        return self.diloco is not None and self.diloco.config is not None

    def _comes_first(self, handler: object) -> None:
        """Stand before the callbacks that report to files and sites, which copy the logs at once.

        The Trainer offers no way to add to its logs, nor access to the list of callbacks.
        """
        if not isinstance(handler, CallbackHandler):
            return
        if sum(isinstance(each, DiLoCoCallback) for each in handler.callbacks) > 1:
            raise UsageError("The Trainer has two DiLoCoCallbacks; remove one of them.")
        flow = [each for each in handler.callbacks if isinstance(each, DefaultFlowCallback)]
        others = [each for each in handler.callbacks if each is not self and each not in flow]
        handler.callbacks = [*flow, self, *others]

    def _find(self, args: TrainingArguments, state: TrainerState) -> Path | None:
        """The folder of the loaded checkpoint; the Trainer does not say which one it was."""
        record = state.stateful_callbacks.get(type(self).__name__, {})
        record = record[0] if isinstance(record, list) else record
        said = record.get("attributes", {}).get("saved_in")
        folders = [args.resume_from_checkpoint, said, _checkpoint(args, state)]
        places = [Path(folder) for folder in folders if isinstance(folder, str | Path)]
        files = [place / STATE_FILE for place in places]
        found = next((place for place in places if _states_in(place)), None)
        if found is None and resolve(self._given).server is not None:
            logger.warning(
                "The checkpoint has no state of this worker (%s); it begins with the run's parameters.",
                " or ".join(map(str, dict.fromkeys(files))),
            )
        return found

    def _before_forward(self, model: nn.Module, _: object) -> None:
        if model.training:
            self._hide_global()
        elif not self._shows_global and self.diloco is not None:
            self._global_parameters.enter_context(self.diloco.global_parameters())
            self._shows_global = True

    def _hide_global(self) -> None:
        self._global_parameters.close()
        self._shows_global = False

    def _log_figures(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Add this worker's figures to these logs, and to the last entry of the history."""
        if self.diloco is None:
            return
        found = figures(self.diloco)
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def _leave(self, *, failed: bool = False) -> None:
        self._hide_global()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.diloco is not None and not self._has_left:
            self._has_left = True
            self.diloco.close(failed=failed)


def _plain(value: object) -> object:
    """A keyword in the Trainer's checkpoint, which is JSON."""
    if isinstance(value, WorkerOptions):
        return {name: each for name, each in vars(value).items() if each is not None}
    return str(value)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder of a checkpoint that the Trainer saves now."""
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}").resolve()


def _state_file(args: TrainingArguments) -> str:
    """The name of this process's state in a checkpoint."""
    if args.world_size == 1:
        return STATE_FILE
    stem, _, ending = STATE_FILE.partition(".")
    return f"{stem}-{args.process_index}-of-{args.world_size}.{ending}"


def _states_in(folder: Path) -> list[Path]:
    """The states of all processes in a checkpoint."""
    alone = folder / STATE_FILE
    stem, _, ending = STATE_FILE.partition(".")
    return [alone] if alone.exists() else sorted(folder.glob(f"{stem}-*-of-*.{ending}"))


def _read(folder: Path, args: TrainingArguments) -> Any:
    """The state of this process, or those of all where their number has changed."""
    own = folder / _state_file(args)
    files = [own] if own.exists() else _states_in(folder)
    states = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    return states[0] if own.exists() else states


def _require_one_training(args: TrainingArguments) -> None:
    """Raise UsageError where a launcher started several processes and each trains by itself.

    All would join under one name. The Trainer does that on machines without an accelerator.
    """
    started = os.environ.get("WORLD_SIZE", "1")
    if args.world_size == 1 and started.isdigit() and int(started) > 1:
        raise UsageError(
            f"The launcher started {started} processes, but each trains alone: the Trainer found no "
            "accelerator. Give TrainingArguments use_cpu=True, or start one process."
        )


def _require_whole_model(args: TrainingArguments) -> None:
    """Raise UsageError where the Trainer shards the model."""
    how = "DeepSpeed" if args.deepspeed else "FSDP" if args.fsdp else ""
    if how:
        raise UsageError(
            f"The Trainer uses {how}, which shards the model; DiLoCoCallback needs all of it in each "
            f"process: train without {how}, or with your own loop (docs/frameworks.md)."
        )
