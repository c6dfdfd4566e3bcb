"""Asynchronous outer optimizers against synchronous DiLoCo, measured on workers of different speed.

    python -m diloco_tools.experiments.compare --out runs/async.json

The broker and its four clients are the real ones, over TCP on loopback; only the clock is made up. A
worker of v steps per virtual second needs H / v of them for its H inner steps, and communication takes
none. The worker that is done next is trained next, so the order of the pushes follows from the speeds
alone, not from the machine, and the same seed gives the same figures.

Every variant makes the same total number of inner steps. In rounds each worker makes its quarter, and a
round lasts as long as the slowest; asynchronously the fast ones make more of them, and nobody waits. The
inner learning rate follows the steps of the whole run for everybody: it depends on the total divided
by the number of workers, which in rounds is a worker's own count.
"""

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from heapq import merge
from importlib.metadata import version
from itertools import count, product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from diloco_broker import Broker, BrokerConfig
from diloco_protocol.errors import Refused
from diloco_tools.demo import model as gpt
from diloco_tools.demo.data import DataError, Text, batch_seed, load_text, training_batches
from diloco_tools.demo.settings import Settings, option, with_options
from diloco_tools.experiments.compare_report import draw, markdown
from diloco_tools.terminal import fail
from diloco_worker import DiLoCoClient, GlobalParameters

# Inner steps per second of four devices: the spread of Liu et al. 2024, arXiv 2401.09135.
SPEEDS = (0.58, 0.75, 1.51, 3.33)
CONSTANT = "constant"
WARMUP = "linear:200:0.5"  # of the momentum
# Options of the broker for each variant; without a warm-up where none is named.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "sync": {"mode": "sync", "outer": "nesterov"},
    "naive": {"mode": "async", "outer": "nesterov"},
    "dn": {"mode": "async", "outer": "dn", "dn_variant": "paper"},
    "dn-direct": {"mode": "async", "outer": "dn", "dn_variant": "direct"},
    "fedbuff": {"mode": "async", "outer": "fedbuff"},
    "sgd": {"mode": "async", "outer": "sgd"},
    "exact": {"mode": "sync", "outer": "nesterov", "wire_dtype": "fp32"},
    "sync-warm": {"mode": "sync", "outer": "nesterov", "outer_momentum_warmup": WARMUP},
    "dn-warm": {"mode": "async", "outer": "dn", "outer_momentum_warmup": WARMUP},
}
USUAL_VARIANTS = [name for name in VARIANTS if name != "exact" and not name.endswith("-warm")]
wrong = partial(fail, "compare", code=2)  # one sentence for the user
# (eta, mu): as published for DiLoCo (arXiv 2311.08105), and what the demo found best for itself.
OUTER_SETTINGS = ((0.7, 0.9), (Settings().outer_lr, Settings().outer_momentum))
OUTERS = ",".join(f"{eta}:{mu}" for eta, mu in OUTER_SETTINGS)
TIMEOUT_S = 300.0  # of one call of a client: real seconds, for a busy machine


@dataclass(frozen=True)
class Plan:
    """What all runs of a comparison have in common."""

    # All together make workers x steps.
    steps: int = option(300, "Inner steps for each worker; the fast ones make more of the total.")
    sync_every: int = option(25, "H: inner steps between two pushes; divides the steps.")
    speeds: tuple[float, ...] = SPEEDS  # steps per virtual second
    batch: int = option(4, "Windows in each inner step.")
    lr: float = option(Settings().lr, "Peak learning rate of the workers' AdamW.")
    model: gpt.GPTConfig = field(default_factory=gpt.GPTConfig)
    windows: int = option(256, "Held-out windows of each evaluation.")
    data: str | None = None

    def complaint(self) -> str | None:
        """One sentence about the first setting that cannot work, or None."""
        if not all(0 < speed < math.inf for speed in self.speeds):
            return f"--speeds are {self.speeds}; each must be finite and above 0"
        if self.windows < 1 or not 0 < self.lr < math.inf:
            return f"--windows is {self.windows} and --lr {self.lr}; both must be above 0"
        return Settings(
            steps=self.steps,
            workers=len(self.speeds),
            sync_every=self.sync_every,
            batch=self.batch,
            context=self.model.context,
        ).complaint()

    @property
    def total_steps(self) -> int:
        return self.steps * len(self.speeds)

    @property
    def recipe(self) -> gpt.Recipe:
        return gpt.Recipe(self.steps, self.batch, self.model.context, self.lr, "cosine")


@dataclass(frozen=True)
class Trial:
    """One run: variant, outer learning rate, outer momentum, seed of parameters and batches."""

    variant: str
    eta: float
    mu: float
    seed: int


class Worker:
    """One of the workers: its own model, inner optimizer, batches and client."""

    def __init__(self, plan: Plan, text: Text, seed: int, number: int, client: DiLoCoClient):
        self.plan = plan
        self.client = client
        self.model = gpt.build_model(seed, plan.model)
        self.optimizer = gpt.build_optimizer(self.model, plan.recipe)
        self.batches = training_batches(
            text.shards[number], plan.batch, plan.model.context, batch_seed(seed, number)
        )
        self.start_from(client.join(self.model), 0)

    def start_from(self, base: GlobalParameters, total_steps: int) -> None:
        self.base = base
        self.began_at = total_steps  # inner steps of the whole run when its base was handed out
        self.model.load_state_dict(base.tensors)

    def train(self, total_steps: int) -> None:
        """H inner steps, at whose end the whole run has made `total_steps`."""
        recipe, sync_every = self.plan.recipe, self.plan.sync_every
        for step in range(sync_every):
            along = self.began_at + (total_steps - self.began_at) * step / sync_every
            factor = gpt.learning_rate_factor(recipe, int(along / len(self.plan.speeds)))
            for group in self.optimizer.param_groups:
                group["lr"] = recipe.lr * factor
            gpt.inner_step(self.model, self.optimizer, *next(self.batches))

    @torch.no_grad()
    def pseudo_gradient(self) -> dict[str, Tensor] | None:
        """Base minus what was reached, by name; None where bf16, which is sent, cannot hold it."""
        delta = {
            name: self.base.tensors[name] - parameter
            for name, parameter in self.model.named_parameters()
        }
        fits = all(tensor.bfloat16().isfinite().all() for tensor in delta.values())
        return delta if fits else None


def turns(plan: Plan, *, synchronous: bool) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Virtual seconds, and who has made H steps then and pushes before anybody pulls; without end.

    Of two that are done at once, the lower number goes first.
    """
    if synchronous:
        everybody = tuple(range(len(plan.speeds)))
        for number in count(1):
            yield number * (plan.sync_every / min(plan.speeds)), everybody

    def ends(worker: int, speed: float) -> Iterator[tuple[float, int]]:
        return ((number * plan.sync_every / speed, worker) for number in count(1))

    for virtual_s, worker in merge(*(ends(*each) for each in enumerate(plan.speeds))):
        yield virtual_s, (worker,)


def measure(plan: Plan, trial: Trial, text: Text) -> dict[str, Any]:
    """Train one variant and record how the loss of its global parameters went.

    The loss is evaluated each time that the steps of one round have been made. A run whose loss is
    not finite, or above where it began, counts as diverged from there. It goes on as long as loss and
    pseudo-gradients are finite; what comes after is not comparable with anything.

    Returns:
        The trial's fields, `curve` of (total inner steps, virtual seconds, loss in nats per byte or None
        if it is not finite), `final_loss`, `diverged_at` (total steps, or None), `mean_staleness`,
        `max_staleness` (versions), `pushes`, `refused` (of these, by the broker), `seconds` (real).
    """
    began = time.perf_counter()
    judge = gpt.build_model(trial.seed, plan.model)
    config = BrokerConfig(
        workers=len(plan.speeds),
        sync_every=plan.sync_every,
        outer_lr=trial.eta,
        outer_momentum=trial.mu,
        bind="tcp://127.0.0.1:*",
        feed="tcp://127.0.0.1:*",
        **{"outer_momentum_warmup": CONSTANT, **VARIANTS[trial.variant]},
    )
    at_start = gpt.validation_loss(judge, *text.validation)
    curve: list[tuple[int, float, float | None]] = [(0, 0.0, at_start)]
    diverged_at: int | None = None
    staleness: list[int] = []
    pushes = refused = total = 0

    with Broker(config, initial=judge.state_dict()) as broker, ExitStack() as stack:
        workers = []
        for number in range(len(plan.speeds)):
            client = DiLoCoClient(broker.address, worker_id=f"worker-{number}", timeout=TIMEOUT_S)
            stack.enter_context(client)
            workers.append(Worker(plan, text, trial.seed, number, client))
        for virtual_s, done in turns(plan, synchronous=config.mode == "sync"):
            pushing = [workers[number] for number in done]
            total += plan.sync_every * len(pushing)
            for worker in pushing:
                worker.train(total)
            deltas = [worker.pseudo_gradient() for worker in pushing]
            loss = math.nan
            if None not in deltas:
                pushes += len(pushing)
                for worker, delta in zip(pushing, deltas, strict=True):
                    assert delta is not None
                    try:
                        worker.client.push(delta)
                    except Refused:  # as it may be where a run diverges
                        refused += 1
                for worker in pushing:
                    try:
                        newest = worker.client.pull()  # the version that contains the push
                    except Refused:  # after all
                        refused += 1
                        newest = worker.client.pull()
                    # The versions between the base and that one.
                    staleness.append(newest.version.counter - worker.base.version.counter - 1)
                    worker.start_from(newest, total)
                if total % (plan.sync_every * len(workers)):
                    continue  # this round's steps have not all been made
                judge.load_state_dict(newest.tensors)
                loss = gpt.validation_loss(judge, *text.validation)
            curve.append((total, virtual_s, loss if math.isfinite(loss) else None))
            if diverged_at is None and not loss <= at_start:
                diverged_at = total
            if total == plan.total_steps or not math.isfinite(loss):
                break
    return {
        **asdict(trial),
        "curve": curve,
        "final_loss": curve[-1][2],
        "diverged_at": diverged_at,
        "mean_staleness": statistics.mean(staleness) if staleness else 0.0,
        "max_staleness": max(staleness, default=0),
        "pushes": pushes,
        "refused": refused,
        "seconds": time.perf_counter() - began,
    }


def trials(
    variants: Sequence[str], outers: Sequence[tuple[float, float]], seeds: int
) -> Iterator[Trial]:
    """All runs, seed by seed, so that what is there at any time can be compared in pairs."""
    for seed, (eta, mu), variant in product(range(seeds), outers, variants):
        yield Trial(variant, eta, mu, seed)


def as_json(report: Mapping[str, Any]) -> str:
    """The file of results: a run on each line, so that it can be read and compared line by line."""
    about = json.dumps({name: report[name] for name in report if name != "runs"}, indent=1)
    runs = ",\n  ".join(json.dumps(run, allow_nan=False) for run in report["runs"])
    return about.removesuffix("\n}") + f',\n "runs": [\n  {runs}\n ]\n}}\n'


def told(run: Mapping[str, Any]) -> str:
    """A run in a line, for people who wait for the others."""
    loss, diverged_at = run["final_loss"], run["diverged_at"]
    text = f"{run['variant']} eta {run['eta']} mu {run['mu']} seed {run['seed']}: "
    text += "not finite" if loss is None else f"{loss:.4f}"
    text += "" if diverged_at is None else f", diverged at {diverged_at}"
    return f"{text} ({run['seconds']:.0f} s)"


@with_options(Plan)
def compare(
    *,
    seeds: Annotated[int, typer.Option(help="Runs of each variant, paired by seed.")] = 3,
    outers: Annotated[
        str, typer.Option(help="Outer learning rates and momenta, ETA:MU with commas between them.")
    ] = OUTERS,
    speeds: Annotated[
        str, typer.Option(help="Steps per virtual second of each worker, with commas between them.")
    ] = ",".join(map(str, SPEEDS)),
    variants: Annotated[
        str, typer.Option(help="Which to measure, with commas between them.")
    ] = ",".join(USUAL_VARIANTS),
    data: Annotated[
        Path | None, typer.Option(help="Text file or folder; default: Python's own library.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="JSON file of results; the plot goes beside it, as .png.")
    ] = Path("runs/async-comparison.json"),
    **given: Any,
) -> None:
    """Measure asynchronous outer optimizers against synchronous DiLoCo; print a table, draw a plot.

    Each run is kept as soon as it is there. Runs that the file holds already are not made again, so
    that an interrupted comparison goes on and more variants can be added.
    """
    try:
        pairs = (pair.split(":") for pair in outers.split(","))
        settings = [(float(eta), float(mu)) for eta, mu in pairs]
        path = None if data is None else str(data)
        plan = Plan(**given, speeds=tuple(map(float, speeds.split(","))), data=path)
    except ValueError as error:
        wrong(f"--speeds are numbers and --outers are pairs ETA:MU, with commas between; {error}")
    if not all(0 < eta < math.inf and 0 <= mu < 1 for eta, mu in settings):
        wrong(f"--outers are {outers}; each ETA must be above 0, each MU in [0, 1)")
    names = [name.strip() for name in variants.split(",")]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        wrong(f"--variants names {unknown[0]!r}; choose from {', '.join(VARIANTS)}")
    if seeds < 1:
        wrong(f"--seeds is {seeds} but must be at least 1")
    if complaint := plan.complaint():
        wrong(complaint)
    torch.set_num_threads(1)  # the clients' threads and the broker's share the machine
    plain = json.loads(json.dumps(asdict(plan)))  # as it is read back
    report: dict[str, Any] = {"settings": plain, "commands": [], "runs": []}
    if out.exists():
        report = json.loads(out.read_text())
        if report["settings"] != plain:
            wrong(f"{out} holds a comparison with other settings; name another file with --out")
    try:
        text = load_text(data, len(plan.speeds), plan.model.context, plan.windows)
    except DataError as error:
        wrong(str(error))
    command = (
        f"python -m diloco_tools.experiments.compare --seeds {seeds} --steps {plan.steps} "
        f"--sync-every {plan.sync_every} --batch {plan.batch} --lr {plan.lr} "
        f"--outers {','.join(f'{eta:g}:{mu:g}' for eta, mu in settings)} "
        f"--speeds {','.join(f'{speed:g}' for speed in plan.speeds)} "
        f"--windows {plan.windows} --variants {','.join(names)}"
        + (f" --data {data}" if data is not None else "")
    )
    report["commands"] += [command] if command not in report["commands"] else []
    report["versions"] = {name: version(name) for name in ("torch", "diloco-broker")}
    out.parent.mkdir(parents=True, exist_ok=True)
    known = [Trial(*(run[each.name] for each in fields(Trial))) for run in report["runs"]]
    wanted = [trial for trial in trials(names, settings, seeds) if trial not in known]
    for number, trial in enumerate(wanted, 1):
        report["runs"].append(measure(plan, trial, text))
        out.write_text(as_json(report))
        typer.echo(f"{number}/{len(wanted)} {told(report['runs'][-1])}", err=True)
    typer.echo(markdown(report["runs"]))
    try:
        draw(report, out.with_suffix(".png"))
    except ImportError:
        typer.echo("no plot: matplotlib is missing (pip install 'diloco-broker[plot]')", err=True)


if __name__ == "__main__":
    typer.run(compare)
