"""What few bits cost: final losses by codec, against bf16 up and fp32 down, on paired seeds.

    python -m diloco_tools.experiments.codecs --out runs/codecs.jsonl

All replicas are trained in one process, one after the other, without a broker: only what travels
differs. The codecs are those of the wire; up with error feedback and down as EF21-P, as
`protocol/CODECS.md` has them. Each run is a line of the file, and what is there already is not trained
again: an interrupted table goes on where it stopped, with the same command.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_protocol.dtypes import SIZES, in_few_bits
from diloco_protocol.tensors.codecs import ENCODERS
from diloco_tools.demo import model as gpt
from diloco_tools.demo.data import Text, batch_seed, load_text, training_batches
from diloco_tools.demo.settings import Settings
from diloco_tools.terminal import fail

# Up and down; the first is what the others are held against. A "-" behind one: without error feedback.
PAIRS = (
    "bf16/fp32",
    "bf16/bf16",
    "int8/int8",
    "int4/int4",
    "int4z/int4z",
    "int4z-/fp32",
    "top64/fp32",
)
MODELS = {
    "0.4M": gpt.GPTConfig(context=32),
    "2M": gpt.GPTConfig(context=32, width=208, layers=4),
}
TEXTS = ("code", "prose")  # the standard library; the language reference that comes with it
WINDOWS = 1024  # held out
wrong = partial(fail, "codecs", code=2)


@dataclass(frozen=True)
class Setting:
    """What the runs of one row of the table have in common."""

    model: str = "0.4M"
    text: str = "code"
    sync_every: int = 25  # H
    workers: int = 2  # M
    rounds: int = 100
    batch: int = 4

    def __str__(self) -> str:
        return f"{self.model}, {self.text}, H={self.sync_every}, M={self.workers}"


BASE = Setting()
# The base, and each of its choices changed by itself.
GRID = (
    BASE,
    Setting(workers=4),
    Setting(text="prose"),
    Setting(sync_every=100),
    Setting(model="2M"),
)


class Way:
    """What becomes of a vector on its way; with `feedback` what it leaves out goes with the next."""

    def __init__(self, dtype: str, *, feedback: bool = True) -> None:
        self.dtype = dtype
        self.residual: Tensor | None = None
        self._keeps = feedback and in_few_bits(dtype)

    def __call__(self, values: Tensor) -> Tensor:
        total = values if self.residual is None else values + self.residual
        read = as_read(total, self.dtype)
        if self._keeps:
            self.residual = total - read
        return read


def as_read(values: Tensor, dtype: str) -> Tensor:
    """What is read of the chunks of a vector, in fp32."""
    if dtype == "fp32":
        return values
    if dtype == "bf16":
        return values.bfloat16().float()
    return torch.cat([ENCODERS[dtype](part).read() for part in torch.split(values, CHUNK_ELEMENTS)])


def train(pair: str, setting: Setting, seed: int, text: Text) -> float:
    """Synchronous DiLoCo; returns the held-out loss of what workers hold in the end, nats per byte."""
    up, down = pair.split("/")
    config, usual = MODELS[setting.model], Settings()
    recipe = gpt.Recipe(
        setting.rounds * setting.sync_every, setting.batch, config.context, usual.lr, "cosine"
    )
    replicas = [gpt.build_model(seed, config) for _ in range(setting.workers)]
    optimizers = [gpt.build_optimizer(each, recipe) for each in replicas]
    schedules = [gpt.build_schedule(each, recipe) for each in optimizers]
    batches = [
        training_batches(text.shards[i], setting.batch, config.context, batch_seed(seed, i))
        for i in range(setting.workers)
    ]
    ways = [Way(up.rstrip("-"), feedback=not up.endswith("-")) for _ in replicas]
    master = parameters_to_vector(replicas[0].parameters()).detach().clone()
    held = master.clone()
    master.requires_grad_()
    outer = torch.optim.SGD(
        [master], lr=usual.outer_lr, momentum=usual.outer_momentum, nesterov=True
    )
    for _ in range(setting.rounds):
        total = torch.zeros_like(held)
        for replica, optimizer, schedule, batch, way in zip(
            replicas, optimizers, schedules, batches, ways, strict=True
        ):
            for _ in range(setting.sync_every):
                gpt.inner_step(replica, optimizer, *next(batch))
                schedule.step()
            reached = parameters_to_vector(replica.parameters()).detach()
            total += way(held - reached)
        master.grad = total / setting.workers
        outer.step()
        now = master.detach()
        held = held + as_read(now - held, down) if in_few_bits(down) else as_read(now.clone(), down)
        for replica in replicas:
            with torch.no_grad():
                vector_to_parameters(held.clone(), replica.parameters())  # which become parts of it
    return gpt.validation_loss(replicas[0], *text.validation)


def texts(setting: Setting) -> Text:
    context = MODELS[setting.model].context
    if setting.text == "code":
        return load_text(None, setting.workers, context, WINDOWS)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in topics.topics.items():
            (Path(folder) / name).write_text(text)
        return load_text(Path(folder), setting.workers, context, WINDOWS)


# The file of results.


def lines_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def missing(
    done: Sequence[Mapping[str, Any]], settings: Sequence[Setting], pairs: Sequence[str], seeds: int
) -> Iterator[tuple[Setting, int, str]]:
    """What is to be trained: all codecs of a seed before the next seed, all settings of it as well."""
    known = {(json.dumps(each["setting"]), each["seed"], each["pair"]) for each in done}
    for seed in range(seeds):
        for setting in settings:
            for pair in pairs:
                if (json.dumps(asdict(setting)), seed, pair) not in known:
                    yield setting, seed, pair


def markdown(done: Sequence[Mapping[str, Any]]) -> str:
    """A row for each setting and pair; differences are paired, in percent of the first pair's loss."""
    lines = [
        "| setting | up / down | bits | seeds | final loss | against bf16/fp32: mean | spread |",
        "| --- " * 7 + "|",
    ]
    for setting in dict.fromkeys(json.dumps(each["setting"]) for each in done):
        rows = [each for each in done if json.dumps(each["setting"]) == setting]
        first = {each["seed"]: each["loss"] for each in rows if each["pair"] == PAIRS[0]}
        for pair in PAIRS:
            losses = {each["seed"]: each["loss"] for each in rows if each["pair"] == pair}
            apart = [100 * (losses[s] / first[s] - 1) for s in sorted(losses) if s in first]
            if not losses:
                continue
            mean = statistics.mean(losses.values())
            told = "| |"
            if pair != PAIRS[0] and apart:
                spread = statistics.stdev(apart) if len(apart) > 1 else 0.0
                told = f"{statistics.mean(apart):+.2f}% | {spread:.2f}% |"
            lines.append(
                f"| {Setting(**json.loads(setting))} | {pair} | {bits(pair)} | {len(losses)} "
                f"| {mean:.4f} | {told}"
            )
    return "\n".join(lines)


def bits(pair: str) -> str:
    return " / ".join(f"{8 * SIZES[each.rstrip('-')].element:.3g}" for each in pair.split("/"))


def main(  # noqa: PLR0917  each is an option
    out: Annotated[Path, typer.Option(help="File of results; what it has is kept.")] = Path(
        "runs/codecs.jsonl"
    ),
    seeds: Annotated[int, typer.Option(help="Of parameters and batches, from 0 on.")] = 5,
    rounds: Annotated[int, typer.Option(help="Of each run.")] = BASE.rounds,
    pairs: Annotated[str, typer.Option(help="Dtypes up/down, with commas.")] = ",".join(PAIRS),
    settings: Annotated[str, typer.Option(help="Rows of the grid, by number, with commas.")] = "",
    only_table: Annotated[bool, typer.Option("--table", help="Train nothing.")] = False,
) -> None:
    """Train what is missing of the table, and print it."""
    chosen = [each.strip() for each in pairs.split(",")]
    unknown = [each for each in chosen if each not in PAIRS]
    if unknown:
        wrong(f"--pairs has {unknown[0]!r}; choose from {', '.join(PAIRS)}")
    numbers = [each.strip() for each in settings.split(",") if each.strip()]
    if not all(each.isdigit() and int(each) < len(GRID) for each in numbers):
        wrong(f"--settings {settings!r}: give numbers from 0 to {len(GRID) - 1}")
    rows = [GRID[int(each)] for each in numbers] or list(GRID)
    rows = [Setting(**{**asdict(each), "rounds": rounds}) for each in rows]
    torch.set_num_threads(1)
    done = lines_of(out)
    for setting, seed, pair in [] if only_table else missing(done, rows, chosen, seeds):
        began = time.monotonic()
        loss = train(pair, setting, seed, texts(setting))
        line = {"setting": asdict(setting), "seed": seed, "pair": pair, "loss": loss}
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        done.append(line)
        took = time.monotonic() - began
        typer.echo(f"{setting}, seed {seed}: {pair} {loss:.4f} ({took:.0f} s)")
    typer.echo(markdown(done))


if __name__ == "__main__":
    typer.run(main)
