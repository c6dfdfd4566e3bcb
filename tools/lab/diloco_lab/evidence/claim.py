"""A claim: the expected relation, the measured values of paired seeds, and the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from diloco_lab.evidence.trial import Trial, parameters

Result = Mapping[str, Any]
Measured = Mapping[str, Sequence[Result]]  # by arm, in the order of the seeds
Verdict = Literal["PASS", "NOT SHOWN", "reported"]

DIVERGED = math.inf  # of a run that has diverged: worse than any other
FEWEST_SEEDS = 3  # fewer do not show a spread


@dataclass(frozen=True)
class Relation:
    """The bounds of a figure; either may be missing."""

    least: float = -math.inf
    most: float = math.inf

    def __str__(self) -> str:
        if self.least == -math.inf:
            return "" if self.most == math.inf else f"at most {self.most:+g}%"
        if self.most == math.inf:
            return f"at least {self.least:+g}%"
        return f"{self.least:+g}% to {self.most:+g}%"

    @property
    def is_open(self) -> bool:
        """Without bounds: the figure is only reported."""
        return self.least == -math.inf and self.most == math.inf


@dataclass(frozen=True)
class Claim:
    """One line of the evidence.

    Attributes:
        text: the claim, a sentence.
        relation: the bounds of the figure, in percent.
        measure: the figure of each seed, in percent, from the results of the part's arms.
        published: the paper's figure and its place; "" for a claim of ours.
        never: the text for an infinite figure.
    """

    text: str
    relation: Relation
    measure: Callable[[Measured], list[float]]
    published: str = ""
    never: str = "diverged"


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seed, and from those of other arms in the compared setting.

    Attributes:
        name: in tables and pictures.
        trial: its first seed.
        choices: settings, each as changes of the trial, of which the best is used; it is found on a seed
            of its own. Without choices the trial is used as it is.
        tuned_as: the arm of the same part whose best setting this one uses instead.
        speed: steps a second of the slowest worker, which rounds wait for; it gives the curve in virtual
            seconds.
    """

    name: str
    trial: Trial
    choices: tuple[Mapping[str, Any], ...] = ()
    tuned_as: str = ""
    speed: float = 1.0


@dataclass(frozen=True)
class Part:
    """One question: its arms and the claims about them.

    Attributes:
        name: on the command line.
        axis: the horizontal axis of its picture.
    """

    name: str
    title: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...]
    axis: Literal["steps", "seconds", "bytes"] = "steps"


@dataclass(frozen=True)
class Finding:
    """A claim with its measured values."""

    claim: Claim
    values: list[float]  # of each seed, in percent

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite for a single value, or if one is not finite."""
        if len(self.values) < 2 or not all(map(math.isfinite, self.values)):
            return math.inf
        return statistics.stdev(self.values) / math.sqrt(len(self.values))

    @property
    def verdict(self) -> Verdict:
        """PASS if the mean is within the bounds also one standard error nearer to them.

        If some seeds diverged, each of the others must be within them; a diverged one is above all.
        """
        relation = self.claim.relation
        if relation.is_open:
            return "reported"
        if len(self.values) < FEWEST_SEEDS or any(map(math.isnan, self.values)):
            return "NOT SHOWN"
        if all(map(math.isfinite, self.values)):
            low, high = self.mean - self.error, self.mean + self.error
        else:
            low, high = min(self.values), max(self.values)
        return "PASS" if relation.least <= low and high <= relation.most else "NOT SHOWN"

    @property
    def told(self) -> str:
        """The mean with its error and all values; or the number of diverged seeds."""
        if any(map(math.isnan, self.values)):
            return "no figure: the compared arm has diverged"
        each = ", ".join(f"{value:+.1f}" for value in self.values if value != DIVERGED)
        diverged = sum(value == DIVERGED for value in self.values)
        if diverged:
            others = f" (others: {each})" if each else ""
            return f"{self.claim.never} in {diverged} of {len(self.values)}{others}"
        spread = f" ± {self.error:.1f}" if len(self.values) > 1 else ""
        return f"{self.mean:+.1f}%{spread} ({each})"


# Figures that claims are about.


def perplexity(result: Result) -> float:
    """exp of the held-out loss, per byte; infinite if the run has diverged."""
    loss = result["loss"]
    # Training begins at 5.3.
    return DIVERGED if loss is None or loss > 10 else math.exp(loss)


def sent(result: Result) -> list[float]:
    """The bytes that a worker has sent and received, on the mean, at each point of the curve.

    The first parameters travel in fp32, then rounds are alike. Data-parallel training is worked out: at
    each step a gradient in bf16, and the mean in bf16.
    """
    trial = Trial.from_plain(result["trial"])
    size = sum(parameters(trial.model))
    first, last = 0.0, 4.0 * size * trial.steps
    if trial.arm == "diloco":
        last = (result["bytes_up"] + result["bytes_down"]) / trial.workers
        first = min(last, 4 * size * (trial.workers + 1) / trial.workers)
    return [first + (last - first) * steps / trial.steps for steps, *_ in result["curve"]]


Arms = tuple[str, str]  # one, and the other that it is compared with


def apart(arm: str, base: str) -> Callable[[Measured], list[float]]:
    """The percentage by which the perplexity of one arm is above that of another, for each seed.

    Not a number if the other has diverged.
    """

    def measure(found: Measured) -> list[float]:
        values = []
        for one, other in zip(found[arm], found[base], strict=True):
            against = perplexity(other)
            is_there = math.isfinite(against)
            values.append(100 * (perplexity(one) / against - 1) if is_there else math.nan)
        return values

    return measure


def compared(
    text: str,
    arms: Arms,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    published: str = "",
) -> Claim:
    """The perplexity of one arm against that of another; without bounds it is only reported."""
    return Claim(text, Relation(least, most), apart(*arms), published)


def until(result: Result, loss: float | None) -> float:
    """Virtual seconds until the curve first is at this loss or below; infinite if never."""
    if loss is None:
        return math.nan
    curve = result["curve"]
    return next((at for _, at, seen in curve if seen is not None and seen <= loss), DIVERGED)


NEAR = 1.01  # times the final loss of rounds counts as reached; seeds differ by as much


def sooner(text: str, arms: Arms, speed: float, *, most: float = math.inf) -> Claim:
    """The percentage by which one arm is later than rounds to be within 1% of their final loss.

    Below 0: sooner. Infinite: never. `speed` is that of the slowest worker of the rounds.
    """
    arm, base = arms

    def measure(found: Measured) -> list[float]:
        values = []
        for one, other in zip(found[arm], found[base], strict=True):
            target = None if other["loss"] is None else NEAR * other["loss"]
            values.append(100 * (until(one, target) / (until(other, target) / speed) - 1))
        return values

    return Claim(text, Relation(most=most), measure, never="not reached")


Choices = tuple[Mapping[str, Any], ...]


def outer(*pairs: tuple[float, float]) -> Choices:
    """Outer learning rates eta and momenta mu."""
    return tuple({"outer_lr": eta, "outer_momentum": mu} for eta, mu in pairs)


# As published for DiLoCo (.7, .9; arXiv 2311.08105), with less momentum, with none.
OUTER = outer((0.7, 0.9), (0.8, 0.5), (1.0, 0.0))
# For an outer step at each push of one of four workers: four times as many steps.
OUTER_PER_PUSH = outer((0.2, 0.5), (0.1, 0.9), (0.25, 0.0))
# For Adam at each push: its steps are eta / (4 epsilon) times a mean of gradients far below epsilon.
OUTER_ADAM = (*outer((0.2, 0.5), (0.1, 0.9)), {**outer((0.02, 0.5))[0], "cgad_epsilon": 0.01})
INNER: Choices = tuple({"lr": lr} for lr in (0.75e-3, 1.5e-3, 3e-3))
