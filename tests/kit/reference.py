"""DiLoCo in one process: loops in plain torch, straight from the formulas, without the product.

Sources: DiLoCo (Douillard et al. 2023, arXiv 2311.08105), Streaming DiLoCo (Douillard et al. 2025, arXiv
2501.18512), Delayed Nesterov (Liu et al. 2024, arXiv 2401.09135, algorithm 3), FedBuff (Nguyen et al.
2022, arXiv 2106.06639). Throughout, g is a pseudo-gradient: the global parameters a worker started from
minus those it reached. Which tensors make a fragment is told by name; nothing is flattened or cut here.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

State = dict[str, Tensor]


@dataclass
class Trainee:
    """What one worker trains, and a function that trains until the optimizer has made one step."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[], None]


class Outcome(NamedTuple):
    """For each worker the state of its model after each optimizer step; the global one at the end."""

    histories: list[list[State]]
    final: State


@contextmanager
def one_thread() -> Iterator[None]:
    """Some of torch's sums depend to the last bit on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def state_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


# Outer optimizers: new global parameters of one fragment from the old ones and a gradient.


class Outer(Protocol):
    def __call__(self, values: State, gradient: State) -> State: ...


MakeOuter = Callable[[int], Outer]  # from the number of the fragment


class ByTorch:
    """Any optimizer of torch.optim, on whole tensors; `make` gets them by name."""

    def __init__(self, make: Callable[[dict[str, nn.Parameter]], Optimizer]) -> None:
        self.make = make
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizer: Optimizer | None = None

    def __call__(self, values: State, gradient: State) -> State:
        if self.optimizer is None:
            self.parameters = {name: nn.Parameter(values[name].clone()) for name in gradient}
            self.optimizer = self.make(self.parameters)
        for name, parameter in self.parameters.items():
            parameter.data.copy_(values[name])
            parameter.grad = gradient[name].clone()
        self.optimizer.step()
        return {name: p.detach().clone() for name, p in self.parameters.items()}


def nesterov(lr: float = 0.7, momentum: float = 0.9) -> MakeOuter:
    """m <- mu m + g; theta <- theta - eta (g + mu m). Plain SGD without momentum."""

    def make(parameters: dict[str, nn.Parameter]) -> Optimizer:
        return SGD(parameters.values(), lr=lr, momentum=momentum, nesterov=momentum > 0)

    return lambda _: ByTorch(make)


@dataclass
class DelayedNesterov:
    """Algorithm 3. D <- D + g with each gradient t = 0, 1, ..., then

    if (t + 1) mod N = 0:  m <- mu m + D/N;  theta <- theta - eta ((1 - cN + c) mu m + g/N);  D <- 0
    otherwise:             theta <- theta - eta (c mu m + g/N)
    """

    lr: float
    mu: float
    n: int
    c: float = 0.0
    m: State = field(default_factory=dict)
    d: State = field(default_factory=dict)
    t: int = 0

    def __call__(self, values: State, gradient: State) -> State:
        lr, mu, n, c = self.lr, self.mu, self.n, self.c
        self.t += 1
        after = {}
        for name, g in gradient.items():
            zero = torch.zeros_like(g)
            d = self.d[name] = self.d.get(name, zero) + g
            m = self.m.get(name, zero)
            if self.t % n == 0:
                m = self.m[name] = mu * m + d / n
                self.d[name] = zero
                after[name] = values[name] - lr * ((1 - c * n + c) * mu * m + g / n)
            else:
                after[name] = values[name] - lr * (c * mu * m + g / n)
        return after


@dataclass
class Buffered:
    """The mean of every N gradients goes through `inner`.

    Between boundaries the parameters stay (FedBuff), or move by -eta g where `direct` is eta: that is
    the variant of Delayed Nesterov that counts gradients twice.
    """

    inner: Outer
    size: int
    direct: float | None = None
    kept: list[State] = field(default_factory=list)

    def __call__(self, values: State, gradient: State) -> State:
        self.kept.append(gradient)
        if len(self.kept) == self.size:
            mean = {
                name: weighted_mean([g[name] for g in self.kept], [1.0] * self.size)
                for name in gradient
            }
            self.kept = []
            return self.inner(values, mean)
        eta = self.direct or 0.0
        return {name: values[name] - eta * g for name, g in gradient.items()}


def without_momentum(lr: float, workers: int) -> MakeOuter:
    """theta <- theta - eta g / k."""
    return lambda _: lambda values, g: {name: values[name] - lr * g[name] / workers for name in g}


# Global parameters.


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum(w_i x_i) / sum(w_i), added up in the order given.

    Here and in `Plan.merged` w x + y is one operation of torch, as inside torch.optim.SGD: it matters to
    the last bit that processors round it once.
    """
    total = weights[0] * values[0]
    for weight, value in zip(weights[1:], values[1:], strict=True):
        total = torch.add(total, value, alpha=weight)
    return total / sum(weights)


def blended(
    old: Tensor, values: Sequence[Tensor], weights: Sequence[float], share: float
) -> Tensor:
    """(1 - share) old + share sum(w_i v_i) / sum(w_i) of a float buffer, in fp64 but for the result."""
    parts = [weight * value.double() for weight, value in zip(weights, values, strict=True)]
    mean = torch.stack(parts).sum(0) / sum(weights)
    return ((1 - share) * old.double() + share * mean).float()


class GlobalModel:
    """What the broker keeps: fp32 parameters, buffers, and an outer optimizer for each fragment.

    Args:
        model: gives the first values.
        fragments: names of the tensors in each fragment, buffers with the last one.
        share: how far a buffer moves to the sent value: 1, all the way, to a mean over the workers,
            1/k to the value of a single worker of k.
        replies: the encoding of a difference of a fragment's parameters on its way down, in the model's
            order; None: parameters travel whole.
    """

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[Sequence[str]],
        make_outer: MakeOuter,
        share: float = 1.0,
        replies: Callable[[State], State] | None = None,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.fragments = fragments
        self.trained = {n for n, p in model.named_parameters() if p.requires_grad}
        self.values = {name: _exact(tensor) for name, tensor in state_of(model).items()}
        self.outers = [make_outer(number) for number in range(len(fragments))]
        self.versions = [0] * len(fragments)
        self.share = share
        self.replies = replies
        self.masters: State = {}  # where workers hold other values

    def state(self) -> State:
        """As a model's state: tied tensors under each of their names, in the model's dtypes."""
        put(self.model, {n: self.values[n] for names in self.fragments for n in names})
        return state_of(self.model)

    def base(self, fragment: int) -> State:
        return {name: self.values[name] for name in self.fragments[fragment]}

    def advance(
        self, fragment: int, deltas: Sequence[State], weights: Sequence[float], scale: float = 1.0
    ) -> State:
        """Apply pseudo-gradients of a fragment as one gradient; returns its new values.

        Args:
            deltas: for each worker g by name; of buffers the values reached.
            scale: what the gradient, and the share of buffers, is multiplied with.
        """
        base = {name: self.masters.get(name, value) for name, value in self.base(fragment).items()}
        gradient, after = {}, {}
        for name, value in base.items():
            parts = [delta[name] for delta in deltas]
            if not value.is_floating_point():
                kept = [value] if self.share < 1 else []
                after[name] = torch.stack(parts + kept).max(0).values
            elif name in self.trained:
                gradient[name] = weighted_mean(parts, weights) * scale
            else:
                after[name] = blended(value, parts, weights, self.share * scale)
        after |= self.outers[fragment](base, gradient)
        if self.replies is not None:
            after |= self._followed(after)
        self.values |= after
        self.versions[fragment] += 1
        return after

    def _followed(self, masters: State) -> State:
        """EF21-P: the workers' values follow the master by the decoded difference."""
        assert self.replies is not None
        names = [name for name in self.values if name in masters and name in self.trained]
        self.masters |= {name: masters[name] for name in names}
        apart = {name: masters[name] - self.values[name] for name in names}
        return {name: self.values[name] + read for name, read in self.replies(apart).items()}


def _exact(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor.clone()


def difference(base: State, model: nn.Module) -> State:
    """A pseudo-gradient: what the model began with (base, rounded as its dtype is) minus what it has
    reached; of buffers the latter."""
    reached = state_of(model)
    buffers = {name for name, _ in model.named_buffers()}
    return {
        name: _exact(reached[name])
        if name in buffers
        else held(value, reached[name]) - reached[name].float()
        for name, value in base.items()
    }


def held(value: Tensor, by: Tensor) -> Tensor:
    """A value of the global parameters as a tensor of a model holds it."""
    return value.to(by.dtype).float()


def put(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    state = model.state_dict()
    for name, value in values.items():
        state[name].copy_(value)


# Workers.


@dataclass(frozen=True)
class Plan:
    """Streaming DiLoCo: what is sent when, and how the reply is merged.

    Attributes:
        sync_every: H. Slot i of a cycle is after its step ((i + 1) H) // P; the slots take the
            fragments in turn.
        fragments: names of the tensors in each.
        delay: tau, steps between sending and merging.
        alpha: local <- alpha local + (1 - alpha) new; None: local <- new + (local - local when sent).
    """

    sync_every: int
    fragments: Sequence[Sequence[str]]
    delay: int = 0
    alpha: float | None = 0.0

    def slots(self) -> list[int]:
        pieces = len(self.fragments)
        return [(i + 1) * self.sync_every // pieces for i in range(pieces)]

    def merged(self, local: Tensor, sent: Tensor, new: Tensor) -> Tensor:
        if not local.is_floating_point():
            return new
        if self.alpha is None:
            return held(new, local) + (local.float() - sent.float())
        return torch.lerp(local.float(), new, 1 - self.alpha)

    def merge(self, model: nn.Module, sent: State, new: State) -> None:
        """Float buffers stay between the local and the new value."""
        local, after = state_of(model), {}
        buffers = {name for name, _ in model.named_buffers()}
        for name, value in new.items():
            after[name] = self.merged(local[name], sent[name], value)
            if name in buffers:
                ends = local[name].to(value.dtype), value
                after[name] = after[name].clamp(torch.minimum(*ends), torch.maximum(*ends))
        put(model, after)


@dataclass
class _Flight:
    """A fragment in flight: each worker's values when it was sent, and the reply and its step."""

    due: int
    sent: list[State]
    new: State


Report = Callable[[int, int], int]  # from worker and step (0, 1, ...)


@dataclass
class _Weights:
    """What each worker has reported of each fragment since it was sent last."""

    report: Report | None
    weigh: Callable[[int, int], float]
    sums: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def count(self, worker: int, step: int, pieces: int) -> None:
        amount = self.report(worker, step) if self.report else 0
        for fragment in range(pieces):
            self.sums.setdefault((worker, fragment), []).append(amount)

    def take(self, workers: int, fragment: int) -> list[float]:
        found = [self.sums.pop((worker, fragment)) for worker in range(workers)]
        weights = [self.weigh(sum(amounts), len(amounts)) for amounts in found]
        return weights if self.report else [1.0] * workers


@one_thread()
def streaming(
    trainees: Sequence[Trainee],
    steps: int,
    plan: Plan,
    make_outer: MakeOuter | None = None,
    *,
    report: Report | None = None,
    weigh: Callable[[int, int], float] = lambda amount, _: float(amount),
    travels: Callable[[int, State], State] = lambda _, delta: delta,
    replies: Callable[[State], State] | None = None,
) -> Outcome:
    """Synchronous (streaming) DiLoCo; with one fragment, DiLoCo.

    Args:
        steps: optimizer steps of each worker.
        make_outer: Nesterov with eta = .7, mu = .9 when left out.
        report: what a step adds to the weight of the worker's next contribution of each fragment;
            None: all weigh alike.
        weigh: the weight of a contribution, from its report and the number of its steps.
        travels: the encoding of a worker's delta of a fragment's parameters, in the model's order, on
            its way.
        replies: as of `GlobalModel`.
    """
    pieces = len(plan.fragments)
    world = GlobalModel(
        trainees[0].model, plan.fragments, make_outer or nesterov(), replies=replies
    )
    weights = _Weights(report, weigh)
    histories: list[list[State]] = [[] for _ in trainees]
    flights: list[_Flight] = []
    rounds = 0
    for step in range(1, steps + 1):
        for worker, trainee in enumerate(trainees):
            trainee.step()
            weights.count(worker, step - 1, pieces)
        position = (step - 1) % plan.sync_every + 1
        for _ in range(plan.slots().count(position)):
            fragment = rounds % pieces
            rounds += 1
            base = world.base(fragment)
            sent = [state_of(trainee.model) for trainee in trainees]
            deltas = [difference(base, trainee.model) for trainee in trainees]
            trained = [name for name in sent[0] if name in base and name in world.trained]
            for worker, delta in enumerate(deltas):
                delta.update(travels(worker, {name: delta[name] for name in trained}))
            new = world.advance(fragment, deltas, weights.take(len(trainees), fragment))
            flights.append(_Flight(step + plan.delay, sent, new))
        for flight in [flight for flight in flights if flight.due == step]:
            flights.remove(flight)
            for trainee, sent_state in zip(trainees, flight.sent, strict=True):
                plan.merge(trainee.model, sent_state, flight.new)
        for history, trainee in zip(histories, trainees, strict=True):
            history.append(state_of(trainee.model))
    return Outcome(histories, world.state())


@one_thread()
def asynchronous(
    trainees: Sequence[Trainee],
    order: Sequence[int],
    plan: Plan,
    make_outer: MakeOuter,
    first_rounds: Sequence[int],
) -> tuple[Outcome, list[tuple[int, int, int]]]:
    """Asynchronous DiLoCo with tau = 0: what a worker sends is applied at once and merged at once.

    Args:
        order: which worker makes the next optimizer step.
        first_rounds: for each worker the fragment (mod P) that it begins with.

    Returns:
        The outcome, and (worker, fragment, staleness) of each push in order; staleness is the number of
        versions of the fragment since the worker's base.
    """
    workers, pieces = len(trainees), len(plan.fragments)
    world = GlobalModel(trainees[0].model, plan.fragments, make_outer, 1 / workers)
    bases = [[world.base(fragment) for fragment in range(pieces)] for _ in trainees]
    versions = [[0] * pieces for _ in trainees]
    steps = [0] * workers
    turn = list(first_rounds)
    histories: list[list[State]] = [[] for _ in trainees]
    pushes = []
    for worker in order:
        model = trainees[worker].model
        trainees[worker].step()
        steps[worker] += 1
        if (steps[worker] - 1) % plan.sync_every + 1 in plan.slots():
            fragment = turn[worker] % pieces
            turn[worker] += 1
            staleness = world.versions[fragment] - versions[worker][fragment]
            pushes.append((worker, fragment, staleness))
            delta = difference(bases[worker][fragment], model)
            new = world.advance(fragment, [delta], [1.0])
            plan.merge(model, state_of(model), new)
            bases[worker][fragment] = new
            versions[worker][fragment] = world.versions[fragment]
        histories[worker].append(state_of(model))
    return Outcome(histories, world.state()), pushes
