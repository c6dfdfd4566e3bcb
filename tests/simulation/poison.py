"""One of five workers sends something else than it has learned: the result of each aggregate.

    PYTHONPATH=tests python -m simulation.poison

prints what SECURITY.md has: the final losses of a small network for each attack and each defence,
and how far the parameters were carried along. The broker's core, its tensors and the messages are the
product's, without a network or a clock, and the same seed gives the same figures. All five workers
train at once, as one batch of networks.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from diloco_broker.core import effects, events
from diloco_broker.core.versions.record import InitialModel
from diloco_broker.shell.tensor_work.executor import TensorExecutor
from diloco_broker.tensors.outer.make import make_outer
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.messages import Chunk
from diloco_protocol.tensors.codecs import as_bytes
from kit.core_harness import Puppet, Stage, a_config
from kit.noted_tensors import NotedTensors

WORKERS, ROUNDS, STEPS = 5, 30, 10
HOSTILE = 2  # neither the first nor the last in the order of ids
INPUTS, HIDDEN, CLASSES = 16, 32, 4
BATCH, RATE = 16, 0.2  # of a worker's inner SGD
SHAPES = {"first": (INPUTS, HIDDEN), "shift": (HIDDEN,), "last": (HIDDEN, CLASSES)}
CHUNK = 200  # elements: four chunks, the last one short
MANIFEST = Manifest(
    tuple(TensorEntry(name, shape, "float32", Kind.TRAINABLE) for name, shape in SHAPES.items())
)
# What the hostile worker sends in the place of its pseudo-gradient (flat), given a direction of its own.
ATTACKS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda honest, way: honest,
    "x100": lambda honest, way: 100 * honest,
    "sign-flipped": lambda honest, way: -honest,
    "constant": lambda honest, way: torch.ones_like(honest),
    "one direction": lambda honest, way: way * honest.norm() / 2,
    "x4, sign-flipped": lambda honest, way: -4 * honest,
}
DEFENCES: Mapping[str, dict[str, Any]] = {
    "mean": {},
    "clip-median-norm": {"aggregate": "clip-median-norm"},
    "max-delta-norm auto": {"max_delta_norm": "auto"},
    "trimmed-mean": {"aggregate": "trimmed-mean"},
    "coordinate-median": {"aggregate": "coordinate-median"},
}


class RealTensors:
    """The broker's tensors, as the stage asks for work."""

    def __init__(self, stage: Stage, initial: Mapping[str, Tensor]) -> None:
        self._stage = stage
        self._executor = TensorExecutor(stage.config, make_outer(stage.config), initial, None)
        self.queue = self._executor._queue

    def add(self, work: effects.TensorWork | effects.AtOnce) -> None:
        self._executor.add(work)

    def do_one(self) -> events.Event:
        found: list[events.Event] = []
        while not found:  # a sum that is overdue has no result
            found += self._executor.do_some(self._stage.state.model.layout)
        (event,) = found
        return event


def parameters(stage: Stage) -> Tensor:
    wires = stage.state.versions[0].wires
    return torch.cat([torch.frombuffer(bytearray(w), dtype=torch.float32) for w in wires])


def pushes(puppet: Puppet, push_id: int, delta: Tensor) -> None:
    puppet.begins(push_id, wire_dtype="bf16")
    for index, part in enumerate(torch.split(delta.bfloat16(), CHUNK)):
        chunk = Chunk(0, index, session=puppet.session, push_id=push_id)
        puppet.sends(chunk, as_bytes(part.clone()), on=puppet.bulk)
    puppet.commits()


def split(flat: Tensor) -> list[Tensor]:
    """Of parameters in one row, or in one row for each worker, the tensors."""
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    parts = torch.split(flat, sizes, dim=-1)
    return [p.reshape(*flat.shape[:-1], *s) for p, s in zip(parts, SHAPES.values(), strict=True)]


def losses(flat: Tensor, inputs: Tensor, classes: Tensor) -> Tensor:
    """The sum of the networks' mean losses: rows of parameters, each with inputs of its own."""
    first, shift, last = split(flat)
    scores = torch.tanh(inputs @ first + shift.unsqueeze(-2)) @ last
    each = cross_entropy(scores.flatten(0, -2), classes.flatten(), reduction="none")
    return each.reshape(classes.shape).mean(-1).sum()


class Data:
    """Inputs with the classes that another network, with some noise, gives them."""

    def __init__(self, seed: int) -> None:
        self.dice = torch.Generator().manual_seed(seed)
        elements = sum(math.prod(shape) for shape in SHAPES.values())
        self.teacher = self.normal(1, elements)
        self.start = 0.1 * self.normal(elements)
        way = self.normal(elements)
        self.way = way / way.norm()
        self.held_out = self.draw(1, 2000)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.dice)

    def draw(self, rows: int, size: int) -> tuple[Tensor, Tensor]:
        inputs = self.normal(rows, size, INPUTS)
        first, shift, last = split(self.teacher)
        scores = torch.tanh(inputs @ first / 2 + shift) @ last
        return inputs, (scores + self.normal(*scores.shape)).argmax(-1)


@dataclass(frozen=True)
class Outcome:
    loss: float  # of the global parameters on data held out; infinite where it is not finite
    carried: float  # how far they have come in the direction of "one direction"


def train(attack: str, defence: str, seed: int, rounds: int = ROUNDS) -> Outcome:
    """A run with one hostile worker."""
    data, worsen = Data(seed), ATTACKS[attack]
    config = a_config(
        WORKERS, chunk_elements=CHUNK, outer_lr=0.8, outer_momentum=0.5, **DEFENCES[defence]
    )
    stage = Stage(config, MANIFEST, initial=InitialModel(SHAPES))
    initial = dict(zip(SHAPES, split(data.start), strict=True))
    stage.tensors = cast(NotedTensors, RealTensors(stage, initial))
    puppets = stage.joined(*(f"worker-{n}" for n in range(WORKERS)))
    for number in range(rounds):
        theta = parameters(stage)
        local = theta.repeat(WORKERS, 1)
        for _ in range(STEPS):
            local.requires_grad_()
            (slope,) = torch.autograd.grad(losses(local, *data.draw(WORKERS, BATCH)), local)
            local = (local - RATE * slope).detach()
        deltas = list(theta - local)
        deltas[HOSTILE] = worsen(deltas[HOSTILE], data.way)
        for place, (puppet, delta) in enumerate(zip(puppets, deltas, strict=True)):
            pushes(puppet, 10 * number + place, delta)
        assert stage.counters == [number + 1], f"round {number} does not close"
    theta = parameters(stage)
    loss = float(losses(theta.unsqueeze(0), *data.held_out))
    carried = float((data.start - theta) @ data.way)
    return Outcome(loss if math.isfinite(loss) else math.inf, carried)


def main(seeds: int = 3) -> None:
    torch.set_num_threads(1)
    names, found = list(DEFENCES), {}
    print("| loss | " + " | ".join(names) + " |\n| --- |" + " --- |" * len(names))
    for attack in ATTACKS:
        for name in names:
            found[attack, name] = [train(attack, name, seed) for seed in range(seeds)]
        mean_losses = (mean(each.loss for each in found[attack, name]) for name in names)
        print(f"| {attack} | " + " | ".join(f"{x:.3f}" for x in mean_losses) + " |", flush=True)
    for attack in ("none", "one direction"):
        far = (mean(each.carried for each in found[attack, name]) for name in names)
        print(f"| carried, {attack} | " + " | ".join(f"{x:.2f}" for x in far) + " |")


if __name__ == "__main__":
    main()
