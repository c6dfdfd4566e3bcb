"""Whole runs over real sockets: a broker and hooks in threads, recorded step by step."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from diloco_broker import Broker, BrokerConfig
from diloco_protocol import Segment, VersionId
from diloco_worker import DiLoCoClient, DiLoCoWorker
from diloco_worker.ports import LocalPorts
from kit.process_kit import LOCAL
from kit.reference import Outcome, Plan, State, Trainee, one_thread, state_of, streaming

# The longest that any of these runs may take; they take a second or two.
PATIENCE_S = 40.0

MakeOptimizer = Callable[[nn.Module], Optimizer]
Event = Callable[[DiLoCoWorker, int, int], None]  # hook, worker, step


def mlp() -> nn.Module:
    """Three blocks, 83 parameters: with chunks of 16 no tensor begins where a chunk does."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


LAYERS = [["0.weight", "0.bias"], ["2.weight", "2.bias"], ["4.weight", "4.bias"]]


def strided(pieces: int) -> list[list[str]]:
    """The fragments of `mlp`: layer i is in fragment i mod P."""
    return [[name for layer in LAYERS[first::pieces] for name in layer] for first in range(pieces)]


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.5)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def batch(worker: int, number: int) -> torch.Tensor:
    """Each worker has its own data."""
    seed = 1000 * worker + number
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def trainee(model: nn.Module, optimizer: Optimizer, worker: int) -> Trainee:
    number = 0

    def step() -> None:
        nonlocal number
        x = batch(worker, number)
        number += 1
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True).sin()).pow(2).mean().backward()
        optimizer.step()

    return Trainee(model, optimizer, step)


def an_mlp(worker: int, make_optimizer: MakeOptimizer = sgd) -> Trainee:
    """The same model for each worker, and each time."""
    torch.manual_seed(0)
    model = mlp()
    return trainee(model, make_optimizer(model), worker)


def trainees(workers: int, make_optimizer: MakeOptimizer = sgd) -> list[Trainee]:
    """Workers that begin with the same model; called again, they begin again."""
    return [an_mlp(worker, make_optimizer) for worker in range(workers)]


def make_config(**options: Any) -> BrokerConfig:
    """`LOCAL`, with time to come back."""
    return BrokerConfig(**{**LOCAL, "disconnect_grace": 30.0, **options})


def options_of(plan: Plan) -> dict[str, Any]:
    """The same plan in the broker's words."""
    merge = {"fragment_merge": "rebase"}
    return {
        "sync_every": plan.sync_every,
        "num_fragments": len(plan.fragments),
        "fragment_sync_delay": plan.delay,
        **(merge if plan.alpha is None else {"fragment_update_alpha": plan.alpha}),
    }


@one_thread()
def run(
    broker: Broker | str,
    workers: Sequence[Trainee],
    steps: int,
    *,
    server: str | None = None,
    own: Sequence[dict[str, Any]] = (),
    before: Event | None = None,
    after: Event | None = None,
    done: Event | None = None,
    **options: Any,
) -> Outcome:
    """Train all workers through a broker that is serving, each in a thread of its own.

    Args:
        broker: or its address.
        steps: optimizer steps of each.
        own: what each worker asks for itself.
        server: where the workers find the broker, if not at its address.
        before, after: called at each step (0, 1, ...), before it and after it.
        done: called when a worker has made all steps, before it leaves.
        options: of the hooks.
    """

    address = broker if isinstance(broker, str) else broker.address
    held: list[Copies] = []

    def train(worker: int) -> list[State]:
        each = workers[worker]
        hook = DiLoCoWorker(
            each.model,
            each.optimizer,
            server=server or address,
            worker_id=f"w{worker}",
            **{"timeout": PATIENCE_S / 2} | options | (own[worker] if own else {}),
        )
        history = []
        with hook:
            for step in range(steps):
                if before is not None:
                    before(hook, worker, step)
                each.step()
                if after is not None:
                    after(hook, worker, step)
                history.append(state_of(each.model))
            held.append(copies(hook))
            if done is not None:
                done(hook, worker, steps)
        return history

    futures = [_begin(train, worker) for worker in range(len(workers))]
    ended, _ = wait(futures, PATIENCE_S, return_when=FIRST_EXCEPTION)
    for future in ended:  # one that failed leaves the others waiting for it
        future.result()
    histories = [future.result(0) for future in futures]
    assert_equal_copies(held)
    with DiLoCoClient(address, timeout=PATIENCE_S) as client:
        return Outcome(histories, dict(client.pull().tensors))


# By fragment and version, the vectors that a worker holds of it.
Copies = dict[tuple[int, VersionId], dict[Segment, Tensor]]


def copies(hook: DiLoCoWorker) -> Copies:
    """What a worker's deltas are measured from."""
    ports = hook._ports
    assert isinstance(ports, LocalPorts)
    return {
        (number, fragment.version): {s: v.cpu().clone() for s, v in values.base.vectors.items()}
        for number, (fragment, values) in enumerate(
            zip(ports.state.fragments, ports.fragments, strict=True)
        )
    }


def assert_equal_copies(held: Sequence[Copies]) -> None:
    first: Copies = {}
    for each in held:
        for name, vectors in each.items():
            other = first.setdefault(name, vectors)
            for segment, vector in vectors.items():
                assert torch.equal(bits(vector), bits(other[segment])), name


def bits(values: Tensor) -> Tensor:
    """Also of zeros, which have two signs."""
    return values.view(torch.int32) if values.dtype is torch.float32 else values


def _begin(function: Callable[[int], list[State]], worker: int) -> Future[list[State]]:
    """In a daemon thread: one that hangs fails its own test only."""
    future: Future[list[State]] = Future()

    def work() -> None:
        try:
            future.set_result(function(worker))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=work, name=f"worker {worker}", daemon=True).start()
    return future


def check(
    plan: Plan,
    make: Callable[[int], Trainee] = an_mlp,
    *,
    workers: int = 2,
    steps: int | None = None,
    exact: bool = True,
    config: Mapping[str, Any] | None = None,
    travels: Callable[[int, State], State] = lambda _, delta: delta,
    replies: Callable[[State], State] | None = None,
    **run_options: Any,
) -> list[Trainee]:
    """A run and the loop, step by step; bit for bit in deterministic mode (`exact`).

    Args:
        steps: three cycles and two steps, if nothing is said.
        config: more options of the broker.
        travels, replies: the encoding of a worker's delta of a fragment on its way, and of a difference
            of the global parameters.
        run_options: of `run`.

    Returns:
        What was trained in the run.
    """
    steps = steps or 3 * plan.sync_every + 2
    ours = [make(worker) for worker in range(workers)]
    options = {"workers": workers, "deterministic": exact, **options_of(plan), **(config or {})}
    with Broker(make_config(**options)) as broker:
        got = run(broker, ours, steps, **run_options)
    made = [make(worker) for worker in range(workers)]
    assert_same(got, streaming(made, steps, plan, travels=travels, replies=replies), exact=exact)
    return ours


@contextmanager
def hooked(broker: Broker, workers: Sequence[Trainee]) -> Iterator[list[DiLoCoWorker]]:
    """Hooks w0, w1, ... of what is trained, to be driven from one thread."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                DiLoCoWorker(
                    each.model,
                    each.optimizer,
                    server=broker.address,
                    worker_id=f"w{worker}",
                    timeout=PATIENCE_S,
                )
            )
            for worker, each in enumerate(workers)
        ]


@contextmanager
def joined(broker: Broker, model: nn.Module, workers: int) -> Iterator[list[DiLoCoClient]]:
    """Clients w0, w1, ... that have joined with the same model, to be driven from one thread."""
    with ExitStack() as stack:
        clients = []
        for worker in range(workers):
            client = DiLoCoClient(broker.address, worker_id=f"w{worker}", timeout=PATIENCE_S)
            clients.append(stack.enter_context(client))
            client.join(model)
        yield clients


def assert_same(got: Outcome, wanted: Outcome, *, exact: bool = False, rtol: float = 2e-5) -> None:
    """Every tensor of every worker after every step, and the global ones at the end."""
    for worker, (ours, theirs) in enumerate(zip(got.histories, wanted.histories, strict=True)):
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            _compare(a, b, f"of worker {worker} after step {step + 1} (1, 2, ...)", exact, rtol)
    _compare(got.final, wanted.final, "at the end", exact, rtol)


def _compare(got: State, wanted: State, where: str, exact: bool, rtol: float) -> None:
    ours = {name: tensor.to(wanted[name].dtype) for name, tensor in got.items()}
    rtol, atol = (0.0, 0.0) if exact else (rtol, 1e-6)
    torch.testing.assert_close(ours, wanted, rtol=rtol, atol=atol, msg=(where + ": {}").format)
