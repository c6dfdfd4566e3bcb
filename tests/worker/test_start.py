"""Joining a run: wrapped optimizers, and failures that leave nothing behind."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from diloco_broker import Broker, BrokerConfig
from diloco_protocol import UsageError
from diloco_worker import DiLoCoClient, DiLoCoWorker, hook, joining, pair, ports
from kit.process_kit import LOCAL, wait_for

PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(BrokerConfig(**LOCAL, workers=1, sync_every=2)) as made:
        yield made


@pytest.fixture(scope="module")
def members(broker: Broker) -> Iterator[Callable[[], list[str]]]:
    """The workers in the run."""
    with DiLoCoClient(broker.address, timeout=PATIENCE_S) as client:
        yield lambda: [worker["id"] for worker in client.status()["workers"]]


class Accelerated(torch.optim.Optimizer):
    """Accelerate's wrapper: an Optimizer by type that never called `Optimizer.__init__`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.sync_gradients = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None) -> Any:
        if self.sync_gradients:  # else gradients are only accumulated
            self.optimizer.step(closure)


def trains(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_inside_a_wrapped_optimizer_are_counted(broker: Broker, depth: int) -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped: Any = inner
    for _ in range(depth):
        wrapped = Accelerated(wrapped)
    with DiLoCoWorker(model, wrapped, server=broker.address, timeout=PATIENCE_S) as worker:
        wrapped.sync_gradients = False
        trains(model, wrapped, 3)
        assert worker.local_step == 0
        wrapped.sync_gradients = True
        trains(model, wrapped, 4)
        assert (worker.local_step, worker.sync_count) == (4, 2)


class Failure(Exception):
    """Raised by the tests within a start."""


def fails_at(place: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that raises at the line of this number, counted over all lines of a start."""
    count = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == place:
                raise Failure(f"{frame.f_code.co_name}, line {frame.f_lineno}")
        return line

    traced = {hook.__file__, pair.__file__, joining.__file__, ports.__file__}
    return lambda frame, event, _: line if frame.f_code.co_filename in traced else None


@pytest.mark.slow
def test_start_that_fails_at_any_line_leaves_nothing_behind(
    broker: Broker, members: Callable[[], list[str]], tmp_path: Path
) -> None:
    log = tmp_path / "audit.jsonl"
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    members()
    others, before = threads(), sys.gettrace()
    for place in range(1, 1000):
        worker = DiLoCoWorker(
            model,
            optimizer,
            server=broker.address,
            worker_id="me",
            timeout=PATIENCE_S,
            options={"audit": log},
        )
        made = set(optimizer._optimizer_step_post_hooks)  # with the worker
        sys.settrace(fails_at(place))
        try:
            worker.start()
            break
        except Failure as error:
            where = str(error)
        finally:
            sys.settrace(before)
        assert made.issuperset(optimizer._optimizer_step_post_hooks), where
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, where
        assert threads() == others, where
        assert str(log) not in open_files(), where
        wait_for(lambda: members() == [])
    else:
        raise AssertionError("a start has no end")
    assert place > 30, "no line failed"
    assert members() == ["me"], "a new worker with the same id may start"
    worker.close()


def threads() -> list[threading.Thread]:
    """The threads in which a worker or a client has its sockets."""
    return [thread for thread in threading.enumerate() if thread.name == "diloco-link"]


def open_files() -> list[str]:
    return [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]


def test_second_worker_for_a_model_in_a_run_is_refused(broker: Broker) -> None:
    """As when the cell of a notebook is run again: the two would wait for each other."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled: Any = torch.compile(model, backend="eager")
    early = DiLoCoWorker(model, optimizer, broker.address, worker_id="again")
    with DiLoCoWorker(model, optimizer, broker.address, worker_id="first"):
        for another in (model, compiled):
            with pytest.raises(UsageError, match="worker 'first'"):
                DiLoCoWorker(another, optimizer, broker.address)
        with pytest.raises(UsageError, match="worker 'first'"):
            early.start()
        trains(model, optimizer, 2)  # waits for no other worker
    with early:
        trains(model, optimizer, 2)
        assert early.sync_metrics.pushes == 1


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("handles", [False, True])
def test_worker_handles_sigterm_unless_told_not_to(
    broker: Broker, is_local: bool, handles: bool
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    server = "local" if is_local else broker.address
    with DiLoCoWorker(model, optimizer, server, options={"handle_signals": handles}):
        assert (signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL) == handles
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
