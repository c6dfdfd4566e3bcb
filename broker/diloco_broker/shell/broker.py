"""The public broker class: built from a configuration; runs in the caller's or a background thread."""

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

ITS_PROGRAM = "its program has ended it"  # default reason of a stop

S = TypeVar("S", bound="Service")


class Service(ABC):
    """A service that runs in the caller's thread, or in its own between `start` and `stop`."""

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
        """Ask `run()` to shut down cleanly; returns at once, and is safe in a signal handler.

        Only the first call has an effect.

        Args:
            reason: for the log and the workers, as the end of a sentence.
            restarting: the broker will be restarted, so workers continue training and reconnect. False:
                the run is over, and the workers' scripts see `should_stop`.
        """

    @abstractmethod
    def close(self) -> None:
        """Close sockets and files. `run()` calls it; only a service that never ran needs the call."""

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
        """Shut down cleanly: finish a closing round, notify the workers, close the sockets.

        Waits for the thread of `start()`. May be called more than once.

        Args:
            restarting: as in `request_stop`.

        Raises:
            Exception: the error that ended that thread, if any; raised once.
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
    """A DiLoCo broker: `run()` it in this thread, or `start()` and `stop()` it in a background thread.

    The constructor binds the sockets, so `address` and `feed_address` are known at once.

    Args:
        config: the options of the broker.
        initial: a state dict with the initial parameters; default: the first worker uploads them.
        outer_optimizer_factory: makes the outer optimizer of a fragment, any of `torch.optim`, from
            its parameters (`FragmentParameters`). It is called once for each fragment. Such an
            optimizer steps whole tensors, so a turn of the loop takes as long as its step.
        fragment_plan: splits the model instead of a pattern: returns the fragment, 0 to
            `num_fragments` - 1, of each trainable parameter by its name and shape. It is called when
            the model is known. For a split from a file see `BrokerConfig.fragment_plan`.
        term: number of earlier takeovers, for a standby that has taken over.

    Raises:
        UsageError: an address cannot be bound, `initial` is not a state dict, the options conflict with
            a custom optimizer or split, or the run in `save_dir` has another split.
    """

    def __new__(cls, *_: object, **keywords: object) -> Broker:
        if cls is Broker:  # a subclass may have additional keywords
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
        # With more threads adding a chunk is 7 times slower: most of the time goes to waking them.
        torch.set_num_threads(1)
        try:
            self._loop.run()
        finally:
            torch.set_num_threads(threads)
            self.close()

    @property
    def resumes(self) -> bool:
        """Whether the broker resumed a run from a checkpoint."""
        return self.resumed != ""

    @property
    def resumed(self) -> str:
        """The run that was resumed: "the run of 2026-11-24 14:03, 117 rounds"; empty for a new run."""
        return self._loop.core.state.resumed

    @property
    def rounds(self) -> int:
        """Rounds of the run, including those before a restart; in async mode applied pushes."""
        return self._loop.core.state.totals.rounds

    @property
    def run_is_over(self) -> bool:
        """Whether the broker was asked to stop without a restart."""
        return self._loop.run_is_over

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached `max_rounds`, `token_budget` or `max_time`."""
        return self._loop.is_complete

    def request_stop(self, reason: str = ITS_PROGRAM, *, restarting: bool = False) -> None:
        self._loop.request_stop(reason or ITS_PROGRAM, restarting=restarting)

    def close(self) -> None:
        self._loop.close()
