"""Whole training runs over real sockets, against synchronous DiLoCo written as a loop in one process.

The reference is plain torch, straight from the formulas, and never touches the product. A worker's whole
sequence of parameters is compared, step by step: the base after a round and the restart of the delta are
where implementations go wrong.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from diloco_broker import Broker, BrokerConfig
from diloco_protocol.chunks import FragmentLayout
from diloco_worker import DiLoCoClient, DiLoCoWorker
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from kit.process_kit import wait_for
from kit.raw_worker import DTYPES

State = dict[str, Tensor]
MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], Optimizer]


class Tied(nn.Module):
    """Embedding and head share one weight; a frozen table and a BatchNorm come along."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.table = nn.Parameter(torch.randn(6), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs().sum(1) * 100).long() % 11
        hidden: Tensor = self.head(self.norm(self.embedding(tokens)) + self.table)
        return hidden


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


def data(worker: int, step: int) -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(1000 * worker + step))


def one_step(model: nn.Module, optimizer: Optimizer, worker: int, step: int) -> None:
    x = data(worker, step)
    parameter = next(p for p in model.parameters() if p.requires_grad)
    optimizer.zero_grad()
    model(x.to(parameter.dtype)).float().pow(2).mean().backward()
    optimizer.step()


def state_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def reference(
    make: MakeModel,
    make_optimizer: MakeOptimizer,
    workers: int,
    rounds: int,
    h: int | Sequence[int],
    wire: str | Sequence[str] = "fp32",
    lr: float = 0.7,
    momentum: float = 0.9,
) -> list[list[State]]:
    """For each worker: the state of its model after each step (after the round, at a boundary).

    H and the wire dtype may be given for each worker.
    """
    steps = [h] * workers if isinstance(h, int) else list(h)
    wires = [wire] * workers if isinstance(wire, str) else list(wire)
    first = make()
    models = [copy.deepcopy(first) for _ in range(workers)]
    optimizers = [make_optimizer(model) for model in models]
    trained = {n for n, p in first.named_parameters() if p.requires_grad}
    masters = {
        n: nn.Parameter(t.detach().float().clone())
        for n, t in first.state_dict().items()
        if n in trained
    }
    outer = SGD(list(masters.values()), lr=lr, momentum=momentum, nesterov=True)
    buffers = {n: t.detach().clone() for n, t in first.named_buffers()}
    history: list[list[State]] = [[] for _ in range(workers)]
    for round_ in range(rounds):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for step in range(round_ * steps[worker], (round_ + 1) * steps[worker]):
                one_step(model, optimizer, worker, step)
                history[worker].append(state_of(model))
        locals_ = [dict(model.named_parameters()) for model in models]
        for name, master in masters.items():
            deltas = [
                (master.data - each[name].data.float()).to(DTYPES[dtype])
                for each, dtype in zip(locals_, wires, strict=True)
            ]
            master.grad = torch.stack([delta.float() for delta in deltas]).sum(0) / workers
        outer.step()
        for name in buffers:
            values = torch.stack([dict(model.named_buffers())[name] for model in models])
            if values.is_floating_point():
                buffers[name] = values.mean(0)
            else:
                buffers[name] = values.max(0).values
        with torch.no_grad():
            for worker, model in enumerate(models):
                for name, parameter in model.named_parameters():
                    if name in masters:
                        parameter.copy_(masters[name])
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
                history[worker][-1] = state_of(model)
    return history


def diloco(
    make: MakeModel,
    make_optimizer: MakeOptimizer,
    workers: int,
    rounds: int,
    h: int,
    own: Sequence[dict[str, Any]] = (),
    **options: Any,
) -> tuple[list[list[State]], State]:
    """The same through a broker: each worker's history, and the global parameters at the end.

    `own` has what each worker asks for itself.
    """
    first = make()
    config = BrokerConfig(
        workers=workers,
        sync_every=h,
        bind="tcp://127.0.0.1:*",
        feed="tcp://127.0.0.1:*",
        chunk_elements=16,
        **options,
    )

    def train(worker: int) -> list[State]:
        model = copy.deepcopy(first)
        optimizer = make_optimizer(model)
        history = []
        asks = own[worker] if own else {}
        with DiLoCoWorker(model, optimizer, broker.address, worker_id=f"w{worker}", **asks):
            for step in range(rounds * asks.get("sync_every", h)):
                one_step(model, optimizer, worker, step)
                history.append(state_of(model))
        return history

    with Broker(config) as broker, ThreadPoolExecutor(workers) as pool:
        histories = [run.result(90) for run in [pool.submit(train, w) for w in range(workers)]]
        with DiLoCoClient(broker.address) as client:
            final = dict(client.pull().tensors)
    return histories, final


def sgd(model: nn.Module) -> Optimizer:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.5)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def assert_same(
    got: list[list[State]], wanted: list[list[State]], *, rtol: float, atol: float
) -> None:
    for worker, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.keys() == b.keys()
            for name, tensor in a.items():
                where = f"{name} of worker {worker} after step {step}"
                torch.testing.assert_close(tensor, b[name], rtol=rtol, atol=atol, msg=where)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_training_equals_the_single_process_loop(
    workers: int, make_optimizer: MakeOptimizer
) -> None:
    torch.manual_seed(workers)
    first = mlp()
    run = (lambda: copy.deepcopy(first), make_optimizer, workers, 4, 3)
    got, _ = diloco(*run, wire_dtype="fp32")
    assert_same(got, reference(*run), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_training_with_a_narrow_wire_equals_the_loop_that_rounds_alike(wire: str) -> None:
    torch.manual_seed(5)
    first = mlp()
    run = (lambda: copy.deepcopy(first), sgd, 2, 4, 3)
    got, _ = diloco(*run, wire_dtype=wire)
    # A delta on the edge between two bf16 values may round the other way: one part in 256 of it.
    assert_same(got, reference(*run, wire=wire), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("make", [with_norm, Tied])
def test_buffers_tied_and_frozen_tensors_take_part(make: MakeModel) -> None:
    torch.manual_seed(6)
    first = make()
    run = (lambda: copy.deepcopy(first), sgd, 3, 3, 4)
    got, final = diloco(*run, wire_dtype="fp32")
    wanted = reference(*run)
    assert_same(got, wanted, rtol=2e-5, atol=1e-6)
    make().load_state_dict(final)
    for name, tensor in wanted[0][-1].items():
        torch.testing.assert_close(final[name], tensor, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_other_dtypes_keep_their_dtype_and_follow_the_fp32_master(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(7)
    first = mlp(dtype)
    run = (lambda: copy.deepcopy(first), sgd, 2, 3, 2)
    got, final = diloco(*run, wire_dtype="fp32")
    wanted = reference(*run)
    assert all(tensor.dtype == dtype for tensor in final.values())
    if dtype == torch.float64:  # exchanged in fp32
        assert_same(got, wanted, rtol=1e-5, atol=1e-6)
    else:  # one unit in the last place, where fp32 sums of different order straddle a boundary
        assert_same(got, wanted, rtol=2e-2, atol=2e-3)


def test_one_worker_with_outer_lr_one_is_the_plain_inner_optimizer() -> None:
    """H = 1, eta = 1, mu = 0: theta - (theta - theta_1) is what the inner step made of it."""
    torch.manual_seed(8)
    first = mlp()
    options: dict[str, Any] = {"wire_dtype": "fp32", "outer_lr": 1.0, "outer_momentum": 0.0}
    got, _ = diloco(lambda: copy.deepcopy(first), adamw, 1, 12, 1, **options)
    model = copy.deepcopy(first)
    optimizer = adamw(model)
    plain = []
    for step in range(12):
        one_step(model, optimizer, 0, step)
        plain.append(state_of(model))
    assert_same(got, [plain], rtol=1e-4, atol=1e-6)


def test_all_workers_and_an_observer_hold_the_same_bits_after_a_round() -> None:
    torch.manual_seed(9)
    first = mlp()
    got, final = diloco(lambda: copy.deepcopy(first), sgd, 3, 3, 2, wire_dtype="bf16")
    for name, tensor in final.items():
        assert all(torch.equal(history[-1][name], tensor) for history in got)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"quorum": 3}])
def test_workers_of_a_round_may_differ_in_h_and_wire_dtype(options: dict[str, Any]) -> None:
    torch.manual_seed(11)
    first = with_norm()
    steps, wires = [4, 2, 3], ["fp32", "bf16", "fp16"]
    own = [{"sync_every": h, "wire_dtype": wire} for h, wire in zip(steps, wires, strict=True)]
    run = (lambda: copy.deepcopy(first), sgd, 3, 3)
    got, final = diloco(*run, 4, own, wire_dtype="fp32", **options)
    assert_same(got, reference(*run, steps, wires), rtol=1e-4, atol=1e-5)
    for name, tensor in final.items():
        assert all(torch.equal(history[-1][name], tensor) for history in got)


def test_copy_of_a_large_model_may_outlast_every_patience_of_the_broker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The offer goes out before the model is copied, and heartbeats go on meanwhile."""
    capture, may_end = ModelTensors.capture, threading.Event()

    def slowly(tensors: ModelTensors, layout: FragmentLayout) -> FlatState:
        assert may_end.wait(20)
        return capture(tensors, layout)

    monkeypatch.setattr(ModelTensors, "capture", slowly)
    caplog.set_level(logging.INFO, "diloco.broker")
    model = mlp()
    wanted = copy.deepcopy(model.state_dict())
    address = "tcp://127.0.0.1:*"
    broker = Broker(BrokerConfig(bind=address, feed=address, heartbeat_timeout=1.0))
    broker._loop.core.state.model.patience_s = 0.1
    with broker, ThreadPoolExecutor(1) as pool:
        worker = DiLoCoWorker(model, sgd(model), server=broker.address, worker_id="slow")
        try:
            started = pool.submit(worker.start)
            wait_for(
                lambda: "slow has sent no parameters for 0.8 s, and nobody else" in caplog.text
            )
        finally:
            may_end.set()
        started.result(20)
        worker.close()
    assert "dead" not in caplog.text, caplog.text
    assert all(torch.equal(wanted[name], tensor) for name, tensor in model.state_dict().items())


def test_two_brokers_and_their_workers_live_in_one_process() -> None:
    torch.manual_seed(10)
    first = mlp()
    run = (lambda: copy.deepcopy(first), sgd, 2, 2, 2)
    with ThreadPoolExecutor(2) as pool:
        a, b = pool.submit(diloco, *run), pool.submit(diloco, *run)
        one, two = a.result(60), b.result(60)
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])
