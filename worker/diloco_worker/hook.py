"""DiLoCoWorker: the two lines that make a training script take part in a run.

    with DiLoCoWorker(model, optimizer, server="tcp://10.0.0.1:8512") as diloco:
        for batch in loader:
            ...
            optimizer.step()

After every H optimizer steps (a *boundary*) the pseudo-gradient is frozen and pushed, and training waits
for the new global parameters. The network never raises into the training loop; what goes wrong is
logged under "diloco.worker" and shown in `sync_metrics`.
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
from diloco_worker.env import Settings, default_worker_id, resolve
from diloco_worker.exchange import FragmentExchange, NonFinite, Outcome
from diloco_worker.link import Link, Progress
from diloco_worker.metrics import SyncMetrics
from diloco_worker.reports import Pace, Reports
from diloco_worker.session import Phase, Session
from diloco_worker.snapshot import ModelTensors

logger = logging.getLogger("diloco.worker")

# Seconds of waiting before the first word about it at joining, and between two words anywhere.
FIRST_WORD_S = 2.0
WORD_S = 30.0


class DiLoCoWorker:
    """Keeps a model in step with the other workers of a run. A context manager.

    Args:
        model: parameters in bf16, fp16, fp32 or fp64, buffers of any kind, tied weights, frozen parts.
        optimizer: any `torch.optim.Optimizer`; its steps are the inner steps that are counted.
        server: the broker's address. Without one here and in DILOCO_SERVER everything is a no-op.
        sync_every: H, optimizer steps between two boundaries.
        worker_id: name in displays, unique in the run; default: host name and a random ending.
        wire_dtype: of pseudo-gradients: "fp32", "bf16" or "fp16".
        num_fragments: P.
        fragment_sync_delay: tau, optimizer steps.
        fragment_update_alpha: weight of the local parameters in a merge.
        dylu: Dynamic Local Updates; not in this release.
        heartbeat_interval: seconds; 0 turns heartbeats off.
        max_sync_retries: at one boundary, how often the connection may break and the push be offered
            again before training goes on with the delta in flight. Default 3.
        timeout: seconds without a sign of life from the broker, after which a boundary waits no
            longer. Default 600.
        keys: CURVE keys; not in this release.
        process_group: not in this release.
        extra: a small dict, shown in displays.

    Each keyword except `process_group` has a variable DILOCO_<KEYWORD> behind it. None means: what the
    variable says, else what the broker says. A value that differs from the broker's is refused.

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
        self._exchange: FragmentExchange | None = None
        self._hook: Any = None
        self._clock: Callable[[], float] = time.monotonic
        self._reports = Reports()
        self._pace = Pace()
        self._counters = SyncMetrics()
        self._step = 0
        self._inner_step = 0
        self._tokens_frozen = 0

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
        """Wait for a push in flight, tell the broker, and leave the model as it is.

        Steps since the last boundary stay in the model and are not sent; see `force_sync`.

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
            if (
                not failed
                and not link.has_ended
                and self._exchange is not None
                and self._exchange.flight is not None
            ):
                self._wait_for_flight(limit=self._settings.timeout, touch_model=False)
        finally:
            link.close("its training ended with an error" if failed else "")

    # During training.

    def report(
        self,
        loss: float | Tensor | None = None,
        tokens: int | Tensor | None = None,
        **extra: Any,
    ) -> None:
        """Tell how training goes; at each step or now and then. Cheap, also with CUDA tensors.

        Args:
            loss: of this step.
            tokens: that this step was computed from; they are added up.
            extra: kept in `reported`; the wire has no place for them yet.

        Raises:
            UsageError: a tensor that is not a single value.
        """
        if self._link is not None:
            self._reports.add(loss, tokens, extra)

    def force_sync(self) -> bool:
        """Make the boundary now. Returns whether the delta is in the global parameters.

        The others reach theirs when they do, so this may wait up to a whole round.
        """
        if self._exchange is None or self._link is None or self._link.has_ended:
            return False
        before = self._counters.rounds
        self._guarded(self._boundary)
        self._publish()
        return self._counters.rounds > before and self._exchange.flight is None

    def load_global(self) -> bool:
        """Put the newest global parameters into the model: these are the ones to evaluate.

        Local steps since the last boundary are dropped, so call it right behind one or at the end.
        Returns False, and leaves the model alone, when the broker cannot be reached.
        """
        exchange, link = self._exchange, self._link
        if exchange is None or link is None:
            return False
        if link.has_ended:
            logger.warning("load_global() came after the worker has left; the model is as it was.")
            return False
        self._settle()
        fragment = exchange.part.fragment
        link.want(fragment)
        wait = _Wait(self._clock)
        while not link.wait_for(lambda: fragment in link.arrivals, wait.pause()):
            reason = self._why_not_wait(link)
            if reason is not None:
                self._trouble(f"The newest parameters could not be loaded: {reason}.")
                return False
            wait.say(f"Waiting for the newest parameters; {link.describe()}.")
        arrival = link.take(fragment)
        assert arrival is not None
        if exchange.load(arrival):
            self._has_counted(exchange)
        self._inner_step = 0
        self._publish()
        return True

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
            staleness=self._exchange.staleness if self._exchange else own.staleness,
            unsynced_steps=self._unsynced_steps(),
            last_error=link.last_error if link else None,
        )

    @property
    def config(self) -> RunConfig | None:
        """How the run is trained, as the broker says; None before joining."""
        return self._link.config if self._link else None

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
        """Counters for a checkpoint of the script. The parameters come from the broker."""
        metrics = self.sync_metrics.plain()
        del metrics["last_error"], metrics["unsynced_steps"]
        return {
            "local_step": self._step,
            "sync_count": self.sync_count,
            "tokens": self._reports.tokens,
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
            self._reports.tokens = self._tokens_frozen = int(state["tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"This is no state of a DiLoCoWorker: {error!r}.") from None

    # Joining.

    def _await_model(self, link: Link) -> None:
        def settled() -> bool:
            return link.refused_for_good or (
                link.layout is not None
                and all(p.fragment in link.arrivals for p in link.layout.all if p.chunks)
            )

        wait = _Wait(self._clock, first=FIRST_WORD_S)
        while not link.wait_for(settled, wait.pause()):
            if link.has_ended:
                raise Unreachable(f"Joining {link.address} failed: {link.last_error}")
            if link.phase is Phase.JOINED:
                wait.say(f"Joined at {link.address}; waiting for the first parameters.")
            else:
                wait.say(f"Waiting to join the run: {link.describe()}.")
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
            link.hold(frozen.fragment, arrival.version, arrival.released.ledger, None)
        part = link.layout.fragments[0]
        arrival = link.take(part.fragment)
        assert arrival is not None
        self._exchange = FragmentExchange(part, self._tensors, link, arrival)

    # Steps and boundaries.

    def _after_step(self, *_: object) -> None:
        now = self._clock()
        self._pace.step(now)
        self._step += 1
        self._inner_step += 1
        self._guarded(self._look_around)
        self._publish()
        self._pace.resume(self._clock())

    def _guarded(self, action: Callable[[], None]) -> None:
        """Do something for the run that must not end the training, whatever it meets."""
        try:
            action()
        except Exception as error:
            logger.exception("Synchronising failed; training goes on, next attempt in a round.")
            self._inner_step = 0
            if self._link is not None:
                self._link.last_error = f"Synchronising failed: {error!r}"

    def _look_around(self) -> None:
        link = self._link
        assert link is not None
        self._reports.read(self._clock())
        if link.has_news:
            self._settle()
        config = link.config
        if config is None or self._inner_step < config.sync_every or link.has_ended:
            return
        exchange = self._exchange
        if exchange is not None and exchange.flight is not None and self._why_not_wait(link):
            return  # still in flight, and no use waiting for it: no second delta grows over it
        self._boundary()

    def _boundary(self) -> None:
        """Freeze what was learnt since the last boundary, push it, wait for the new parameters."""
        exchange, link = self._exchange, self._link
        assert exchange is not None and link is not None and link.config is not None
        if exchange.flight is not None and not self._wait_for_flight():
            return
        self._settle()
        now = self._clock()
        self._reports.read(now, at_once=True)
        tokens = self._reports.tokens - self._tokens_frozen
        steps, self._inner_step = self._inner_step, 0
        self._tokens_frozen = self._reports.tokens
        frozen = exchange.freeze(
            link.config.wire_dtype, steps=steps, tokens=tokens, loss=self._reports.loss
        )
        self._counters.seconds_waited += self._clock() - now
        if isinstance(frozen, NonFinite):
            self._counters.rejected += 1
            self._trouble(
                f"The pseudo-gradient of {steps} steps is not finite in {frozen.name}"
                f"{_fp16_hint(link.config.wire_dtype)}; it was not sent, and the model is back at the "
                "last global parameters. The other workers wait until the next boundary. If it "
                "happens again, lower the learning rate or clip gradients."
            )
            exchange.drop(None)
            return
        self._wait_for_flight()

    def _wait_for_flight(self, *, limit: float | None = None, touch_model: bool = True) -> bool:
        """Wait until the delta in flight has counted. Returns whether it has.

        Waits while the broker shows signs of life, at most `limit` seconds. Giving up, training goes on
        with the delta in flight.
        """
        exchange, link = self._exchange, self._link
        assert exchange is not None and link is not None
        began = self._clock()
        wait = _Wait(self._clock)
        self._publish(waiting=True)
        outcome = self._settle(touch_model=touch_model)
        reason = None
        while exchange.flight is not None:
            reason = self._why_not_wait(link)
            if limit is not None and self._clock() - began >= limit:
                reason = reason or f"it took longer than {limit:g} s"
            if reason is not None:
                break
            wait.say(f"Waiting for the round to close; {link.describe()}.")
            pause = wait.pause(self._look_again_in(link))
            if limit is not None:
                pause = min(pause, max(0.0, began + limit - self._clock()))
            # News, or a change that may end the waiting.
            link.wait_for(lambda: link.has_news or self._why_not_wait(link) is not None, pause)
            outcome = self._settle(touch_model=touch_model)
        self._counters.seconds_waited += self._clock() - began
        if exchange.flight is not None:
            if touch_model:
                exchange.train_on()
                self._trouble(
                    f"Training goes on with {exchange.flight.steps} steps in flight: {reason}. They "
                    "are merged when the broker has counted them."
                )
            else:
                self._trouble(f"Leaving with {exchange.flight.steps} steps in flight: {reason}.")
        return outcome is Outcome.COUNTED

    def _settle(self, *, touch_model: bool = True) -> Outcome:
        exchange = self._exchange
        assert exchange is not None
        outcome = exchange.settle(touch_model=touch_model)
        if outcome is Outcome.COUNTED:
            self._has_counted(exchange)
        elif outcome is Outcome.REJECTED:
            self._counters.rejected += 1
            self._trouble(
                "The broker dropped the last pseudo-gradient; the model is back at the global "
                "parameters it started from, and takes part again at the next boundary."
            )
        return outcome

    def _has_counted(self, exchange: FragmentExchange) -> None:
        self._counters.rounds += 1
        logger.debug("Version %s contains the last pseudo-gradient.", exchange.version)

    def _why_not_wait(self, link: Link) -> str | None:
        """Why a boundary waits no longer; None while it does."""
        if link.has_ended:
            return f"the link has ended ({link.last_error})"
        if link.stopping is not None:
            return "the broker is stopping"
        if link.phase is Phase.REFUSED:
            return f"the broker refuses this worker ({link.refusal})"
        silence = link.silence()
        if silence is not None and silence >= self._settings.timeout:
            return f"no sign of life from {link.address} for {silence:.0f} s"
        flight = self._exchange.flight if self._exchange else None
        if flight is not None and flight.anchor is None:
            broken = link.reconnections - flight.reconnections
            if broken > self._settings.max_sync_retries:
                return f"the connection broke {broken} times at this boundary"
        return None

    def _look_again_in(self, link: Link) -> float:
        """Seconds until silence alone ends the waiting, if nothing is heard."""
        silence = link.silence() or 0.0
        return max(0.0, self._settings.timeout - silence)

    def _unsynced_steps(self) -> int:
        exchange, link = self._exchange, self._link
        if exchange is None or link is None:
            return 0
        if exchange.flight is not None and exchange.flight.anchor is not None:
            return exchange.flight.steps + self._inner_step
        config = link.config
        return self._inner_step if config and self._inner_step >= config.sync_every else 0

    def _publish(self, *, waiting: bool = False) -> None:
        """What the next heartbeat tells."""
        if self._link is not None:
            self._link.progress = Progress(
                step=self._step,
                inner_step=self._inner_step,
                waiting=waiting,
                steps_per_s=self._pace.steps_per_s,
                loss=self._reports.loss,
                tokens=self._reports.tokens,
            )

    def _trouble(self, text: str) -> None:
        logger.warning("%s", text)
        if self._link is not None:
            self._link.last_error = text


class _Wait:
    """When to say again that we are waiting."""

    def __init__(self, clock: Callable[[], float], first: float = WORD_S) -> None:
        self._clock = clock
        self._say_at = clock() + first

    def pause(self, at_most: float = WORD_S) -> float:
        """Seconds to sleep until the next word is due."""
        return max(0.0, min(at_most, self._say_at - self._clock()))

    def say(self, text: str) -> None:
        """Log the sentence if it is time to."""
        if self._clock() >= self._say_at:
            self._say_at = self._clock() + WORD_S
            # A warning, since most training scripts configure no logging and nobody should wonder.
            logger.warning("%s", text)


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


def _fp16_hint(dtype: str) -> str:
    return " after rounding to fp16, whose largest value is 65504" if dtype == "fp16" else ""
