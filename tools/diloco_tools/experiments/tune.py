"""How the demo's defaults were chosen: DiLoCo simulated in one process, over several seeds.

    python -m diloco_tools.experiments.tune --out runs/tune.json

trains the single worker at several learning rates and DiLoCo at several learning rates and outer
settings, and prints the table of `tools/EXPERIMENTS.md`. Each result is written at once, and a second
run goes on where the first one ended. The whole grid takes about an hour on one core.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from diloco_tools.demo.data import batch_seed, load_shard, training_batches, validation_windows
from diloco_tools.demo.model import (
    GPTConfig,
    Recipe,
    build_model,
    build_optimizer,
    build_schedule,
    inner_step,
    validation_loss,
)

SEEDS = (0, 1, 2)
STEPS, BATCH, CONTEXT = 1500, 8, 64
SINGLE_LEARNING_RATES = (1e-3, 2e-3, 2.5e-3, 3e-3, 4e-3)
# (inner learning rate, H, outer learning rate, outer momentum)
DILOCO_GRID = (
    (2e-3, 50, 1.0, 0.0),
    (2e-3, 50, 0.8, 0.5),
    (2e-3, 50, 0.7, 0.5),
    (2e-3, 50, 0.7, 0.9),
    (3e-3, 50, 1.0, 0.0),
    (3e-3, 50, 0.8, 0.5),
    (3e-3, 50, 0.7, 0.5),
    (2e-3, 25, 1.0, 0.0),
    (2e-3, 25, 0.7, 0.5),
    (2e-3, 100, 0.7, 0.5),
)
WINDOWS = 1024  # held-out windows for each result


@dataclass(frozen=True)
class Outer:
    """The synchronisation: number of workers, H, outer learning rate and Nesterov momentum."""

    workers: int
    sync_every: int
    lr: float
    momentum: float


@dataclass(frozen=True)
class Trial:
    """One training run; `outer` is None for a worker that trains alone, on all of the text."""

    recipe: Recipe
    outer: Outer | None
    seed: int

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def outer_step(
    theta: dict[str, Tensor],
    momentum: dict[str, Tensor],
    reached: Sequence[Mapping[str, Tensor]],
    outer: Outer,
) -> None:
    """One step of the outer optimizer, in place: Nesterov on the mean pseudo-gradient.

    g = mean(theta - theta_i);  m <- mu m + g;  theta <- theta - eta (g + mu m)
    (Douillard et al. 2023, arXiv 2311.08105.) `reached` holds each worker's parameters by name.
    """
    for name, parameter in theta.items():
        gradient = torch.stack([parameter - worker[name] for worker in reached]).mean(0)
        momentum[name].mul_(outer.momentum).add_(gradient)
        parameter.sub_(outer.lr * (gradient + outer.momentum * momentum[name]))


def simulate(trial: Trial, data: Path | None = None) -> float:
    """Validation loss in nats per byte of the global model after the trial's last round."""
    recipe, outer = trial.recipe, trial.outer
    workers = outer.workers if outer else 1
    sync_every = outer.sync_every if outer else recipe.steps
    config = GPTConfig(context=recipe.context)
    models = [build_model(trial.seed, config) for _ in range(workers)]
    optimizers = [build_optimizer(model, recipe) for model in models]
    schedules = [build_schedule(optimizer, recipe) for optimizer in optimizers]
    batches = []
    for worker in range(workers):
        text, held_out = load_shard(data, worker, workers, recipe.context)
        seed = batch_seed(trial.seed, worker)
        batches.append(training_batches(text, recipe.batch, recipe.context, seed))
    theta = {name: tensor.detach().clone() for name, tensor in models[0].named_parameters()}
    momentum = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}

    for start in range(0, recipe.steps, sync_every):
        for worker, model in enumerate(models):
            for _ in range(start, min(start + sync_every, recipe.steps)):
                inner_step(model, optimizers[worker], *next(batches[worker]))
                schedules[worker].step()
        if outer:
            with torch.no_grad():
                reached = [dict(model.named_parameters()) for model in models]
                outer_step(theta, momentum, reached, outer)
                for model in models:
                    model.load_state_dict(theta)
    return validation_loss(models[0], *validation_windows(held_out, WINDOWS, recipe.context))


def trials() -> Iterator[Trial]:
    """The whole grid, one setting after the other, each with every seed."""
    outers: list[tuple[float, Outer | None]] = [(lr, None) for lr in SINGLE_LEARNING_RATES]
    outers += [(lr, Outer(2, h, outer_lr, mu)) for lr, h, outer_lr, mu in DILOCO_GRID]
    for (lr, outer), seed in product(outers, SEEDS):
        yield Trial(Recipe(STEPS, BATCH, CONTEXT, lr, "cosine"), outer, seed)


def markdown(losses: Mapping[str, float]) -> str:
    """The table of all settings for which every seed is there, and the mean of each."""
    lines = [
        "| who | inner lr | H | outer lr | momentum | "
        + " | ".join(f"seed {seed}" for seed in SEEDS)
        + " | mean |",
        "| --- " * (6 + len(SEEDS)) + "|",
    ]
    settings: dict[tuple[float, Outer | None], list[float]] = {}
    for trial in trials():
        if trial.key in losses:
            settings.setdefault((trial.recipe.lr, trial.outer), []).append(losses[trial.key])
    for (lr, outer), found in settings.items():
        if len(found) < len(SEEDS):
            continue
        who = f"DiLoCo, {outer.workers} workers" if outer else "one worker"
        figures = (outer.sync_every, outer.lr, outer.momentum) if outer else ("-", "-", "-")
        cells = [who, lr, *figures, *(f"{loss:.4f}" for loss in found)]
        cells.append(f"{statistics.mean(found):.4f}")
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def tune(
    out: Annotated[Path, typer.Option(help="JSON file that keeps the results.")] = Path(
        "runs/tune.json"
    ),
    data: Annotated[
        Path | None, typer.Option(help="Text file or folder; default: Python's own library.")
    ] = None,
) -> None:
    """Train the whole grid of settings, keep what is found, print the table."""
    torch.set_num_threads(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    losses: dict[str, float] = json.loads(out.read_text()) if out.exists() else {}
    for trial in trials():
        if trial.key not in losses:
            losses[trial.key] = simulate(trial, data)
            out.write_text(json.dumps(losses, indent=1) + "\n")
            typer.echo(f"{losses[trial.key]:.4f}  {trial}", err=True)
    typer.echo(markdown(losses))


if __name__ == "__main__":
    typer.run(tune)
