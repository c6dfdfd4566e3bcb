"""The comparison of outer optimizers: the virtual clock, the figures, and how divergence is recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from typer import Typer
from typer.testing import CliRunner

from diloco_protocol.errors import Code, Refused
from diloco_tools.demo.data import Text, batch_seed, load_text, training_batches
from diloco_tools.demo.model import (
    LARGEST_GRADIENT,
    GPTConfig,
    build_model,
    build_optimizer,
    learning_rate_factor,
    validation_loss,
)
from diloco_tools.experiments import compare as comparison
from diloco_tools.experiments.compare import (
    OUTER_SETTINGS,
    SPEEDS,
    VARIANTS,
    Plan,
    Trial,
    compare,
    measure,
    trials,
    turns,
)
from diloco_tools.experiments.compare_report import by_setting, differences, draw, markdown
from diloco_worker import DiLoCoClient

TINY = Plan(
    steps=8,
    sync_every=2,
    batch=2,
    model=GPTConfig(context=16, width=16, layers=1, heads=2),
    windows=8,
)
ETA, MU = OUTER_SETTINGS[0]
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    return path


@pytest.fixture(scope="module")
def text(text_file: Path) -> Text:
    return load_text(text_file, len(SPEEDS), TINY.model.context, TINY.windows)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def figures(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run without the real time that it took."""
    return {name: value for name, value in run.items() if name != "seconds"}


# The virtual clock.


def test_asynchronous_turns_come_as_the_speeds_have_them() -> None:
    found = list(islice(turns(Plan(sync_every=25), synchronous=False), 14))
    ends = sorted((n * 25 / v, w) for w, v in enumerate(SPEEDS) for n in range(1, 20))
    assert found == [(virtual_s, (worker,)) for virtual_s, worker in ends[:14]]
    assert [workers[0] for _, workers in found[:8]] == [3, 3, 2, 3, 3, 2, 1, 3]


def test_of_two_that_end_at_once_the_lower_number_goes_first() -> None:
    plan = replace(TINY, speeds=(1.0, 2.0, 1.0))
    found = [workers[0] for _, workers in islice(turns(plan, synchronous=False), 8)]
    assert found == [1, 0, 1, 2, 1, 0, 1, 2]


def test_a_round_takes_as_long_as_the_slowest_worker() -> None:
    found = list(islice(turns(Plan(sync_every=29), synchronous=True), 2))
    assert [virtual_s for virtual_s, _ in found] == pytest.approx([50.0, 100.0])
    assert all(workers == (0, 1, 2, 3) for _, workers in found)


# The figures.


def outer_step(variant: str, state: dict[Any, Any], theta: State, gradient: State) -> None:
    """The formulas of each variant in plain torch, written down once more, from the papers."""
    count, workers = state.setdefault("count", 0), len(SPEEDS)
    state["count"] = count + 1
    at_boundary = (count + 1) % workers == 0
    mu = MU
    if variant.endswith("-warm"):  # of 200 rounds, each as many gradients as there are workers
        rounds = count if variant == "sync-warm" else count / workers
        mu = 0.5 + (MU - 0.5) * min(1.0, rounds / 200)
    for name, g in gradient.items():
        m = state.setdefault(("m", name), torch.zeros_like(g))
        buffered = state.setdefault(("D", name), torch.zeros_like(g))
        buffered += g
        mean = buffered / workers
        match variant:
            case "sync" | "naive" | "exact" | "sync-warm":
                m.mul_(mu).add_(g)
                theta[name] -= ETA * (g + mu * m)
            case "dn" | "dn-warm":
                theta[name] -= ETA * g / workers
                if at_boundary:
                    m.mul_(mu).add_(mean)
                    theta[name] -= ETA * mu * m
            case "sgd":
                theta[name] -= ETA * g / workers
            case "dn-direct" | "fedbuff":
                if at_boundary:
                    m.mul_(MU).add_(mean)
                    theta[name] -= ETA * (mean + MU * m)
                elif variant == "dn-direct":
                    theta[name] -= ETA * g
        if at_boundary:
            buffered.zero_()


def simulated(variant: str, text: Text, seed: int) -> list[float]:
    """Losses of a run without any broker: workers as plain models in one loop."""
    wire = torch.float32 if variant == "exact" else torch.bfloat16
    models = [build_model(seed, TINY.model) for _ in SPEEDS]
    optimizers = [build_optimizer(model, TINY.recipe) for model in models]
    batches = [
        training_batches(shard, TINY.batch, TINY.model.context, batch_seed(seed, number))
        for number, shard in enumerate(text.shards)
    ]
    theta = {name: tensor.detach().clone() for name, tensor in models[0].named_parameters()}
    bases = [{name: tensor.clone() for name, tensor in theta.items()} for _ in SPEEDS]
    begun, total, state = [0] * len(SPEEDS), 0, dict[Any, Any]()
    judge = build_model(seed, TINY.model)
    losses = [validation_loss(judge, *text.validation)]
    for _, workers in turns(TINY, synchronous=VARIANTS[variant]["mode"] == "sync"):
        total += TINY.sync_every * len(workers)
        deltas = []
        for number in workers:
            model, optimizer = models[number], optimizers[number]
            for step in range(TINY.sync_every):
                at = begun[number] + (total - begun[number]) * step / TINY.sync_every
                factor = learning_rate_factor(TINY.recipe, int(at / len(SPEEDS)))
                optimizer.param_groups[0]["lr"] = TINY.lr * factor
                model.loss(*next(batches[number])).backward()  # type: ignore[no-untyped-call]
                clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
                optimizer.step()
                optimizer.zero_grad()
            deltas.append(
                {
                    name: (bases[number][name] - tensor.detach()).to(wire).float()
                    for name, tensor in model.named_parameters()
                }
            )
        mean = {name: torch.stack([d[name] for d in deltas]).mean(0) for name in theta}
        outer_step(variant, state, theta, mean)
        for number in workers:
            bases[number] = {name: tensor.clone() for name, tensor in theta.items()}
            models[number].load_state_dict(theta)
            begun[number] = total
        if total % (TINY.sync_every * len(SPEEDS)) == 0:
            judge.load_state_dict(theta)
            losses.append(validation_loss(judge, *text.validation))
        if total == TINY.total_steps:
            return losses
    raise AssertionError("turns ended")


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_are_those_of_a_loop_without_a_broker(variant: str, text: Text) -> None:
    run = measure(TINY, Trial(variant, ETA, MU, 3), text)
    losses = [loss for *_, loss in run["curve"]]
    assert losses == pytest.approx(simulated(variant, text, 3), rel=1e-4)
    assert losses[-1] < losses[0] - 0.01
    assert run["final_loss"] == losses[-1]
    assert run["diverged_at"] is None
    assert run["refused"] == 0


def test_every_variant_makes_the_same_steps_and_only_asynchronous_ones_are_stale(
    text: Text,
) -> None:
    sync, naive = (measure(TINY, Trial(name, ETA, MU, 0), text) for name in ("sync", "naive"))
    steps = [8, 16, 24, 32]
    assert [at for at, *_ in sync["curve"]] == [at for at, *_ in naive["curve"]] == [0, *steps]
    assert sync["pushes"] == naive["pushes"] == 16
    assert (sync["mean_staleness"], sync["max_staleness"]) == (0, 0)
    # The slowest pushes first after 2 / .58 virtual seconds, when the others have pushed 8 times.
    assert naive["max_staleness"] >= 8
    assert naive["curve"][-1][1] < sync["curve"][-1][1] / 2


def test_the_same_seed_gives_the_same_figures_and_another_one_others(text: Text) -> None:
    trial = Trial("dn", ETA, MU, 1)
    first, again = measure(TINY, trial, text), measure(TINY, trial, text)
    assert figures(first) == figures(again)
    assert figures(measure(TINY, replace(trial, seed=2), text))["curve"] != first["curve"]


# Divergence.


def test_a_run_whose_loss_rises_above_the_start_is_recorded_as_diverged_and_goes_on(
    text: Text,
) -> None:
    run = measure(replace(TINY, lr=100 * TINY.lr), Trial("naive", 10.0, 0.9, 0), text)
    assert run["curve"][1][2] > run["curve"][0][2]
    assert run["diverged_at"] == run["curve"][1][0] == 8
    assert run["curve"][-1][0] == TINY.total_steps
    assert run["final_loss"] == run["curve"][-1][2] > run["curve"][0][2]


def test_a_run_ends_as_diverged_when_its_parameters_overflow(text: Text) -> None:
    run = measure(replace(TINY, lr=1e37), Trial("naive", 10.0, 0.9, 0), text)
    assert 0 < run["diverged_at"] < TINY.total_steps
    assert run["curve"][-1][0] == run["diverged_at"]
    assert run["final_loss"] is run["curve"][-1][2] is None
    json.dumps(run, allow_nan=False)


def test_a_refused_push_does_not_end_the_run(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    push, refusals = DiLoCoClient.push, iter([True])

    def refused_once(client: DiLoCoClient, delta: Mapping[str, Tensor], **options: Any) -> int:
        if next(refusals, False):
            raise Refused(Code.NON_FINITE, "The pseudo-gradient is not finite.")
        return push(client, delta, **options)

    monkeypatch.setattr(DiLoCoClient, "push", refused_once)
    run = measure(TINY, Trial("dn", ETA, MU, 0), text)
    assert (run["refused"], run["pushes"]) == (1, 16)
    assert run["curve"][-1][0] == TINY.total_steps
    assert run["final_loss"] is not None


# The report.


def a_run(variant: str, seed: int, final: float | None, **others: Any) -> dict[str, Any]:
    curve = [(0, 0.0, 5.5), (100, 10.0, 4.0), (200, 20.0, final)]
    return {
        "variant": variant,
        "eta": 0.7,
        "mu": 0.9,
        "seed": seed,
        "curve": curve,
        "final_loss": final,
        "diverged_at": None,
        "mean_staleness": 1.5,
        "max_staleness": 6,
        **others,
    }


def test_differences_are_taken_between_runs_of_the_same_seed() -> None:
    sync = [a_run("sync", 0, 3.0), a_run("sync", 1, 2.0), a_run("sync", 2, None)]
    dn = [a_run("dn", 1, 2.5), a_run("dn", 0, 3.25), a_run("dn", 2, 3.0)]
    assert differences(by_setting(dn)[0.7, 0.9]["dn"], sync) == [0.25, 0.5]


def test_table_shows_differences_divergence_and_when_the_loss_of_sync_was_reached() -> None:
    runs = [a_run("sync", 0, 3.0), a_run("sync", 1, 4.0)]
    runs += [a_run("dn", 0, 3.5), a_run("dn", 1, 3.5, diverged_at=100)]
    runs += [a_run("naive", 0, None, diverged_at=200), a_run("naive", 1, 6.0, diverged_at=200)]
    _, _, sync, naive, dn = markdown(runs).splitlines()
    assert "| 3.5000 | - | - | 0 of 2 | - |" in sync
    assert "| 3.5000 | +0.5000, -0.5000 | +0.0000 | 1 of 2 | 100 (came back) |" in dn
    assert dn.endswith("| 20 | 10 (1 of 2) |")
    assert "| not finite | +2.0000 | +2.0000 | 2 of 2 | 200, 200 |" in naive


def test_plot_is_a_png_also_of_runs_that_ended_early(tmp_path: Path) -> None:
    runs = [a_run("sync", 0, 3.0), a_run("naive", 0, None), a_run("dn-direct", 0, 60.0)]
    report = {"settings": {"speeds": SPEEDS, "sync_every": 25}, "runs": runs}
    draw(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_trials_are_paired_over_seeds_at_the_published_and_at_the_demos_settings() -> None:
    found = list(trials(["sync", "dn"], OUTER_SETTINGS, 2))
    assert found[:4] == [
        Trial("sync", 0.7, 0.9, 0),
        Trial("dn", 0.7, 0.9, 0),
        Trial("sync", 0.8, 0.5, 0),
        Trial("dn", 0.8, 0.5, 0),
    ]
    assert [trial.seed for trial in found] == [0] * 4 + [1] * 4


# The command.


def app() -> Typer:
    made = Typer()
    made.command()(compare)
    return made


def test_command_writes_its_results_and_goes_on_where_it_ended(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Trial] = []

    def counted(plan: Plan, trial: Trial, text: Text) -> dict[str, Any]:
        measured.append(trial)
        first, second = (each[:, : TINY.model.context] for each in text.validation)
        small = replace(plan, model=TINY.model)
        return measure(small, trial, replace(text, validation=(first, second)))

    monkeypatch.setattr(comparison, "measure", counted)
    out = tmp_path / "results.json"
    command = ["--seeds", "1", "--steps", "4", "--sync-every", "2", "--batch", "1"]
    command += ["--data", str(text_file), "--out", str(out), "--variants"]
    answer = CliRunner().invoke(app(), [*command, "sync"])
    assert answer.exit_code == 0, answer.output
    assert [trial.variant for trial in measured] == ["sync"] * 2
    answer = CliRunner().invoke(app(), [*command, "sync,dn"])
    assert [trial.variant for trial in measured] == ["sync"] * 2 + ["dn"] * 2
    assert "Delayed Nesterov, paper" in answer.stdout

    report = json.loads(out.read_text())
    assert set(report) == {"commands", "versions", "settings", "runs"}
    assert set(report["versions"]) == {"torch", "diloco-broker"}
    assert report["settings"]["speeds"] == list(SPEEDS)
    assert [command.split()[-3] for command in report["commands"]] == ["sync", "sync,dn"]
    names = {"variant", "eta", "mu", "seed", "curve", "final_loss", "diverged_at", "pushes"}
    names |= {"mean_staleness", "max_staleness", "refused", "seconds"}
    assert all(set(run) == names for run in report["runs"])
    assert len(report["runs"]) == 4
    assert out.with_suffix(".png").exists()

    answer = CliRunner().invoke(app(), [*command, "sync", "--batch", "2"])
    assert answer.exit_code == 2
    assert "holds a comparison with other settings" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variants", "sync,adam"], "'adam'; choose from sync, naive"),
        (["--steps", "110", "--sync-every", "25"], "take 100 steps"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--speeds", "fast"], "could not convert string to float: 'fast'"),
        (["--outers", "0.7"], "--outers are pairs ETA:MU"),
        (["--speeds", "1,0"], "each must be finite and above 0"),
        (["--speeds", "nan"], "each must be finite and above 0"),
        (["--lr", "-1"], "--lr -1.0; both must be above 0"),
        (["--outers", "0.7:0.9,0:0.5"], "each ETA must be above 0"),
        (["--outers", "0.7:1"], "each MU in [0, 1)"),
        (["--data", "/nonexistent"], "does not exist"),
    ],
)
def test_bad_options_give_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    answer = CliRunner().invoke(app(), ["--out", str(tmp_path / "results.json"), *arguments])
    assert answer.exit_code == 2
    assert words in answer.stderr
    assert answer.stderr.startswith("compare: ")
    assert answer.stderr.count("\n") == 1
