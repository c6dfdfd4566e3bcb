"""A worker that trains in a run whose broker says what the test tells it.

The values of its model are the same everywhere, and each optimizer step lowers them by 1, from 100.
"""

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from diloco_protocol import Ledger, VersionId
from diloco_protocol.messages import Error, Join, Pull, Push, Released
from diloco_worker import DiLoCoWorker
from diloco_worker.model.flat_state import FlatState
from diloco_worker.transport.link import Link
from kit.process_kit import wait_for
from kit.reference import State, state_of
from kit.scripted_broker import (
    PATIENCE_S,
    Descent,
    ScriptedBroker,
    changed,
    first,
    run_config,
    version,
)

H = 4  # steps between two boundaries, unless the test says otherwise
Saved = tuple[dict[str, Any], State]  # of worker and model


def layers(count: int = 3) -> nn.Module:
    """With as many fragments each layer is one."""
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


class ScriptedTraining:
    """Trains in a thread beside the test's.

    Attributes:
        broker: says what it is told to.
        worker, descent: the one made last, and its loop.
        workers: all that were made.
        around: each optimizer step is made in it.
    """

    worker: DiLoCoWorker
    descent: Descent

    def __init__(self, broker: ScriptedBroker) -> None:
        self.broker = broker
        self.workers: list[DiLoCoWorker] = []
        self.around: AbstractContextManager[object] = nullcontext()
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[Any] = Future()

    def close(self) -> None:
        """Its workers leave at once, whatever became of it."""
        for worker in self.workers:
            worker.close(failed=True)
        self._pool.shutdown(wait=False)

    # Getting in.

    def makes(self, model: nn.Module | None = None, **keywords: Any) -> DiLoCoWorker:
        """A worker that has not started yet."""
        self.descent = Descent(model)
        keywords = {"server": self.broker.address, "worker_id": "me", **keywords}
        self.worker = DiLoCoWorker(self.descent.model, self.descent.optimizer, **keywords)
        self.workers.append(self.worker)
        return self.worker

    def joins(
        self, *versions: VersionId | None, first_round: int = 0, answer: Error | None = None
    ) -> Join:
        """It starts and is welcomed, or refused; the broker has these versions.

        It is `done` when it has parameters.
        """
        self.does(self.worker.start)
        if answer is None:
            return self.broker.welcomes(*versions, first_round=first_round)
        self.broker.control, join, _ = self.broker.hears_from(Join)
        self.broker.says(answer)
        return join

    def begins(
        self,
        model: nn.Module | None = None,
        *,
        config: dict[str, Any] | None = None,
        first_round: int = 0,
        **keywords: Any,
    ) -> DiLoCoWorker:
        """It has joined, and its model is at version 0: all values 100, frozen ones 0."""
        if config is not None:
            self.broker.config = run_config(**config)
        self.makes(model, **keywords)
        self.joins(version(0), first_round=first_round)
        assert self.broker.layout is not None
        for part in self.broker.layout.all:
            if part.chunks:
                self.broker.hears_pull(part.fragment)
                value = 0 if part is self.broker.layout.frozen else 100
                self.serves(value, 0, fragment=part.fragment)
        self.done()
        return self.worker

    def saves(self) -> Saved:
        """What the script's checkpoint has. Then this incarnation is over."""
        state = copy.deepcopy(self.worker.state_dict()), state_of(self.descent.model)
        self.worker.close(failed=True)
        return state

    def resumes(
        self,
        saved: Saved,
        *theirs: VersionId | None,
        model: nn.Module | None = None,
        answer: Error | None = None,
        **keywords: Any,
    ) -> Join:
        """Another incarnation of the worker has joined; the broker has these versions."""
        self.makes(model, **keywords)
        self.descent.model.load_state_dict(saved[1])
        self.worker.load_state_dict(saved[0])
        return self.joins(*theirs, answer=answer)

    # Training.

    def does(self, what: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        """Begin something that may wait for the broker."""
        self._last = self._pool.submit(what, *arguments, **keywords)

    def done(self) -> Any:
        return self._last.result(PATIENCE_S)

    @property
    def stands(self) -> bool:
        """It has not come to its end."""
        return not self._last.done()

    def trains(self, steps: int) -> None:
        """Begin optimizer steps, of which one may wait for the broker; Ctrl-C does not end the loop."""

        def loop() -> None:
            for _ in range(steps):
                with suppress(KeyboardInterrupt), self.around:
                    self.descent.steps(1)

        self.does(loop)

    def steps(self, number: int) -> None:
        self.trains(number)
        self.done()

    def round(self, steps: int, counter: int, value: float = 100.0) -> Push:
        """Steps to a boundary, and its round: the push is in the version of this number."""
        self.trains(steps)
        push, _ = self.takes()
        self.serves(value, counter, push)
        self.done()
        return push

    # What the broker does.

    def takes(self, round_: int | None = None) -> tuple[Push, float]:
        """A whole push, and the value of its parameters."""
        push, values = self.broker.takes_push(round_)
        return push, first(values)

    def serves(
        self, value: float, counter: int, push: Push | None = None, fragment: int = 0, **told: Any
    ) -> None:
        """A version with this value everywhere. A push is in it, and says of which fragment it is."""
        fragment = fragment if push is None else push.fragment
        pushes = () if push is None else (push.push_id,)
        self.broker.serves(self.filled(value, fragment), version(counter), *pushes, **told)

    def brings(self, value: float, counter: int, push: Push | None = None) -> None:
        """The same, until it is there for the training thread, which has not looked at it yet."""
        self.serves(value, counter, push)
        self.hears_news()

    def filled(self, value: float, fragment: int = 0) -> FlatState:
        return changed(self._now(fragment), lambda vector: torch.full_like(vector, value))

    def refuses(self, push: Push, code: str = "bad_push", counted: bytes | None = None) -> None:
        """`counted`: the chunks of it that may count all the same."""
        said = Error(code, "No.", push_id=push.push_id, about="push", counted=counted)
        self.broker.says(said)

    def says_current(self, counter: int) -> Pull:
        """Answer the next pull: this version, which the worker has, is the newest."""
        pull = self.broker.hears_pull()
        self.broker.says(Released(0, version(counter), Ledger()))
        return pull

    def is_asked_for_newest(self) -> Pull:
        """The worker asks for the newest version, whatever it contains."""
        while (pull := self.broker.hears_pull()).held is None and pull.after != -1:
            pass
        return pull

    # How the worker is.

    @property
    def link(self) -> Link:
        assert self.worker._link is not None
        return self.worker._link

    @property
    def metrics(self) -> Any:
        return self.worker.sync_metrics

    @property
    def values(self) -> float:
        return self.at(0)

    def at(self, fragment: int) -> float:
        return first(self._now(fragment))

    def _now(self, fragment: int) -> FlatState:
        """A fragment of the model, laid out as the broker has it."""
        layout = self.broker.layout
        return self.descent.values(fragment, part=layout.all[fragment] if layout else None)

    def hears_news(self) -> None:
        wait_for(lambda: self.link.has_news)
