"""DiLoCoWorker: the two lines that make a training script join a run.

    with DiLoCoWorker(model, optimizer, server="tcp://10.0.0.1:8512") as diloco:
        for batch in loader:
            ...
            optimizer.step()

After every H optimizer steps (a *boundary*) the pseudo-gradient is frozen and pushed, and training
waits for the new global parameters. With P fragments there are P boundaries in H steps, one for each
part of the model, and training may go on while a fragment is in flight (Streaming DiLoCo, Douillard et
al. 2025, arXiv 2501.18512): see `sync.boundary`. The network never raises into the training loop;
errors are logged under "diloco.worker" and shown in `sync_metrics`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from diloco_protocol import Kind, RunConfig, UsageError
from diloco_protocol.messages import Heartbeat, Progress
from diloco_worker import pair, settings
from diloco_worker.counted_steps import CountedSteps
from diloco_worker.group.beginning import begin_together, same_resumption, same_settings
from diloco_worker.launching import write_end
from diloco_worker.local import LocalOuter, config_of, outer_states
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.placement import Placement
from diloco_worker.model.spread.ranks import GroupBroken, Ranks, group_of
from diloco_worker.model.spread.spread_tensors import SpreadTensors
from diloco_worker.ports import PORTS, LocalPorts, Participant, RunFacts
from diloco_worker.push_log import PushLog
from diloco_worker.reports import Reports
from diloco_worker.saved_state import Resumption, Saved, check_model
from diloco_worker.session.events import BeatNow
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.transport import own_log, uncaught
from diloco_worker.transport.broker_address import Given
from diloco_worker.transport.link import Link
from diloco_worker.transport.sigterm import Termination
from diloco_worker.unit_line import UnitLine

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

logger = logging.getLogger("diloco.worker")

T = TypeVar("T")

# Seconds for the last message to the broker.
LINK_PATIENCE_S = 5.0
# Characters of a warning in a heartbeat; the log has all of it.
MAX_WARNING_LENGTH = 300


class DiLoCoWorker:
    """Keeps a model in step with the other workers of a run. A context manager.

    Args:
        model: parameters in bf16, fp16, fp32 or fp64, buffers of any kind, tied weights, frozen parts.
            A list: the parts of one model, as of a pipeline, each with distinct names.
        optimizer: any `torch.optim.Optimizer`, or a wrapper of one such as Accelerate's; its steps are
            counted. With a list, one step is counted when all have stepped: see `counted_steps`.
        server: the broker's address, several separated by commas, or a function that returns one, called
            whenever the broker is unreachable; or "local", for an outer optimizer in this process: see
            `local`. Without one, here and in DILOCO_SERVER, every call is a no-op.
        sync_every: H, optimizer steps between two pushes of the same fragment. It may differ from the
            run's; in a run with rounds a larger value is reduced to the run's.
        worker_id: name in displays, unique in the run; default: host name and a random ending.
        keys: the key file that `diloco-broker keygen` made for this worker. Its name is the default of
            worker_id, and the only one that a broker with keys accepts.
        wire_dtype: of pseudo-gradients: "fp32", "bf16", "fp16", "int8", "int4", "int4z" or "sparse" (or
            "sparse:K"; docs/codecs.md). It may differ from the run's.
        process_group: the processes that are one worker together: "world", a
            `torch.distributed.ProcessGroup` or a DeviceMesh. All of them make the worker, and call the
            same methods at the same steps; see docs/frameworks.md.
        timeout: seconds without a sign of life from the broker until a boundary waits no longer.
            Default 600.
        expect: required values of the run's `config`, such as {"num_fragments": 4}. Other runs are
            refused at joining.
        options: rarely used settings, a `WorkerOptions` or a mapping of its fields.

    Each but model, optimizer, process_group and options has a variable DILOCO_<NAME>. None: the value
    of the variable, else that of the broker.

    Raises:
        UsageError: an invalid value, or a model that cannot be exchanged.
    """

    @uncaught.shortens_uncaught
    @settings.suggesting
    def __init__(  # noqa: PLR0913  each keyword is a public setting
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        server: Given | None = None,
        *,
        sync_every: int | None = None,
        worker_id: str | None = None,
        keys: str | Path | None = None,
        wire_dtype: str | None = None,
        process_group: object | None = None,
        timeout: float | None = None,
        expect: Mapping[str, Any] | None = None,
        options: settings.WorkerOptions | Mapping[str, Any] | None = None,
    ) -> None:
        # The fields of `Settings` are named as the arguments.
        self._settings: settings.Settings = settings.resolve(locals())
        own_log.asked_level()  # raises for an invalid one
        if self._settings.is_local:
            config_of(self._settings)  # likewise
        self._keys, chosen_id = None, self._settings.worker_id
        if self._settings.has_broker:
            self._keys, chosen_id = settings.worker_keys(self._settings.keys, chosen_id)
        ranks = self._ranks = None if process_group is None else Ranks(group_of(process_group))
        if ranks is not None:
            chosen_id = same_settings(ranks, self._settings, chosen_id)
        self._chosen_id = chosen_id
        self.worker_id: str = chosen_id or settings.default_worker_id()
        if ranks is not None:
            self.worker_id = ranks.broadcast(self.worker_id)
        model, counted = pair.check_pair(model, optimizer)
        self._steps = CountedSteps(model, counted, stepped=self._after_step, tell=self._trouble)
        self._tensors: ModelTensors | None = None
        # On ranks other than the leader these are stubs: see `group`.
        self._link: Link | None = None
        self._model = model
        if self._settings.server is not None:
            pair.check_free(model)
            if ranks is None:
                self._tensors = ModelTensors.of_module(model)
            else:
                self._tensors = SpreadTensors.of_group(model, ranks, self._settings.tied or ())
            self._tensors.may_pin = self._settings.pin_memory is not False
        self._ports: LocalPorts | LocalOuter | None = None
        self._resumption: Resumption | None = None
        # The loaded state, until training starts: with a broker, and of server="local".
        self._carried: object = None
        self._outer: Mapping[str, Any] = {}
        self._audit: PushLog | None = None
        self._termination = Termination(
            self._wake, at_once=self._settings.handle_signals == settings.EXIT
        )
        self._reports = Reports()
        # For the `data.WorkQueue` of this worker.
        self.units = UnitLine(
            is_alone=not self._settings.has_broker,
            leads=ranks is None or ranks.leads,
            is_asked=lambda: self._termination.is_asked,
        )
        self._counters = SyncMetrics()
        self._step = 0
        self._cycle_start = 0
        self._saved = 0  # the number of the last completed request to save

    # Joining and leaving.

    def __enter__(self) -> DiLoCoWorker:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            what = "SIGTERM" if self._termination.is_asked else type(error).__name__
            self._close(f"it was ended by {what}", hasty=True)
        else:
            self.close(failed=error is not None)

    def start(self) -> DiLoCoWorker:
        """Join the run and put its parameters into the model.

        Waits for the broker without a limit, and logs that; Ctrl-C works. After a `load_state_dict` the
        parameters stay as the script loaded them, unless the run continued in a way that makes them
        unusable, which is logged. A failure leaves nothing behind: no thread, member or
        signal handler.

        Raises:
            Refused: the broker refuses this worker.
            UsageError: this worker was started before, its audit log cannot be written, the model does
                not match the loaded state, or cannot start a run; or the broker rejects the data set
                of a `WorkQueue`.
        """
        settings.warn_of_silence(self._settings.server)
        if self._settings.server is None or self._tensors is None:
            return self
        if self._has_started:
            raise UsageError("A DiLoCoWorker starts once; make a new one to join again.")
        try:
            own_log.speak(leads=self._ranks is None or self._ranks.leads)
            return self._start(self._settings.server, self._tensors)
        except BaseException:
            self._steps.stop()
            self._release("it did not start training")
            raise

    def _start(self, server: Given, tensors: ModelTensors) -> DiLoCoWorker:
        pair.occupy(self._model, self, self.worker_id)
        own, ranks, resumption = self._settings, self._ranks, self._resumption
        checks = [tensors.check_values]
        if resumption is not None:
            checks.append(partial(check_model, tensors, resumption.checksums))
        if ranks is not None:
            same_resumption(ranks, resumption, self._step, self._cycle_start)
            checks = [partial(ranks.agreed, check) for check in checks]
        for check in checks:
            check()
        leads = ranks is None or ranks.leads
        self._audit = PushLog(own.audit if leads else None, self.worker_id)
        parts = Participant(
            server=server,
            worker_id=self.worker_id,
            tensors=tensors,
            settings=own,
            resumption=resumption,
            keys=self._keys,
            placement=Placement.of(tensors.devices, own.pin_memory, own.keep_global_on),
            audit=self._audit,
            termination=self._termination,
            reports=self._reports,
            metrics=self._counters,
            publish=self._publish,
            step=self._step,
            cycle_start=self._cycle_start,
            opened=self._opened,
        )
        if own.is_local:
            self._ports = LocalOuter.of(parts, ranks, self._outer)
        elif ranks is None:
            self._ports = PORTS.get(str(server), LocalPorts)(**vars(parts)).join()
        else:
            self._ports = begin_together(parts, ranks)
        opened = self.units.started
        opened() if ranks is None else ranks.agreed(opened)
        self._resumption, self._carried, self._outer = None, None, {}
        self._steps.start()
        self._termination.is_training = True
        return self

    def _opened(self, link: object) -> None:
        self._link = self.units.link = cast(Link, link)
        self._publish(waiting=True)

    def _release(
        self, reason: str, patience: float = LINK_PATIENCE_S, *, trained: bool = False
    ) -> None:
        """Release what would outlive the worker: signal handler, model, link, audit log."""
        self._termination.restore()
        pair.vacate(self._model, self)
        try:
            if self._link is not None:
                self._link.close(reason, patience)
        finally:
            if self._audit is not None:
                if trained:
                    if not self._step:
                        logger.warning("%s left without a step.", self.worker_id)
                    elif not self.sync_count:
                        logger.warning(
                            "%s left without a closed round: none of its %d steps is in the run, where "
                            "a round takes %s of them.",
                            *(self.worker_id, self._step, self.sync_every),
                        )
                    self._audit.left(self._step)
                    write_end(self.run_is_over, asked=self.stop_reason is not None)
                self._audit.close()

    def close(self, *, failed: bool = False) -> None:
        """Wait for every push in flight, leave the run, and leave the model as it is.

        Waits at most `timeout` seconds in all; after SIGTERM or Ctrl-C only until pushes in flight were
        sent, at most 10 s. Steps since the last boundary stay in the model and are not sent; see
        `force_sync`, and `state_dict`.

        Args:
            failed: leave at once; pushes in flight may be lost.
        """
        self._close("its training ended with an error" if failed else "", failed=failed)

    def _close(self, reason: str, *, failed: bool = False, hasty: bool = False) -> None:
        """Leave, with this reason for the broker. `hasty`: the process is about to end."""
        self._steps.stop()
        self._termination.is_training = False
        if not self._has_started:
            return
        self._termination.tell()
        patience = LINK_PATIENCE_S
        try:
            if not failed and self._ports is not None:
                self._ports.leave(hasty=hasty or self._termination.is_asked)
        except KeyboardInterrupt:
            patience = 0.0 if hasty else patience  # the second Ctrl-C
            raise
        finally:
            self._release(reason, patience, trained=True)

    # During training.

    @settings.suggesting
    def report(
        self,
        loss: float | Tensor | None = None,
        tokens: int | Tensor | None = None,
        samples: int | Tensor | None = None,
    ) -> None:
        """Report the progress of training; at each step or now and then. Cheap, also with CUDA tensors.

        Args:
            loss: of this step.
            tokens: of this step; they are added up. A run may weigh each contribution by them.
            samples: training examples of this step, likewise.

        Raises:
            UsageError: a value that is not a single number, a count that is negative, not finite, or
                adds up to more than 2**53 - 1, an unknown keyword. A loss may be NaN.
        """
        if self._has_started:
            self._reports.add(loss, tokens, samples)
        elif self._tensors is not None:
            settings.warn_once(
                f"DiLoCoWorker {self.worker_id!r} was made but not started, so this script trains "
                "alone; train in `with DiLoCoWorker(...) as diloco:`, or call start() first."
            )

    def force_sync(self) -> bool:
        """Make the boundary now. Returns whether the delta is in the global parameters.

        With P fragments these are the next P rounds, in order, each waited for and merged at once. The
        other workers reach theirs later, so this may wait up to a whole round (P rounds with fragments).
        """
        if self._ports is None or self._has_left:
            return False
        return self._between_steps(self._ports.force)

    def load_global(self) -> bool:
        """Put the newest global parameters into the model, to evaluate them.

        All fragments are loaded. Local steps since the last boundary are dropped, so call it after a
        boundary or at the end. Returns False, and leaves the model alone, when the broker cannot be
        reached.
        """
        if self._ports is None:
            return False
        if self._has_left:
            logger.warning(
                "load_global() was called after the worker left; the model is unchanged."
            )
            return False
        return self._between_steps(self._ports.load)

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """`with diloco.global_parameters():` the model has the global parameters received last.

        Evaluate them there, and make no step. Nothing is sent; afterwards the model is as before, bit
        for bit. Costs a copy of the trained parameters, on their device.
        """
        ports, tensors = self._ports, self._tensors
        if ports is None or tensors is None:
            yield
            return
        tensors.begin_view()
        trained = [each for entry, each in tensors.live() if entry.kind is not Kind.FROZEN]
        local = [tensor.clone() for tensor in trained]
        try:
            ports.put_global()
            yield
        finally:
            with torch.no_grad():
                for tensor, values in zip(trained, local, strict=True):
                    tensor.copy_(values)

    # The run.

    @property
    def config(self) -> RunConfig | None:
        """The run's configuration; None before joining."""
        if isinstance(self._ports, LocalOuter):
            return self._ports.config
        return self._link.config if self._link else None

    @property
    def sync_every(self) -> int | None:
        """H in use, which Dynamic Local Updates may change from cycle to cycle; None before joining."""
        return self._ports.schedule.sync_every if self._ports else None

    @property
    def progress(self) -> Progress:
        """The progress of the run, with the newest version; all 0 before joining.

        A late worker places its learning-rate schedule by `progress.steps`: the optimizer steps of a
        worker that was in the run from the start.
        """
        return self._facts.progress

    @property
    def round(self) -> int:
        """Completed rounds of the run; in asynchronous mode applied pushes."""
        return self.progress.rounds

    @property
    def global_loss(self) -> float | None:
        """Mean of the losses that the workers reported with the last round (in asynchronous mode their
        latest).
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

    @property
    def should_stop(self) -> bool:
        """True once the run is over, or SIGTERM was received; see `stop_reason`.

        Read it after each step: the second step that ends after SIGTERM raises SystemExit.
        """
        return self.stop_reason is not None

    @property
    def stop_reason(self) -> str | None:
        """Why the script should stop, a sentence; else None. See `should_stop`.

        The run is over when an operator ended it (`diloco-broker shutdown`) or removed this worker. A
        restart of the broker is not a reason: boundaries do not wait for it, and the worker rejoins
        when it is back. A script that goes on after the end of the run trains alone, and rejoins if its
        broker returns.
        """
        return self._facts.stop_reason if self._ports else self._termination.reason

    @property
    def run_is_over(self) -> bool:
        """True once the broker has ended the run for this worker."""
        return self._facts.is_over

    @property
    def should_save(self) -> bool:
        """An operator requests a save (`diloco-broker save-all`); True until `saved` is called."""
        return self._facts.save_order not in (0, self._saved)

    def saved(self) -> None:
        """Notify the broker, at once, that the script has saved."""
        if self._link is not None and self.should_save:
            self._saved = self._facts.save_order
            self._publish()
            self._link.tell(BeatNow())

    @property
    def sync_metrics(self) -> SyncMetrics:
        """The current counters: attributes, or a mapping."""
        metrics = replace(
            self._counters,
            unsynced_steps=self._ports.unsynced_steps if self._ports else 0,
            model_change=self._model_change,
            last_error=self._steps.problem or self._reports.problem,
        )
        if (link := self._link) is not None:
            metrics.bytes_up += link.bytes_up
            metrics.bytes_down += link.bytes_down
            metrics.retries += link.retries
            metrics.reconnections += link.reconnections
            metrics.last_error = metrics.last_error or link.last_error
        return metrics

    @property
    def shard(self) -> tuple[int, int]:
        """Index and count of this worker's share of the data, for samplers; constant for this worker.

        The values of DILOCO_SHARD_INDEX and DILOCO_NUM_SHARDS, else the index that the broker
        assigned, and the number of workers. (0, 1) without a broker.

        Raises:
            UsageError: this worker has not started, the variables are not a share, or the broker gives
                none.
        """
        if self._settings.has_broker and self._link is None:
            raise UsageError(
                "shard is known once the worker has started; read it within the `with`."
            )
        chosen = settings.chosen_shard(os.environ)
        given = chosen or (self._link.shard if self._link is not None else (0, 1))
        if given is None:
            raise UsageError(
                f"This broker assigns no shares of the data; set {settings.SHARD_INDEX} and "
                f"{settings.NUM_SHARDS}."
            )
        return given

    def state_dict(self) -> dict[str, Any]:
        """The state to resume this worker from, for the checkpoint of the script.

        Take it between two steps, together with the state of model and optimizer: they belong to the
        same moment. Plain values and tensors, so `torch.load(..., weights_only=True)` reads it; about
        one fp32 copy of the model, and more while deltas are in flight (see `resume`).

        `local_step` and `cycle_start` are the worker's place in its cycle of H steps. "resume" has the
        parameters and deltas; without it a worker begins with the run's parameters, and makes its next
        boundary after the rest of the cycle. With server="local" it is None, and "outer" has the global
        parameters and the momentum.
        """
        metrics = dict(self.sync_metrics)
        for passing in ("last_error", "unsynced_steps", "model_change"):
            del metrics[passing]
        self._reports.read(time.monotonic(), at_once=True)
        ports = self._ports
        resume, outer = ports.saved_state() if ports else (self._carried, self._outer)
        return {
            "local_step": self._step,
            "cycle_start": ports.schedule.cycle_start if ports else self._cycle_start,
            "sync_count": self.sync_count,
            **self._reports.counts,
            "metrics": metrics,
            "resume": resume,
            **({"outer": outer} if outer else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from a `state_dict`; before `start`, and with model and optimizer of the same moment.

        Each process of a worker loads its own, or all of them a list of all: then the number of
        processes may have changed. See `load_dcp` for states that `torch.distributed.checkpoint` saved.

        The worker keeps its id, unless the script gives it one. A state without "resume" only sets the
        counters and the place in the cycle.

        Raises:
            UsageError: the worker has started, or the dict is not one of ours, or of another model.
        """
        if self._has_started:
            raise UsageError("load_state_dict() must be called before the worker starts.")
        saved = Saved.of(state, self._tensors)
        self._counters, self._carried = saved.counters, saved.plain
        self._step, self._cycle_start = saved.step, saved.cycle_start
        self._reports.counts = dict(saved.counts)
        if self._settings.is_local:
            self._outer = outer_states(state)
            return
        self._resumption = saved.resumption_of(self._chosen_id)
        if self._resumption is not None:
            self.worker_id = self._resumption.worker_id

    def load_dcp(
        self, checkpoint: str | os.PathLike[str] | StorageReader, name: str = "diloco"
    ) -> None:
        """`load_state_dict` of a state that `torch.distributed.checkpoint` saved under this name.

        As with `dcp.save({"diloco": worker.state_dict(), ...})` in all processes; their number may have
        changed. Each reads for itself, and only its own state where there are as many. Like `dcp.load`
        it uses pickle, so load only trusted checkpoints.

        Args:
            checkpoint: the folder, or a StorageReader of it.

        Raises:
            UsageError: as `load_state_dict`; or the checkpoint has no such state.
        """
        from diloco_worker.group.dcp import saved_state  # torch loads it slowly

        rank, count = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.count)
        self.load_state_dict(saved_state(checkpoint, name, self._chosen_id, rank, count))

    # Steps.

    @property
    def _has_started(self) -> bool:
        return self._link is not None or self._ports is not None

    @property
    def _has_left(self) -> bool:
        """Whether calls go nowhere. In a group the ports say so, to all processes alike."""
        return self._ranks is None and self._link is not None and self._link.has_ended

    @property
    def _facts(self) -> RunFacts:
        """What is known of the run; the same at all ranks of a worker."""
        return self._ports.facts if self._ports else RunFacts()

    def _wake(self) -> None:
        if self._link is not None:
            self._link.wake()

    def _after_step(self) -> None:
        ports = self._ports
        assert ports is not None
        self._step += 1
        if self.units.has_noted:
            self.units.stepped()
        if ports.stepped(self._step):
            self._run(ports.after_step)
        self._publish()
        if ports.is_asked:
            self._termination.step_ended()

    def _between_steps(self, call: Callable[[], bool]) -> bool:
        """Run a boundary for a call between two steps; the time does not count as training."""
        began = time.monotonic()
        done = self._run(call)
        self._publish()
        self._steps.pace.leave_out(time.monotonic() - began)
        return bool(done)

    def _run(self, call: Callable[[], T]) -> T | None:
        """Run a boundary for a call of the script; errors in it must not end the training."""
        assert self._ports is not None
        try:
            with self._termination.held():
                return call()
        except GroupBroken:
            raise
        except Exception as error:
            if self._ranks is not None:
                raise GroupBroken(f"Synchronising failed in this process: {error!r}") from error
            logger.exception(
                "Synchronising failed; training continues, retrying at the next boundary."
            )
            self._ports.schedule.restart(self._step)
            if self._link is not None:
                self._link.last_error = f"Synchronising failed: {error!r}"
            return None

    def _trouble(self, text: str) -> None:
        """Report a problem of the ongoing training, at once."""
        if self._ports is None:
            return
        logger.warning("%s", text)
        if self._link is not None:
            self._link.last_error = text
            self._publish()
            self._link.tell(BeatNow())

    def _publish(self, waiting: bool = False) -> None:
        """Set the next heartbeat."""
        if self._link is not None:
            warning = self._model_change or self._steps.problem or self._reports.problem
            self._link.progress = Heartbeat(
                session=b"",
                step=self._step,
                inner_step=self._ports.schedule.position(self._step) if self._ports else 0,
                state="waiting" if waiting else "training",
                steps_per_s=self._steps.pace.steps_per_s,
                loss=self._reports.loss,
                tokens=self._reports.counts["tokens"],
                merge_delay=self._counters.merge_delay if self._counters.pushes else None,
                warning=None if warning is None else warning[:MAX_WARNING_LENGTH],
                saved=self._saved or None,
            )

    @property
    def _model_change(self) -> str | None:
        watch = self._tensors.watch if self._tensors is not None else None
        return watch.problem if watch is not None else None
