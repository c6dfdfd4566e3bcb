"""A part of the evidence from its first trial to its findings: tune each arm, train it, evaluate it."""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from diloco_lab.driver.records import Results
from diloco_lab.evidence.claim import Arm, Finding, Part, Result
from diloco_lab.evidence.training import DiLoCoRun, Outcome, train_without_broker
from diloco_lab.evidence.trial import Trial
from diloco_tools.demo.data import load_text

cached_text = cache(load_text)  # a process trains many


def outcome_of(trial: Trial) -> Outcome:
    """Train a trial, in this process. Raises DataError."""
    path = None if trial.data is None else Path(trial.data)
    if path is None and trial.lora:
        path = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py")
    shards = 1 if trial.arm == "alone" else trial.workers
    text = cached_text(path, shards, trial.recipe.context, trial.windows)
    if trial.arm == "diloco":
        return DiLoCoRun(trial, text).go()
    return train_without_broker(trial, text)


def measure(trial: Trial) -> Result:
    """Train a trial. Returns its record for a file of results."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    found = outcome_of(trial)
    return {
        "trial": trial.plain(),
        "loss": found.curve[-1][2],
        "curve": [[steps, round(seconds, 3), loss] for steps, seconds, loss in found.curve],
        "bytes_up": found.bytes_up,
        "bytes_down": found.bytes_down,
        "pushes": found.pushes,
        "rejected": found.rejected,
        "staleness": round(found.staleness, 3),
        "seconds": round(time.perf_counter() - began, 1),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def key_of(result: Mapping[str, Any]) -> str:
    """The key of a record's trial."""
    return Trial.from_plain(result["trial"]).key


def missing_of(results: Results, trials: Iterable[Trial]) -> list[Trial]:
    """The trials without a result, each once, in order."""
    by_key = {trial.key: trial for trial in trials}
    return [by_key[key] for key in results.missing(by_key)]


def begin_process() -> None:
    """Have this process end with its parent, even a killed one, and its workers log only warnings."""
    os.environ.setdefault("DILOCO_LOG", "warning")
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def train_all(
    trials: Sequence[Trial], results: Results, jobs: int, tell: Callable[[str], None]
) -> None:
    """Train the trials that have no result yet.

    Args:
        jobs: processes at a time; 0: one for each core.
        tell: takes a line for each completed trial.

    Raises the error of a trial; earlier results are kept.
    """
    missing = missing_of(results, trials)
    if not missing:
        return
    began = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    at_a_time = min(jobs or os.cpu_count() or 1, len(missing))
    with ProcessPoolExecutor(at_a_time, spawn, initializer=begin_process) as pool:
        # The long ones first, so that none of them runs alone at the end.
        futures = [pool.submit(measure, trial) for trial in sorted(missing, key=lambda t: -t.work)]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                result = future.result()
                results.add(result)
                left = (time.monotonic() - began) / done * (len(missing) - done)
                tell(f"{done}/{len(missing)} {told(result)}, about {left / 60:.0f} min left")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()  # otherwise they would finish their trials, for minutes
            raise


def told(result: Result) -> str:
    """A result in a line: its distinctive settings, and its loss."""
    usual = Trial().plain()
    plain = {n: v for n, v in result["trial"].items() if usual.get(n) != v and n != "broker"}
    plain |= result["trial"].get("broker", {})
    words = " ".join(f"{name}={value}" for name, value in plain.items())
    loss = "diverged" if result["loss"] is None else f"{result['loss']:.4f}"
    return f"{words or 'as usual'}: {loss} ({result['seconds']:.0f} s)"


# Settings are chosen on a seed of their own.
TUNING_SEED = 100


@dataclass(frozen=True)
class Tuned:
    """A choice of an arm, and its loss on the seed of the tuning."""

    changes: Mapping[str, Any]
    loss: float | None
    is_best: bool


@dataclass(frozen=True)
class Conducted:
    """A part that has been measured.

    Attributes:
        tuned: the choices of each arm that has any.
        measured: the results of each arm, by seed.
    """

    part: Part
    tuned: Mapping[str, list[Tuned]]
    measured: Mapping[str, list[Result]]

    @property
    def findings(self) -> list[Finding]:
        return [Finding(claim, claim.measure(self.measured)) for claim in self.part.claims]


class Study:
    """The parts' trials, with their training text and the file of their results."""

    def __init__(self, results: Results, *, seeds: int = 3, data: str | None = None) -> None:
        self.results = results
        self._changes: dict[str, Any] = {} if data is None else {"data": data}
        self._seeds = range(seeds)

    def conduct(self, part: Part, jobs: int, tell: Callable[[str], None]) -> Conducted:
        """Train the missing trials of a part; see `train_all`."""
        train_all(self.tuning(part), self.results, jobs, tell)
        train_all(self.measuring(part), self.results, jobs, tell)
        return self.conducted(part)

    def missing(self, part: Part) -> int:
        """Trials without a result; of those that depend on others' results, at least."""
        tuning = missing_of(self.results, self.tuning(part))
        if not tuning:
            return len(missing_of(self.results, self.measuring(part)))
        return len(tuning) + len(part.arms) * len(self._seeds)

    def conducted(self, part: Part) -> Conducted:
        """The results of a part; raises KeyError if one is missing."""
        return Conducted(
            part,
            {arm.name: self._tuned(arm) for arm in part.arms if arm.choices},
            {
                arm.name: [self.results[each.key] for each in self._of(part, arm)]
                for arm in part.arms
            },
        )

    def tuning(self, part: Part) -> list[Trial]:
        return [self._choice(arm, changes) for arm in part.arms for changes in arm.choices]

    def measuring(self, part: Part) -> list[Trial]:
        """The results of an arm, by seed; raises KeyError before the tuning is done."""
        arms = [self._of(part, arm) for arm in part.arms]
        return [trial for of_seed in zip(*arms, strict=True) for trial in of_seed]

    def _choice(self, arm: Arm, changes: Mapping[str, Any]) -> Trial:
        return arm.trial.with_changes(**self._changes, **changes, seed=TUNING_SEED, every=0)

    def _of(self, part: Part, arm: Arm) -> list[Trial]:
        """Its trials with its best setting, one for each seed."""
        if arm.tuned_as:
            (tuned,) = (other for other in part.arms if other.name == arm.tuned_as)
        else:
            tuned = arm
        best = next((dict(each.changes) for each in self._tuned(tuned) if each.is_best), {})
        changed = arm.trial.with_changes(**self._changes, **best)
        return [changed.with_changes(seed=seed) for seed in self._seeds]

    def _tuned(self, arm: Arm) -> list[Tuned]:
        losses = [self.results[self._choice(arm, changes).key]["loss"] for changes in arm.choices]
        if not losses:
            return []
        order = [math.inf if loss is None else loss for loss in losses]
        best = order.index(min(order))
        return [
            Tuned(changes, loss, index == best)
            for index, (changes, loss) in enumerate(zip(arm.choices, losses, strict=True))
        ]
