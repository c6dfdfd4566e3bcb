"""A worker with server="local": DiLoCo with one worker, in its own process."""

import io
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from diloco_protocol import UsageError
from diloco_worker import DiLoCoWorker, WorkerOptions
from diloco_worker.testing import LocalRun
from kit.reference import one_thread

H, ETA, MU = 3, 0.6, 0.8
OUTER = {"outer_lr": ETA, "outer_momentum": MU}
MakeOptimizers = Callable[[nn.Module], list[Optimizer]]


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.02)]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    return [Muon(matrices, lr=0.02), AdamW(others, lr=0.02)]


class Training:
    """A small model with a BatchNorm, and a loop over batches that depend on the step alone."""

    def __init__(self, make: MakeOptimizers = adamw, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        self.model: nn.Module = nn.Sequential(*layers).to(dtype)
        self.optimizers, self.dtype, self.step = make(self.model), dtype, 0

    def trains(self, steps: int) -> None:
        for _ in range(steps):
            dice = torch.Generator().manual_seed(self.step)
            x = torch.randn(6, 4, generator=dice).to(self.dtype)
            (self.model(x) - x.sum(1, keepdim=True).sin()).pow(2).mean().backward()
            for each in self.optimizers:
                each.step()
                each.zero_grad()
            self.step += 1

    def worker(self, server: str = "local", outer: dict[str, float] = OUTER) -> DiLoCoWorker:
        local = {"local": outer} if server == "local" else {}
        return DiLoCoWorker(self.model, self.optimizers, server, sync_every=H, options=local)

    @property
    def values(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self.model.state_dict().items()}


def in_plain_torch(training: Training, rounds: int) -> dict[str, Tensor]:
    """The same with `torch.optim.SGD` as the outer optimizer; returns its parameters."""
    parameters = dict(training.model.named_parameters())
    base = {name: nn.Parameter(p.detach().float().clone()) for name, p in parameters.items()}
    outer = SGD(base.values(), lr=ETA, momentum=MU, nesterov=True)
    for _ in range(rounds):
        training.trains(H)
        with torch.no_grad():
            for name, p in parameters.items():
                base[name].grad = base[name].to(p.dtype).float() - p.float()
            outer.step()
            for name, p in parameters.items():
                p.copy_(base[name])
    return {name: each.detach() for name, each in base.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (adamw, torch.float32),
        (adamw, torch.bfloat16),
        (muon_and_adamw, torch.float32),  # a step of both counts once
    ],
)
@one_thread()
def test_equals_a_plain_loop_bit_for_bit(make: MakeOptimizers, dtype: torch.dtype) -> None:
    plain, ours = Training(make, dtype), Training(make, dtype)
    base = in_plain_torch(plain, 5)
    at_boundary = plain.values
    plain.trains(2)
    with ours.worker() as diloco:
        ours.trains(5 * H + 2)
        assert (diloco.sync_count, diloco.round, diloco.local_step) == (5, 5, 5 * H + 2)
        assert_equal(ours.values, plain.values)
        with diloco.global_parameters():
            assert_equal(ours.values, at_boundary)
        assert_equal(ours.values, plain.values)
        state = diloco.state_dict()["outer"]
    ((_, saved),) = state.items()
    assert_equal({name: saved["global"][name] for name in base}, base)


@pytest.mark.parametrize(
    ("outer", "of_broker"),
    [
        (OUTER, {"outer_momentum_warmup": "constant", **OUTER}),
        ({}, {"outer_lr": 0.4}),  # the default momentum rises in the same way
    ],
)
@one_thread()
def test_equals_a_run_of_one_worker_with_a_broker_bit_for_bit(
    outer: dict[str, float], of_broker: dict[str, Any]
) -> None:
    found = []
    with LocalRun(workers=1, sync_every=H, wire_dtype="fp32", **of_broker) as run:
        for server in ("local", run.server):
            training = Training()
            with training.worker(server, outer) as diloco:
                training.trains(4 * H)
                assert diloco.force_sync()
                training.trains(2)
                assert diloco.load_global()
                training.trains(H)
            found.append(training.values)
    assert_equal(*found)


@one_thread()
def test_resumes_in_the_middle_of_a_cycle_as_if_nothing_had_happened() -> None:
    through = Training()
    with through.worker():
        through.trains(4 * H)
    first = Training()
    with first.worker() as diloco:
        first.trains(2 * H + 1)
        diloco.report(loss=2.0, tokens=7)
        parts: list[Any] = [first.model, *first.optimizers, diloco]
        states = [each.state_dict() for each in parts]
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    *others, of_worker = torch.load(file, weights_only=True)

    second = Training()
    second.step = first.step
    parts = [second.model, *second.optimizers]
    for each, state in zip(parts, others, strict=True):
        each.load_state_dict(state)
    wrapped: Any = torch.compile(second.model, backend="eager")  # other names
    resumed = DiLoCoWorker(
        wrapped, second.optimizers, "local", sync_every=H, options={"local": OUTER}
    )
    resumed.load_state_dict(of_worker)
    assert resumed.state_dict()["outer"].keys() == of_worker["outer"].keys()
    with resumed:
        second.trains(2 * H - 1)
        assert (resumed.sync_count, resumed.progress.tokens) == (4, 7)
    assert_equal(second.values, through.values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda outer: outer.clear(), None),  # of a worker with a broker: a new start
        (lambda outer: outer.update({"b": outer.popitem()[1]}), "not that of process 0 of 1"),
        (lambda outer: next(iter(outer.values()))["global"].popitem(), "not the state of this"),
        (lambda outer: None, "The model is not as it was"),
    ],
)
def test_state_that_does_not_fit_is_refused(
    change: Callable[[Any], Any], words: str | None
) -> None:
    training = Training()
    with training.worker() as diloco:
        training.trains(H + 1)
        state = diloco.state_dict()
    change(state["outer"])
    second = Training()
    if words != "The model is not as it was":
        second.model.load_state_dict(training.values)
    worker = second.worker()
    worker.load_state_dict(state)
    if words is None:
        with worker:
            assert worker.local_step == H + 1
        return
    with pytest.raises(UsageError, match=words):
        worker.start()


def test_works_without_sockets_and_threads_and_says_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DILOCO_SERVER", "local")
    monkeypatch.setattr(socket, "socket", None)
    training, threads = Training(), threading.active_count()
    with DiLoCoWorker(training.model, training.optimizers) as diloco:
        assert threading.active_count() == threads
        assert diloco.config is not None and diloco.config.mode == "sync"
        assert (diloco.sync_every, diloco.shard, diloco.should_save) == (30, (0, 1), False)
        diloco.report(loss=0.5, tokens=10)
        training.trains(30)
        assert (diloco.global_loss, diloco.progress.steps, diloco.progress.tokens) == (0.5, 30, 10)
        metrics = diloco.sync_metrics
        assert (metrics.pushes, metrics.bytes_up, metrics.rejected) == (1, 0, 0)
        with pytest.raises(UsageError, match="in a run already"):
            training.worker()
    training.worker()  # it is free again


def test_model_that_is_not_finite_goes_back_to_the_global_parameters() -> None:
    training = Training()
    with training.worker() as diloco:
        training.trains(H)
        good = training.values
        training.trains(H - 1)
        with torch.no_grad():
            training.model.get_parameter("0.weight")[0, 0] = torch.nan
        training.trains(1)
        assert (diloco.sync_metrics.rejected, diloco.sync_count) == (1, 1)
        assert_equal(training.values, good)


def test_sigterm_is_a_reason_to_stop() -> None:
    training = Training()
    with training.worker() as diloco:
        training.trains(1)
        assert not diloco.should_stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert diloco.stop_reason == "SIGTERM asks this process to end"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_outer_step_that_overflows_is_not_taken(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    start, near = (3e38, 3.3e38) if dtype is torch.float32 else (60000.0, 64000.0)
    torch.nn.init.constant_(model.weight, start)
    options = WorkerOptions(local={"outer_lr": 2.0, "outer_momentum": 0.0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with DiLoCoWorker(model, optimizer, server="local", sync_every=1, options=options):
        for value, wanted in ((near, start), (start / 2, 0.0)):
            torch.nn.init.constant_(model.weight, value)
            optimizer.step()
            assert model.weight.item() == pytest.approx(wanted, rel=1e-3, abs=1.0), value
