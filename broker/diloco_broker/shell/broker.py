"""The public face of the broker: made from a configuration, started and stopped, in a thread or not."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from inspect import signature
from typing import TypeVar

import torch
from torch import Tensor

from diloco_broker.config import BrokerConfig
from diloco_broker.core.events import FINISH_WITHIN_S
from diloco_broker.shell.loop import SAVE_WITHIN_S, Loop
from diloco_broker.shell.sockets import LINGER_MS
from diloco_broker.storage.model_file import check_state_dict
from diloco_broker.tensors.outer.torch_fragment import OuterOptimizerFactory
from diloco_protocol.errors import UsageError, check_names
from diloco_protocol.fragments import Choose

ITS_PROGRAM = "its program has ended it"  # why it was asked to stop, if the caller gives no reason

S = TypeVar("S", bound="Service")


class Service(ABC):
    """What is run in the caller's thread, or in one of its own between `start` and `stop`."""

    config: BrokerConfig
    address: str
    feed_address: str
    thread_name = "diloco-broker"
    stops_within_s = FINISH_WITHIN_S + SAVE_WITHIN_S + 2 * LINGER_MS / 1000
    _failure: Exception | None = None
    _thread: threading.Thread | None = None

    @abstractmethod
    def run(self) -> None:
        """Serve until `request_stop()` is called, from a signal handler or another thread."""

    @abstractmethod
    def request_stop(self, reason: str = ITS_PROGRAM, *, restarting: bool = False) -> None:
        """Ask `run()` to end in an orderly way; returns at once, fit for a signal handler.

        Args:
            reason: for the log and the workers, as the end of a sentence.
            restarting: a broker will be back here, so workers train on and come back to it. False: the
                run is over, which the workers' scripts see in `should_stop`. The first call counts.
        """

    @abstractmethod
    def close(self) -> None:
        """Close sockets and files. `run()` does it; needed only for one that never ran."""

    def start(self: S) -> S:
        """Serve in a background thread; returns the service itself."""
        self._thread = threading.Thread(target=self._run_there, name=self.thread_name, daemon=True)
        self._thread.start()
        return self

    def _run_there(self) -> None:
        try:
            self.run()
        except Exception as error:  # noqa: BLE001  `stop` raises it in the caller's thread
            self._failure = error

    def stop(self, *, restarting: bool = False) -> None:
        """End in an orderly way: finish a closing round, notify the workers, close the sockets.

        Waits for the thread of `start()`. May be called more than once.

        Args:
            restarting: as in `request_stop`.

        Raises:
            Exception: what that thread has ended with, once, if it was an error.
        """
        self.request_stop(restarting=restarting)
        if self._thread is not None:
            self._thread.join(self.stops_within_s)
        else:
            self.close()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self: S) -> S:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class Broker(Service):
    """A DiLoCo broker: `run()` it in this thread, or `start()` and `stop()` it in one of its own.

    The sockets are bound when it is made, so `address` and `feed_address` are known at once.

    Args:
        config: its options.
        initial: a state dict to begin with; without one the first worker provides the parameters.
        outer_optimizer_factory: makes the outer optimizer of a fragment, any of `torch.optim`, from
            its parameters (`FragmentParameters`). It is called once for each fragment. Such an
            optimizer steps whole tensors, so a turn of the loop takes as long as its step.
        fragment_plan: splits the model instead of a pattern: returns the fragment, 0 to
            `num_fragments` - 1, of each trainable parameter by its name and shape. It is called when
            the model is known. For a split from a file see `BrokerConfig.fragment_plan`.
        term: of a standby that has taken over: how often the run's hub was replaced.

    Raises:
        UsageError: when an address cannot be bound, `initial` is not a state dict, the options leave no
            place for an optimizer or a split of one's own, or the run in `save_dir` is split otherwise.
    """

    def __new__(cls, *_: object, **keywords: object) -> Broker:
        if cls is Broker:  # a subclass may have keywords of its own
            known = signature(Broker.__init__).parameters
            options = {each.name for each in fields(BrokerConfig)} - known.keys()
            if moved := sorted(options & keywords.keys()):
                raise UsageError(
                    f"{moved[0]} is an option of the configuration: "
                    f"Broker(BrokerConfig({moved[0]}=...))."
                )
            check_names("Broker", "keyword", keywords, known)
        return super().__new__(cls)

    def __init__(
        self,
        config: BrokerConfig,
        initial: Mapping[str, Tensor] | None = None,
        *,
        outer_optimizer_factory: OuterOptimizerFactory | None = None,
        fragment_plan: Choose | None = None,
        term: int = 0,
    ) -> None:
        self.config = config
        checked = None if initial is None else check_state_dict(initial, "initial")
        self._loop = Loop(config, checked, outer_optimizer_factory, fragment_plan, term=term)
        self.address = self._loop.sockets.address
        self.feed_address = self._loop.sockets.feed_address

    def run(self) -> None:
        threads = torch.get_num_threads()
        # With more threads a chunk's addition spends its time waking them: 7 times slower.
        torch.set_num_threads(1)
        try:
            self._loop.run()
        finally:
            torch.set_num_threads(threads)
            self.close()

    @property
    def resumes(self) -> bool:
        """Has the broker resumed a run from a checkpoint?"""
        return self.resumed != ""

    @property
    def resumed(self) -> str:
        """The run that was resumed: "the run of 2026-11-24 14:03, 117 rounds"; empty for a new run."""
        return self._loop.core.state.resumed

    @property
    def rounds(self) -> int:
        """Rounds that the run has made, before this start as well; in async mode applied pushes."""
        return self._loop.core.state.totals.rounds

    @property
    def run_is_over(self) -> bool:
        """Was the broker asked to end for good, and not to come back?"""
        return self._loop.run_is_over

    @property
    def is_complete(self) -> bool:
        """Has the run come to the end that `max_rounds`, `token_budget` or `max_time` set?"""
        return self._loop.is_complete

    def request_stop(self, reason: str = ITS_PROGRAM, *, restarting: bool = False) -> None:
        self._loop.request_stop(reason or ITS_PROGRAM, restarting=restarting)

    def close(self) -> None:
        self._loop.close()
