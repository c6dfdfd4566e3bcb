"""The outer optimizer in the worker's own process: `DiLoCoWorker(..., server="local")`.

DiLoCo with one worker (K = 1; also SNOO). After every H optimizer steps, for each trained tensor,

    g = global - local;   m <- mu m + g;   global <- global - eta (g + mu m);   local <- global

which is `torch.optim.SGD(lr=eta, momentum=mu, nesterov=True)` on the pseudo-gradient g, bit for bit, in
fp32 (fp64 for fp64 tensors). Buffers keep their local values. There is no broker, socket or thread. The
processes of one worker each step the parts of the tensors that they have, and exchange no values.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diloco_protocol import Kind, RunConfig, UsageError
from diloco_protocol.messages import Progress
from diloco_protocol.tensors.codecs import is_finite
from diloco_worker.model.checksums import checksums
from diloco_worker.model.placement import HOST
from diloco_worker.model.spread.ranks import FORCE, STEP, Ranks
from diloco_worker.model.spread.saved_share import ProcessName
from diloco_worker.ports import Participant, RunFacts
from diloco_worker.saved_state import check_model
from diloco_worker.settings import Settings
from diloco_worker.sync.schedule import RoundSchedule

logger = logging.getLogger("diloco.worker")

# For one worker at H = 30 (arXiv 2503.09799).
SYNC_EVERY = 30
OUTER_LR, MOMENTUM = 0.4, 0.9
# The default momentum rises from FIRST_MOMENTUM to MOMENTUM in WARMUP outer steps, as the broker's does:
# short runs cannot bear the last one from the start.
FIRST_MOMENTUM, WARMUP = 0.5, 200

Plain = dict[str, Any]


def config_of(settings: Settings) -> RunConfig:
    """The configuration of the local run; raises UsageError for settings that need a broker."""
    every = settings.sync_every or SYNC_EVERY
    config = RunConfig("sync", every, wire_dtype="fp32", heartbeat_timeout=0.0)
    needless = [name for name in ("keys", "audit", "tied") if getattr(settings, name) is not None]
    wants = settings.wants.items()
    needless += [f"{name}={value!r}" for name, value in wants if getattr(config, name) != value]
    if needless:
        raise UsageError(
            f"server='local' runs without a broker, and {', '.join(needless)} need one; leave them out."
        )
    return config


@dataclass(eq=False, repr=False, kw_only=True)
class LocalOuter(Participant):
    """What the hook calls of a worker with server="local", as it calls `LocalPorts` of others."""

    ranks: Ranks | None
    saved: Mapping[str, Plain]  # by `ProcessName`, what all processes of the worker saved
    unsynced_steps = 0

    @classmethod
    def of(cls, parts: Participant, ranks: Ranks | None, saved: Mapping[str, Plain]) -> LocalOuter:
        """Begin training; raises UsageError, in all processes, for a saved state of another worker."""
        make = partial(cls, **vars(parts), ranks=ranks, saved=saved)
        made = make() if ranks is None else ranks.agreed(make)
        if made.settings.handle_signals is not False:
            made.termination.install()
        return made

    def __post_init__(self) -> None:
        self.config = config_of(self.settings)
        outer = self.settings.local or {}
        self.lr, self._fixed_momentum = outer.get("outer_lr", OUTER_LR), outer.get("outer_momentum")
        every = self.config.sync_every
        self.schedule = RoundSchedule(every, 1, step=self.step, cycle_start=self.cycle_start)
        self.is_asked = False  # whether a process of this worker received SIGTERM
        self._loss: float | None = None
        base = self.placement.base
        self._global: dict[str, Tensor] = {}
        self._momentum: dict[str, Tensor] = {}
        for entry, tensor in self.tensors.live():
            if entry.kind is not Kind.FROZEN:
                kept = tensor.to(base, _wide(tensor), copy=True)
                pins = self.placement.is_pinned and base == HOST
                self._global[entry.name] = kept = kept.pin_memory() if pins else kept
                if entry.kind is Kind.TRAINABLE:
                    zeros = torch.zeros_like(kept)
                    self._momentum[entry.name] = zeros.pin_memory() if pins else zeros
        if self.saved:
            self._restore()
        self.saved = {}
        logger.info(
            "Training alone, with an outer step after every %d steps: learning rate %g, Nesterov "
            "momentum %s%g.",
            *(every, self.lr),
            *(("up to ", MOMENTUM) if outer.get("outer_momentum") is None else ("", self.momentum)),
        )

    # What the hook calls.

    @property
    def facts(self) -> RunFacts:
        asked = "SIGTERM asks a process of this worker to end" if self.is_asked else None
        return RunFacts(
            stop_reason=self.termination.reason if self.ranks is None else asked,
            progress=Progress(self.metrics.pushes, self.step, self.reports.counts["tokens"]),
            loss=self._loss,
        )

    def stepped(self, step: int) -> bool:
        """An optimizer step was made; returns whether a boundary is due."""
        self.step = step
        asked, ranks = self.termination.is_asked, self.ranks
        self.is_asked = asked if ranks is None else ranks.meet(STEP, float(asked)) > 0
        return self.schedule.is_due(step)

    def after_step(self) -> None:
        self._outer_step(STEP)

    def force(self) -> bool:
        return self._outer_step(FORCE)

    def load(self) -> bool:
        self.put_global()
        self.schedule.restart(self.step)
        return True

    @torch.no_grad()
    def put_global(self) -> None:
        """Put the global parameters into the model."""
        for entry, tensor in self.tensors.live():
            if entry.name in self._global:
                tensor.copy_(self._global[entry.name])

    def leave(self, *, hasty: bool) -> None:
        """Nothing is in flight."""

    def saved_state(self) -> tuple[None, dict[str, Plain]]:
        """The global parameters and the momentum, for the checkpoint of a script."""
        vectors = {"global": self._global, "momentum": self._momentum}
        state: Plain = {
            name: {tensor: values.to("cpu", copy=True) for tensor, values in found.items()}
            for name, found in vectors.items()
        }
        state["checksums"] = {name: list(sums) for name, sums in checksums(self.tensors).items()}
        return None, {str(ProcessName(self.worker_id, *self._place)): state}

    # The outer step.

    @property
    def momentum(self) -> float:
        """Of the next outer step."""
        done = min(1.0, self.metrics.pushes / WARMUP)
        rising = FIRST_MOMENTUM + done * (MOMENTUM - FIRST_MOMENTUM)
        return rising if self._fixed_momentum is None else self._fixed_momentum

    @property
    def _place(self) -> tuple[int, int]:
        return (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.count)

    @torch.no_grad()
    def _outer_step(self, call: str) -> bool:
        """Returns whether it was made. Interrupted, each tensor has been stepped or not."""
        began = time.monotonic()
        self.reports.read(began, at_once=True)
        self._loss = self.reports.loss
        watch = self.tensors.watch
        if watch is not None and (changed := watch.look()) is not None:
            logger.warning("%s", changed)
        local = {e.name: tensor for e, tensor in self.tensors.live() if e.name in self._global}
        bad = next((name for name, tensor in local.items() if not is_finite(tensor)), None)
        is_bad = bad is not None
        if self.ranks is not None:
            is_bad = self.ranks.meet(call, float(is_bad)) > 0
        if is_bad:
            self.metrics.rejected += 1
            logger.warning(
                "%s is not finite at step %d, so no outer step was made, and the model is back at the "
                "last global parameters. If it happens again, lower the learning rate or clip "
                "gradients.",
                *(bad or "A tensor of another process", self.step),
            )
            self.put_global()
        else:
            for name, tensor in local.items():
                self._move(name, tensor)
            self.metrics.pushes += 1
        self.schedule.restart(self.step)
        self.metrics.seconds_waited += time.monotonic() - began
        return not is_bad

    def _move(self, name: str, local: Tensor) -> None:
        """On the device of the tensor; memory is taken before anything changes.

        A result that is not finite is not taken: the tensor and its momentum stay as they were.
        """
        if name not in self._momentum:  # a buffer
            self._global[name].copy_(local)
            return
        wide, device = _wide(local), local.device
        base = self._global[name].to(device)
        # From the values that training began with: those of a narrower dtype are rounded.
        gradient = base.to(local.dtype).to(wide) - local.to(wide)
        momentum = self._momentum[name].to(device).mul(self.momentum).add_(gradient)
        moved = base.add(gradient.add_(momentum, alpha=self.momentum), alpha=-self.lr)
        if is_finite(moved.to(local.dtype)) and is_finite(momentum):
            self._global[name].copy_(moved)
            self._momentum[name].copy_(momentum)
        else:
            logger.warning(
                "The outer step of %s at step %d is not finite, so it was not taken. Lower outer_lr.",
                *(name, self.step),
            )
        local.copy_(self._global[name])

    def _restore(self) -> None:
        """Continue from `saved`; raises UsageError where it is not of this worker and model."""
        own = next((each for name, each in self.saved.items() if self._is_own(name)), None)
        if own is None:
            rank, count = self._place
            raise UsageError(
                f"The saved outer optimizer is not that of process {rank} of {count}; with "
                "server='local' as many processes resume as have saved."
            )
        try:
            check_model(self.tensors, own["checksums"])
            for ours, theirs in ((self._global, own["global"]), (self._momentum, own["momentum"])):
                for name, tensor in ours.items():
                    tensor.copy_(theirs[name].view_as(tensor))
        except (KeyError, TypeError, RuntimeError) as error:
            raise UsageError(f"This is not the state of this worker: {error!r}.") from None

    def _is_own(self, name: str) -> bool:
        found = ProcessName.read(name)
        return found is not None and (found.rank, found.count) == self._place


def outer_states(state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Plain]:
    """The states of outer optimizers in what one or all processes of a worker saved."""
    states = [state] if isinstance(state, Mapping) else state
    return {name: each for found in states for name, each in (found.get("outer") or {}).items()}


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype that a tensor's global values are kept in."""
    is_float = tensor.dtype.is_floating_point
    return torch.promote_types(tensor.dtype, torch.float32) if is_float else tensor.dtype
