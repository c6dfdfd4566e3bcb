"""Runs of the evidence: beside processes and loops without a broker, in virtual time, and failures."""

import json
import math
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

import diloco_tools.demo.train as demo_train
from diloco_broker import Broker, BrokerConfig
from diloco_lab.evidence import training
from diloco_lab.evidence.conduct import measure
from diloco_lab.evidence.training import (
    KEPT,
    LOST,
    Baton,
    Broken,
    DiLoCoRun,
    Stuck,
    lost_in,
    virtual_order,
)
from diloco_lab.evidence.trial import MODELS, Trial
from diloco_tools.demo import model as gpt
from diloco_tools.demo.data import batch_seed, load_text, training_batches
from diloco_worker import DiLoCoClient
from kit.evidence_trials import SPEEDS, TINY, a_text, options, with_tiny_model, without_a_broker
from kit.process_kit import Processes
from kit.reference import Report

# Seconds. A run of several workers in one process takes as many, and others may run beside it.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with_tiny_model(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_run_has_the_bits_of_separate_processes(processes: Processes, tmp_path: Any) -> None:
    """The same training as processes of `diloco_tools.demo.train`, and a broker of its own."""
    trial = Trial(steps=20, sync_every=5).with_changes(workers=3)
    text = load_text(None, 3, 32, trial.windows)
    ours = DiLoCoRun(trial, text).go().parameters
    config = BrokerConfig(
        workers=3, sync_every=5, bind="tcp://127.0.0.1:*", feed="tcp://127.0.0.1:*", **trial.options
    )
    with Broker(config) as broker:
        script = (str(demo_train.__file__), "--server", broker.address)
        children = [
            processes.run(
                *script,
                *("--log", str(tmp_path / f"{number}.jsonl"), "--worker-id", f"worker-{number}"),
                *("--shard", str(number), "--shards", "3", "--steps", "20"),
                *("--batch", "4", "--context", "32", "--lr", str(trial.lr)),
            )
            for number in range(3)
        ]
        for child in children:
            assert child.ends(within=200) == 0, child.output
        with DiLoCoClient(broker.address) as reader:
            theirs = reader.pull().tensors
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    begun = gpt.build_model(0, MODELS["0.4M"]).state_dict()
    assert not any(torch.equal(ours[name], begun[name]) for name in ours)


@pytest.mark.parametrize("inner", ["", "muon"])
def test_local_outer_steps_have_the_bits_of_a_broker(inner: Any) -> None:
    trial = TINY.with_changes(workers=1, inner=inner, every=2, wire_dtype="fp32", **options())
    text = a_text(trial)
    ours = DiLoCoRun(trial, text).go()
    local = trial.with_changes(arm="local", broker=options())
    found = training.train_without_broker(local, text)
    assert found.pushes == ours.pushes == 4
    assert [loss for _, _, loss in found.curve] == [loss for _, _, loss in ours.curve]
    torch.testing.assert_close(found.parameters, ours.parameters, rtol=0, atol=0)


def close(trial: Trial, weight: Report | None = None) -> None:
    """Equal to the loop without a broker, up to rounding, and something was learnt."""
    text = a_text(trial)
    outcome = DiLoCoRun(trial, text).go()
    expected = without_a_broker(trial, text, weight)
    reached = {name: outcome.parameters[name] for name in expected}
    torch.testing.assert_close(reached, expected, rtol=1e-3, atol=2e-5)
    assert outcome.curve[-1][2] < outcome.curve[0][2] - 0.01  # type: ignore[operator]
    assert outcome.rejected == 0


def test_rounds_are_those_of_a_loop_without_a_broker() -> None:
    close(TINY.with_changes(workers=4, **options()))


ASYNC = TINY.with_changes(workers=4, speeds=SPEEDS, mode="async", wire_dtype="fp32", **options())


def test_asynchronous_runs_are_those_of_a_loop_without_a_broker() -> None:
    close(ASYNC)


def test_dynamic_local_updates_are_those_of_a_loop_without_a_broker() -> None:
    trial = ASYNC.with_changes(sync_every=8, dylu=True)
    assert [trial.steps_between(number) for number in range(4)] == [1, 1, 3, 8]
    close(trial)


def test_lost_contributions_are_left_out_of_the_mean() -> None:
    trial = TINY.with_changes(workers=4, drop=0.5, **options())
    lost = {number: lost_in(number, trial) for number in range(trial.rounds)}
    assert any(lost.values())
    close(trial, lambda worker, number: int(worker not in lost[number]))
    assert LOST / KEPT < 1e-8


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 3},
        {"workers": 3, "drop": 0.4},
        {"workers": 4, "speeds": SPEEDS, "mode": "async"},
        {"workers": 2, "num_fragments": 2, "fragment_sync_delay": 1, "sync_every": 4},
        {"workers": 2, "wire_dtype": "int4z", "reply_dtype": "int4z"},
    ],
)
def test_the_same_trial_gives_the_same_bits_and_another_seed_others(
    changes: dict[str, Any],
) -> None:
    trial = TINY.with_changes(**changes)
    text = a_text(trial)
    first, again = DiLoCoRun(trial, text).go(), DiLoCoRun(trial, text).go()
    assert first.curve == again.curve
    assert all(torch.equal(first.parameters[n], again.parameters[n]) for n in first.parameters)
    assert DiLoCoRun(trial.with_changes(seed=1), text).go().curve != first.curve


def test_harm_is_done_and_withstood() -> None:
    usual = TINY.with_changes(workers=3, **options())
    text = a_text(usual)

    def ends(harm: str, aggregate: str) -> torch.Tensor:
        changed = usual.with_changes(harm=harm, aggregate=aggregate)
        reached = DiLoCoRun(changed, text).go().parameters.values()
        return torch.cat([each.flatten() for each in reached])

    good = ends("", "mean")
    moved = float((good - flat(gpt.build_model(0, MODELS["tiny"]))).norm())
    for harm in ("enormous", "reversed"):
        apart = {each: float((ends(harm, each) - good).norm()) for each in ("mean", "trimmed-mean")}
        assert apart["mean"] > (100 if harm == "enormous" else 1) * moved
        assert apart["trimmed-mean"] < moved


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_run_that_diverges_ends_and_says_so(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([5.5, 5.0, math.nan])
    monkeypatch.setattr(gpt, "validation_loss", lambda *_: next(losses))
    result = measure(TINY.with_changes(every=1, mode=mode, steps=200))
    assert [loss for *_, loss in result["curve"]] == [5.5, 5.0, None, None]
    assert result["loss"] is None
    assert result["pushes"] < 20
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("step", [0, 3])
def test_failure_of_one_worker_ends_the_run(
    mode: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in round one, which waits for all workers."""
    trains = training.Worker._trains

    def breaks(self: training.Worker, place: int) -> None:
        if self.number == 1 and self.step == step:
            raise ZeroDivisionError("of one worker")
        trains(self, place)

    monkeypatch.setattr(training.Worker, "_trains", breaks)
    trial = TINY.with_changes(workers=3, mode=mode, speeds=SPEEDS[:3])
    with pytest.raises(ZeroDivisionError, match="of one worker"):
        DiLoCoRun(trial, a_text(trial)).go()


def test_data_parallel_takes_the_step_of_the_whole_batch() -> None:
    """Two replicas with one gradient are one model with the batches of both."""
    trial = TINY.with_changes(arm="data-parallel", workers=2, steps=3)
    text = a_text(trial)
    found = training.train_without_broker(trial, text)
    model = gpt.build_model(0, MODELS[trial.model])
    optimizer = gpt.build_optimizer(model, trial.recipe)
    schedule = gpt.build_schedule(optimizer, trial.recipe)
    batches = [training_batches(text.shards[n], 2, 16, batch_seed(0, n)) for n in (0, 1)]
    for _ in range(3):
        parts = [next(each) for each in batches]
        loss = sum(model.loss(*part) for part in parts) / 2
        loss.backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), gpt.LARGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(found.parameters[name], value, rtol=1e-4, atol=1e-6)


def test_pushes_come_as_the_speeds_have_them() -> None:
    found = list(islice(virtual_order(SPEEDS, [25] * 4), 14))
    ends = sorted((n * 25 / v, w) for w, v in enumerate(SPEEDS) for n in range(1, 20))
    assert found == ends[:14]
    assert [worker for _, worker in found[:8]] == [3, 3, 2, 3, 3, 2, 1, 3]


def passed_on(baton: Baton, workers: int) -> list[tuple[float, int, int]]:
    """Threads that take the baton until the run has ended: when, who, and steps made before."""
    found: list[tuple[float, int, int]] = []

    def work(number: int) -> None:
        while baton.wait_for(number):
            found.append((baton.now, number, baton.made))
            baton.pass_on()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


def test_baton_goes_round_until_all_steps_are_made() -> None:
    baton = Baton([1.0, 2.0], [4, 4], 16)
    assert passed_on(baton, 2) == [(2.0, 1, 0), (4.0, 0, 4), (4.0, 1, 8), (6.0, 1, 12)]
    assert (baton.made, baton.share, baton.now) == (16, 1.0, 6.0)


def test_nobody_waits_for_a_run_that_has_broken() -> None:
    baton = Baton([1.0, 1.0], [1, 1], 10)
    baton.end(broken=True)
    for number in (0, 1):
        with pytest.raises(Broken):
            baton.wait_for(number)


def test_waiting_in_vain_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "PATIENCE_S", 0.01)
    with pytest.raises(Stuck, match="worker 1 had no turn"):
        Baton([2.0, 1.0], [1, 1], 10).wait_for(1)
