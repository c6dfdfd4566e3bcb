"""DiLoCoWorker: the two lines that make a training script take part in a run.

    with DiLoCoWorker(model, optimizer, server="tcp://10.0.0.1:8512") as diloco:
        for batch in loader:
            ...
            optimizer.step()

After every H optimizer steps (a *boundary*) the pseudo-gradient is frozen and pushed, and training waits
for the new global parameters. With P fragments there are P boundaries in H steps, one for each part of
the model, and training may go on while a fragment is under way (Streaming DiLoCo, Douillard et al. 2025,
arXiv 2501.18512); what happens then is in `boundaries`. The network never raises into the training loop;
what goes wrong is logged under "diloco.worker" and shown in `sync_metrics`.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from diloco_protocol import RunConfig, Unreachable, UsageError
from diloco_worker.boundaries import Boundaries
from diloco_worker.env import Settings, default_worker_id, resolve
from diloco_worker.link import Link
from diloco_worker.metrics import SyncMetrics
from diloco_worker.news import Progress
from diloco_worker.patience import Patience
from diloco_worker.reports import Pace, Reports
from diloco_worker.session import Phase, Session
from diloco_worker.snapshot import ModelTensors

logger = logging.getLogger("diloco.worker")

# Seconds of waiting before the first word about it at joining.
FIRST_WORD_S = 2.0


class DiLoCoWorker:
    """Keeps a model in step with the other workers of a run. A context manager.

    Args:
        model: parameters in bf16, fp16, fp32 or fp64, buffers of any kind, tied weights, frozen parts.
        optimizer: any `torch.optim.Optimizer`; its steps are the inner steps that are counted, so
            gradient accumulation and the skipped steps of an AMP scaler come out right.
        server: the broker's address. Without one here and in DILOCO_SERVER everything is a no-op.
        sync_every: H, optimizer steps between two pushes of the same fragment. In asynchronous mode
            a worker may have its own.
        worker_id: name in displays, unique in the run; default: host name and a random ending.
        wire_dtype: of pseudo-gradients: "fp32", "bf16" or "fp16". In asynchronous mode a worker may
            have its own.
        num_fragments: P, parts of the model that are synchronised one after the other.
        fragment_sync_delay: tau, optimizer steps from sending a fragment to merging the reply; with 0
            training waits for it.
        fragment_update_alpha: weight of the local parameters in that merge, 0 to 1.
        dylu: Dynamic Local Updates: True insists on them, False takes no part in them and keeps the
            run's H.
        heartbeat_interval: seconds; 0 turns heartbeats off.
        max_sync_retries: at one boundary, how often the connection may break and the push be offered
            again before training goes on with the delta in flight. Default 3.
        timeout: seconds without a sign of life from the broker, after which a boundary waits no
            longer. Default 600.
        keys: CURVE keys; not in this release.
        process_group: not in this release.
        extra: a small dict, shown in displays.

    Each keyword except `process_group` has a variable DILOCO_<KEYWORD> behind it. None means: what the
    variable says, else what the broker says. A value that differs from the broker's is refused, except
    where the list says otherwise.

    Raises:
        UsageError: a value that cannot work, or a model that cannot be exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        server: str | None = None,
        *,
        sync_every: int | None = None,
        worker_id: str | None = None,
        wire_dtype: str | None = None,
        num_fragments: int | None = None,
        fragment_sync_delay: int | None = None,
        fragment_update_alpha: float | None = None,
        dylu: bool | None = None,
        heartbeat_interval: float | None = None,
        max_sync_retries: int | None = None,
        timeout: float | None = None,
        keys: str | None = None,
        process_group: object | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if process_group is not None:
            raise UsageError(
                "process_group is set, but this release has no workers of several processes; "
                "leave it out and give each process a DiLoCoWorker of its own."
            )
        self._settings: Settings = resolve(
            {
                "server": server,
                "sync_every": sync_every,
                "worker_id": worker_id,
                "wire_dtype": wire_dtype,
                "num_fragments": num_fragments,
                "fragment_sync_delay": fragment_sync_delay,
                "fragment_update_alpha": fragment_update_alpha,
                "dylu": dylu,
                "heartbeat_interval": heartbeat_interval,
                "max_sync_retries": max_sync_retries,
                "timeout": timeout,
                "keys": keys,
                "extra": extra,
            }
        )
        self.worker_id: str = self._settings.worker_id or default_worker_id()
        _check_pair(model, optimizer)
        self._optimizer = optimizer
        self._tensors: ModelTensors | None = None
        self._link: Link | None = None
        if self._settings.server is not None:
            self._tensors = ModelTensors.of_module(model)
        self._boundaries: Boundaries | None = None
        self._hook: Any = None
        self._clock: Callable[[], float] = time.monotonic
        self._reports = Reports()
        self._pace = Pace()
        self._counters = SyncMetrics()
        self._step = 0
        self._cycle_start = 0

    # A stay in the run.

    def __enter__(self) -> DiLoCoWorker:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)

    def start(self) -> DiLoCoWorker:
        """Join the run and put its parameters into the model.

        Waits for the broker, for as long as it takes, and says so; Ctrl-C works.

        Raises:
            Refused: the broker does not take this worker, with its sentence.
            UsageError: this worker has been started before.
        """
        if self._settings.server is None or self._tensors is None:
            return self
        if self._link is not None:
            raise UsageError("A DiLoCoWorker starts once; make a new one to join again.")
        settings, tensors = self._settings, self._tensors
        session = Session(
            self.worker_id,
            tensors.manifest,
            lambda: secrets.randbits(64),
            wants=settings.wants,
            heartbeat_interval=settings.heartbeat_interval,
            host=socket.gethostname(),
            pid=os.getpid(),
            extra=settings.extra,
        )
        self._link = Link(
            self._settings.server, session, capture=tensors.capture, pinned=tensors.is_on_cuda
        )
        self._publish(waiting=True)
        self._link.start()
        try:
            self._await_model(self._link)
            self._take_model(self._link)
        except BaseException:
            self._link.close("it did not get to training")
            raise
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        self._pace.resume(self._clock())
        return self

    def close(self, *, failed: bool = False) -> None:
        """Wait for every push in flight, tell the broker, and leave the model as it is.

        Waits at most `timeout` seconds in all. Steps since the last boundary stay in the model and are
        not sent; see `force_sync`.

        Args:
            failed: leave at once; what is in flight may be lost.
        """
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        link = self._link
        if link is None:
            return
        try:
            if not failed and not link.has_ended and self._boundaries is not None:
                self._boundaries.leave()
        finally:
            link.close("its training ended with an error" if failed else "")

    # During training.

    def report(
        self,
        loss: float | Tensor | None = None,
        tokens: int | Tensor | None = None,
        samples: int | Tensor | None = None,
        **extra: Any,
    ) -> None:
        """Tell how training goes; at each step or now and then. Cheap, also with CUDA tensors.

        Args:
            loss: of this step.
            tokens: that this step was computed from; they are added up. A run may weigh each
                contribution by them.
            samples: the same in training examples.
            extra: kept in `reported`; the wire has no place for them yet.

        Raises:
            UsageError: a tensor that is not a single value.
        """
        if self._link is not None:
            self._reports.add(loss, tokens, samples, extra)

    def force_sync(self) -> bool:
        """Make the boundary now. Returns whether the delta is in the global parameters.

        With P fragments these are the next P rounds, in order, each waited for and merged at once. The
        others reach theirs when they do, so this may wait up to a whole round (with fragments P).
        """
        if self._boundaries is None or self._link is None or self._link.has_ended:
            return False
        return self._between_steps(Boundaries.force)

    def load_global(self) -> bool:
        """Put the newest global parameters into the model: these are the ones to evaluate.

        All fragments are loaded. Local steps since the last boundary are dropped, so call it right
        behind one or at the end. Returns False, and leaves the model alone, when the broker cannot be
        reached.
        """
        if self._boundaries is None or self._link is None:
            return False
        if self._link.has_ended:
            logger.warning("load_global() came after the worker has left; the model is as it was.")
            return False
        return self._between_steps(Boundaries.load)

    @property
    def should_stop(self) -> bool:
        """True once the broker has said that it shuts down."""
        return self._link is not None and self._link.stopping is not None

    @property
    def sync_metrics(self) -> SyncMetrics:
        """Counters as they are now: attributes, or a mapping."""
        link, own = self._link, self._counters
        return SyncMetrics(
            rounds=own.rounds,
            bytes_up=own.bytes_up + (link.bytes_up if link else 0),
            bytes_down=own.bytes_down + (link.bytes_down if link else 0),
            seconds_waited=own.seconds_waited,
            retries=own.retries + (link.retries if link else 0),
            reconnections=own.reconnections + (link.reconnections if link else 0),
            rejected=own.rejected,
            staleness=own.staleness,
            late_merges=own.late_merges,
            unsynced_steps=self._boundaries.unsynced_steps if self._boundaries else 0,
            last_error=link.last_error if link else None,
        )

    @property
    def config(self) -> RunConfig | None:
        """How the run is trained, as the broker says; None before joining."""
        return self._link.config if self._link else None

    @property
    def sync_every(self) -> int | None:
        """H in use, which Dynamic Local Updates may change from cycle to cycle; None before joining."""
        return self._boundaries.turns.sync_every if self._boundaries else None

    @property
    def local_step(self) -> int:
        """Optimizer steps so far."""
        return self._step

    @property
    def sync_count(self) -> int:
        """Pseudo-gradients of this worker that are in the global parameters."""
        return self._counters.rounds

    @property
    def reported(self) -> Mapping[str, Any]:
        """The `extra` values of `report`, the latest of each."""
        return dict(self._reports.extra)

    def state_dict(self) -> dict[str, Any]:
        """Counters for a checkpoint of the script. The parameters come from the broker.

        `local_step` and `cycle_start` say where in its cycle of H steps the worker is, so that a
        worker that goes on from here reaches its next boundary after what is left of it.
        """
        metrics = self.sync_metrics.plain()
        del metrics["last_error"], metrics["unsynced_steps"]
        return {
            "local_step": self._step,
            "cycle_start": (
                self._boundaries.turns.cycle_start if self._boundaries else self._cycle_start
            ),
            "sync_count": self.sync_count,
            "tokens": self._reports.tokens,
            "samples": self._reports.samples,
            "metrics": metrics,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a `state_dict`; before `start`.

        Raises:
            UsageError: the worker runs already, or the dict is not one of ours.
        """
        if self._link is not None:
            raise UsageError("load_state_dict() belongs before the worker starts.")
        try:
            self._counters = SyncMetrics(**state["metrics"])
            self._step = int(state["local_step"])
            self._cycle_start = int(state.get("cycle_start", 0))
            self._reports.go_on_from(int(state["tokens"]), int(state.get("samples", 0)))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"This is no state of a DiLoCoWorker: {error!r}.") from None

    # Joining.

    def _await_model(self, link: Link) -> None:
        def settled() -> bool:
            return link.refused_for_good or (
                link.layout is not None
                and all(p.fragment in link.arrivals for p in link.layout.all if p.chunks)
            )

        patience = Patience(self._clock, first=FIRST_WORD_S)
        while not link.wait_for(settled, patience.pause()):
            if link.has_ended:
                raise Unreachable(f"Joining {link.address} failed: {link.last_error}")
            if link.phase is Phase.JOINED:
                patience.say(f"Joined at {link.address}; waiting for the first parameters.")
            else:
                patience.say(f"Waiting to join the run: {link.describe()}.")
        if link.refused_for_good:
            assert link.refusal is not None
            raise link.refusal

    def _take_model(self, link: Link) -> None:
        assert link.layout is not None and self._tensors is not None
        frozen = link.layout.frozen
        if frozen.chunks:
            arrival = link.take(frozen.fragment)
            assert arrival is not None and arrival.state is not None
            self._tensors.put(arrival.state)
            link.stand_on(frozen.fragment, None)
        self._boundaries = Boundaries(
            self._tensors,
            link,
            self._settings,
            self._reports,
            self._counters,
            self._publish,
            self._clock,
            step=self._step,
            cycle_start=self._cycle_start,
        )

    # Steps.

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        boundaries = self._boundaries
        assert boundaries is not None
        # A fused optimizer leaves out an overflowing step by itself; the AMP scaler tells it so here.
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None and float(overflow):
            return
        self._pace.step(self._clock())
        self._step += 1
        boundaries.step = self._step
        self._guarded(lambda: boundaries.after_step(self._step))
        self._publish()
        self._pace.resume(self._clock())

    def _between_steps(self, action: Callable[[Boundaries], bool]) -> bool:
        """Something that the script asks for between two steps; its time is no training."""
        boundaries = self._boundaries
        assert boundaries is not None
        began = self._clock()
        done: list[bool] = []
        self._guarded(lambda: done.append(action(boundaries)))
        self._publish()
        self._pace.leave_out(self._clock() - began)
        return bool(done and done[0])

    def _guarded(self, action: Callable[[], object]) -> None:
        """Do something for the run that must not end the training, whatever it meets."""
        try:
            action()
        except Exception as error:
            logger.exception("Synchronising failed; training goes on, next attempt in a round.")
            if self._boundaries is not None:
                self._boundaries.restart()
            if self._link is not None:
                self._link.last_error = f"Synchronising failed: {error!r}"

    def _publish(self, waiting: bool = False) -> None:
        """What the next heartbeat tells."""
        if self._link is not None:
            self._link.progress = Progress(
                step=self._step,
                inner_step=self._boundaries.position if self._boundaries else 0,
                waiting=waiting,
                steps_per_s=self._pace.steps_per_s,
                loss=self._reports.loss,
                tokens=self._reports.tokens,
            )


def _check_pair(model: object, optimizer: object) -> None:
    """Raise UsageError unless this optimizer trains this model."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer."
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trainable and not any(id(parameter) in stepped for parameter in trainable):
        raise UsageError(
            "The optimizer holds none of the model's parameters; make it from model.parameters(), "
            "after the model has been moved or wrapped."
        )
