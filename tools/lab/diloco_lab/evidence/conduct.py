"""A part of the evidence from its first trial to its findings: tune each arm, train it, look at it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco_lab.driver.records import Results
from diloco_lab.evidence.claim import Arm, Finding, Part, Result
from diloco_lab.evidence.driver.running import missing_of, train_all
from diloco_lab.evidence.driver.trial import Trial

# Settings are chosen on a seed that nothing is measured on.
TUNING_SEED = 100


@dataclass(frozen=True)
class Tuned:
    """A choice of an arm, and what came of it on the seed of the tuning."""

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
    """The parts' trials, with the text that they are trained on and the file of their results."""

    def __init__(
        self, results: Results, *, seeds: int = 3, data: str | None = None, steps: int | None = None
    ) -> None:
        self.results = results
        self._changes: dict[str, Any] = {} if data is None else {"data": data}
        if steps is not None:
            self._changes["steps"] = steps
        self._seeds = range(seeds)

    def conduct(self, part: Part, jobs: int, tell: Callable[[str], None]) -> Conducted:
        """Train what is missing of a part; see `train_all`."""
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
        """What is there of it; KeyError where something is missing."""
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
        """KeyError before the tuning is done. Seed by seed."""
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
