"""What is claimed, what counts as shown, and how an arm gets its settings."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_broker import BrokerConfig
from diloco_lab.driver.records import Results
from diloco_lab.evidence import conduct, training
from diloco_lab.evidence.claim import Arm, Claim, Finding, Part, Relation, apart, sooner
from diloco_lab.evidence.conduct import TUNING_SEED, Study, key_of, missing_of, train_all
from diloco_lab.evidence.parts import PARTS
from diloco_lab.evidence.trial import MODELS, Trial
from diloco_tools.demo import model as gpt
from kit.evidence_trials import a_result

pytestmark = pytest.mark.timeout(300)  # seconds: processes load torch, one after the other


@pytest.mark.parametrize(
    ("values", "relation", "verdict"),
    [
        ([-5.0, -4.0, -6.0], Relation(most=-3), "PASS"),
        ([-3.2, -2.9, -3.1], Relation(most=-3), "NOT SHOWN"),  # within its error of the bound
        ([-9.0, 2.0, -4.0], Relation(most=-3), "NOT SHOWN"),
        ([6.0, 7.0, 6.5], Relation(least=5), "PASS"),
        ([4.0, 7.0, 5.5], Relation(least=5), "NOT SHOWN"),
        ([0.1, -0.1, 0.0], Relation(-1, 1), "PASS"),
        ([1.4, 1.5, 1.3], Relation(-1, 1), "NOT SHOWN"),
        ([-9.0, -9.1], Relation(most=-3), "NOT SHOWN"),  # of two seeds
        ([-9.0], Relation(most=-3), "NOT SHOWN"),
        ([math.inf, 7.0, 9.0], Relation(least=5), "PASS"),  # what diverges is worse by far
        ([math.inf] * 3, Relation(least=5), "PASS"),
        ([math.inf, -10.0, -10.0], Relation(least=5), "NOT SHOWN"),
        ([math.inf, 1.0, 1.0], Relation(most=5), "NOT SHOWN"),
        ([math.nan, 1.0, 1.0], Relation(most=5), "NOT SHOWN"),
        ([], Relation(most=5), "NOT SHOWN"),
    ],
)
def test_claim_is_shown_when_the_mean_keeps_to_it_also_one_error_on(
    values: list[float], relation: Relation, verdict: str
) -> None:
    claim = Claim("it is so", relation, lambda _: values)
    assert Finding(claim, values).verdict == verdict


def test_time_until_near_the_final_loss_of_rounds_is_held_against_theirs() -> None:
    rounds = [
        a_result(Trial(), 2.0)
    ]  # at 100 / 0.5 seconds, the slowest makes half a step a second
    fast = [a_result(Trial(), 2.019, ends=80.0)]  # within 1% after 80 seconds
    far = [a_result(Trial(), 2.021)]
    never = [a_result(Trial(), None)]
    found = {"rounds": rounds, "fast": fast, "far": far, "never": never}
    assert sooner("soon", ("fast", "rounds"), 0.5).measure(found) == pytest.approx([-60.0])
    for arm in ("far", "never"):
        assert sooner("soon", (arm, "rounds"), 0.5).measure(found) == [math.inf]
    claim = sooner("soon", ("fast", "never"), 0.5, most=0)
    assert math.isnan(claim.measure(found)[0])
    assert Finding(claim, [math.inf, math.inf]).told == "not reached in 2 of 2"


def test_every_arm_has_options_that_a_broker_takes() -> None:
    for part in PARTS.values():
        for arm in part.arms:
            for changes in arm.choices or ({},):
                trial = arm.trial.with_changes(**changes)
                assert trial.steps % trial.sync_every == 0
                assert Trial.from_plain(json.loads(trial.key)).key == trial.key
                if trial.arm == "diloco":
                    addresses: dict[str, Any] = {
                        "bind": "tcp://127.0.0.1:*",
                        "feed": "tcp://127.0.0.1:*",
                    }
                    every = trial.sync_every
                    BrokerConfig(
                        workers=trial.workers, sync_every=every, **addresses, **trial.options
                    )


def test_every_claim_is_about_arms_of_its_part() -> None:
    for part in PARTS.values():
        found = {
            arm.name: [a_result(arm.trial.with_changes(seed=seed), 2.0) for seed in range(3)]
            for arm in part.arms
        }
        assert len(found) == len(part.arms)
        for claim in part.claims:
            assert len(claim.measure(found)) == 3


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results.jsonl", key_of)


def trained(losses: Callable[[Trial], float | None]) -> Callable[..., None]:
    """In place of training: the loss of each trial by a rule."""

    def train(
        trials: list[Trial], results: Results, jobs: int, tell: Callable[[str], None]
    ) -> None:
        for trial in missing_of(results, trials):
            results.add(a_result(trial, losses(trial)))

    return train


def by_rate(trial: Trial) -> float | None:
    """Best at .4 on the seed of the tuning, at .8 on all others, diverged at 1."""
    rate = trial.broker["outer_lr"]
    best = 0.4 if trial.seed == TUNING_SEED else 0.8
    return None if rate == 1.0 else 2.0 + abs(rate - best)


RATES = ({"outer_lr": 0.4}, {"outer_lr": 0.8}, {"outer_lr": 1.0})
PART = Part(
    "it",
    "It",
    (
        Arm("tuned", Trial(every=5), RATES),
        Arm("like it", Trial(workers=4), tuned_as="tuned"),
        Arm("fixed", Trial(broker={"outer_lr": 0.8})),
    ),
    (Claim("it is so", Relation(most=5), apart("tuned", "fixed")),),
)


def test_arm_gets_the_setting_that_is_best_on_a_seed_that_nothing_is_measured_on(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_lab.evidence.conduct.train_all", trained(by_rate))
    study = Study(results, seeds=2)
    assert study.missing(PART) == 3 + 3 * 2
    found = study.conduct(PART, 1, print)
    assert [(each.loss, each.is_best) for each in found.tuned["tuned"]] == [
        (2.0, True),
        (2.4, False),
        (None, False),
    ]
    seeds = {
        name: [Trial.from_plain(r["trial"]) for r in of] for name, of in found.measured.items()
    }
    assert [trial.seed for trial in seeds["tuned"]] == [0, 1]
    for name, rate in (("tuned", 0.4), ("like it", 0.4), ("fixed", 0.8)):
        assert {trial.broker["outer_lr"] for trial in seeds[name]} == {rate}
    assert found.findings[0].values == pytest.approx([100 * (math.exp(0.4) - 1)] * 2)
    assert study.missing(PART) == 0


def test_results_are_kept_one_by_one_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "folder" / "results.jsonl"
    results = Results(file, key_of)
    results.add(a_result(Trial(seed=1), 2.0))
    with file.open("a") as opened:
        opened.write('{"trial": {"seed": 2')  # the machine was switched off
    again = Results(file, key_of)
    assert Trial(seed=1).key in again and Trial(seed=2).key not in again
    trials = [Trial(seed=1), Trial(seed=2), Trial(seed=2)]
    assert missing_of(again, trials) == [Trial(seed=2)]
    again.add(a_result(Trial(seed=2), 3.0))
    assert Results(file, key_of)[Trial(seed=2).key]["loss"] == 3.0


def test_trials_are_trained_in_processes_and_failures_are_raised(results: Results) -> None:
    told: list[str] = []
    small = Trial(arm="alone", workers=1, steps=2, windows=8, batch=1)
    train_all([small, small.with_changes(seed=1)], results, 2, told.append)
    assert results[small.key]["loss"] > 3 and len(told) == 2
    assert conduct.told(results[small.key]).startswith("arm=alone")
    train_all([small], results, 2, told.append)
    assert len(told) == 2  # nothing was missing
    with pytest.raises(Exception, match="does not exist"):
        train_all([small.with_changes(data="/nowhere")], results, 1, told.append)


def test_fine_tuning_begins_with_the_trained_model_and_trains_adapters_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = gpt.build_model(7, MODELS["0.4M"])
    monkeypatch.setattr(training, "first_trained", lambda _: trained.state_dict())
    trial = Trial(workers=2, steps=4, sync_every=2, lora=4, windows=8)
    begin, tokens = training.model_of(trial), torch.arange(32)[None]
    assert torch.equal(begin(tokens), trained(tokens))
    found, before = conduct.outcome_of(trial).parameters, begin.state_dict()
    moved = {name for name, value in found.items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.endswith((".down", ".up"))} < before.keys()
    assert len(moved) == 2 * 4 * MODELS["0.4M"].layers, "two factors of each matrix of a block"


@pytest.mark.parametrize("name", ["finetune", "diloco", "diloco-paper"])
def test_fine_tuning_was_measured_with_the_presets_as_they_are(name: str) -> None:
    (arm,) = (arm for arm in PARTS["finetune"].arms if arm.name == f"preset {name}")
    preset = BrokerConfig.from_preset(name, workers=4)
    measured = BrokerConfig(workers=4, **arm.trial.broker)
    assert measured == preset
