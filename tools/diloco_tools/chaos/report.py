"""What one mode of the drill has shown, and which promises it has broken. Pure.

Each broken promise is one sentence that names the values.

**Useful work** is inner steps inside applied contributions over inner steps trained. The unit is one
inner step on one fragment, so with P fragments a step counts P times: once for each fragment whose
pseudo-gradient has to carry it. A pseudo-gradient carries the steps since the last one of its fragment;
it is applied when all of it is in the lineage of the final version. What is in there by halves counts
as nothing. That holds in every mode; asynchronous runs of the drill have P = 1. Steps of killed lives
are known from a file that each step writes.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from diloco_tools.chaos.audit import Contribution, Findings, Push, Record, WorkerLog
from diloco_tools.chaos.faults import WORKERS, Injected, Kind
from diloco_tools.chaos.job import Life

LEAST_SHARE_AVERAGED = 0.95
MOST_LOSS = 1.03  # of the calm run's
RECOVERY_S = 20.0  # from a kill to the next round, starting a process on a busy machine included
SEEN_BY_ITSELF = (Kind.FILL_DISK, Kind.GUEST)  # their end takes more than a new version


@dataclass(frozen=True)
class Share:
    """This many of `whole`."""

    part: int = 0
    whole: int = 0

    @property
    def share(self) -> float:
        return self.part / self.whole if self.whole else 1.0

    def __add__(self, other: Share) -> Share:
        return Share(self.part + other.part, self.whole + other.whole)


def work_of(
    trained: int, log: WorkerLog, entered: Mapping[Push, Sequence[Contribution]], fragments: int
) -> Share:
    """What became of the inner steps of one life; `entered` is what the final versions contain."""
    applied = 0
    for push_id, frozen in log.frozen.items():
        parts = entered.get((log.worker, push_id), ())
        if any(p.chunks is None for p in parts) or (parts and push_id in log.counted):
            applied += frozen["steps"]
    return Share(applied, trained * fragments)


def averaged(
    versions: Sequence[tuple[float, Collection[str]]], lives: Sequence[Life], window: int = 1
) -> Share:
    """Of the workers alive throughout a round, how many its version contains; over all rounds.

    Args:
        versions: when each was seen, and which workers are in it, in order.
        window: versions that make a round: 1, where there are rounds. In asynchronous mode each version
            is one worker's, so it is twice the number of workers: who is in none of them was left out.
    """
    found = Share()
    for end in range(window, len(versions), window):
        start_at, end_at = versions[end - window][0], versions[end][0]
        inside = {name for _, names in versions[end - window + 1 : end + 1] for name in names}
        there = {e.job.worker for e in lives if e.is_alive_throughout(start_at, end_at)}
        found += Share(len(there & inside), len(there))
    return found


def workers_in(release: Record) -> set[str]:
    """Those whose pushes went into a version."""
    return {push["worker"] for push in release["pushes"]}


def judge_fault(entry: Injected, seen: Sequence[tuple[float, Record]]) -> None:
    """Note what came after a fault; `seen` are all versions, and when each was seen."""
    if entry.at is None:
        return
    later = [each for each in seen if each[0] > entry.at]
    entry.next_round = later[0][0] - entry.at if later else None
    if entry.fault.target in WORKERS:  # it has to take part again
        later = [each for each in later if entry.fault.target in workers_in(each[1])]
    entry.survived = bool(later) and (entry.is_over or entry.fault.kind not in SEEN_BY_ITSELF)


def rows(faults: Sequence[Injected]) -> dict[Kind, dict[str, Any]]:
    """All faults of each kind, in the order of `Kind`: how many, and seconds to the next round."""
    made = {}
    for kind in Kind:
        these = [each for each in faults if each.fault.kind is kind]
        times = [each.next_round for each in these if each.next_round is not None]
        if these:
            made[kind] = {
                "kind": kind.words,
                "injected": len(these),
                "survived": sum(each.survived for each in these),
                "median": statistics.median(times) if times else None,
                "worst": max(times, default=None),
            }
    return made


@dataclass(frozen=True)
class KillCost:
    """What one kill has cost: inner steps trained in that life, and those that are in no version."""

    life: str
    trained: int
    lost: float


@dataclass(frozen=True)
class Calm:
    """The run without faults."""

    loss: float
    contributions: int
    seconds: float


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    versions: list[list[Any]]  # the final one of each fragment, as the audit logs write it
    checksum: str  # of its parameters, as the drill pulled it
    checksums: dict[str, str]  # as each surviving worker pulled it, by name of its life
    loss: float  # of the final parameters, nats per byte of held-out text
    exits: dict[str, int | None]  # of the workers that were not killed, by name of their life
    broker_exit: int | None  # after SIGTERM; None if it had to be killed
    broker_seconds: float  # that it took


@dataclass
class ModeReport:
    """See the head of this module."""

    mode: str
    allowed: int  # inner steps that one kill may cost
    least_rounds: int = 0  # that the run had to have
    began: float = 0.0  # on the clock of the faults
    disk: str = ""
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)  # so that the run could not go on
    faults: list[Injected] = field(default_factory=list)
    findings: Findings | None = None
    ending: Ending | None = None
    rounds: float = 0.0  # in the lineage of the final version, like the contributions
    contributions: int = 0
    all_work: Share = field(default_factory=Share)
    sturdy_work: Share = field(default_factory=Share)  # of the lives that were not killed
    kill_costs: list[KillCost] = field(default_factory=list)
    averaged: Share = field(default_factory=Share)
    calm: Calm | None = None

    @property
    def problems(self) -> list[str]:
        """A sentence for each broken promise."""
        found = [*self.broken, *self._of_faults()]
        if self.findings is not None:
            found += self.findings.problems
        if self.ending is not None:
            found += [*self._of_the_end(self.ending), *self._of_work(), *self._of_figures()]
        return [f"{self.mode}: {sentence}" for sentence in found]

    @property
    def kills(self) -> list[Injected]:
        """The faults in which a process died."""
        return [each for each in self.faults if each.fault.kind.is_kill]

    def _of_faults(self) -> Iterator[str]:
        for each in self.faults:
            if not each.survived:
                when = "never carried out"
                if each.at is not None:
                    when = f"{each.at - self.began:.0f} s after the start"
                what = f"{each.fault.kind.words} ({each.fault.target}, {when})"
                yield f"The run did not get over a fault: {what}."
        for each in self.kills:
            if each.next_round is not None and each.next_round > RECOVERY_S:
                yield (
                    f"After {each.fault.target} was killed the next round closed in "
                    f"{each.next_round:.1f} s; at most {RECOVERY_S:g} s are allowed."
                )

    def _of_the_end(self, ending: Ending) -> Iterator[str]:
        for name, told in ending.checksums.items():
            if told != ending.checksum:
                yield (
                    f"{name} pulled other parameters than the drill ({told[:12]} instead of "
                    f"{ending.checksum[:12]})."
                )
        for name, code in ending.exits.items():
            if code != 0:
                yield f"{name} ended with exit code {code} instead of 0."
        if ending.broker_exit != 0:
            yield (
                f"The broker ended with exit code {ending.broker_exit} after SIGTERM, in "
                f"{ending.broker_seconds:.1f} s; 0 was promised."
            )

    def _of_work(self) -> Iterator[str]:
        work = self.sturdy_work
        if work.part != work.whole:
            yield (
                f"Workers that were not killed trained {work.whole} steps and {work.part} are in "
                "the final version; all of them should be."
            )
        for cost in self.kill_costs:
            if cost.lost > self.allowed:
                yield (
                    f"The kill of {cost.life} cost {cost.lost:g} inner steps; at most {self.allowed} "
                    "are allowed."
                )

    def _of_figures(self) -> Iterator[str]:
        if self.rounds < self.least_rounds:
            yield f"The run had {self.rounds:g} rounds; {self.least_rounds} were to be."
        if self.averaged.share < LEAST_SHARE_AVERAGED:
            yield (
                f"{self.averaged.part} of {self.averaged.whole} workers alive throughout a round "
                f"were averaged in it; at least {LEAST_SHARE_AVERAGED:.0%} should be."
            )
        if self.calm is not None and self.ending is not None:
            ratio = self.ending.loss / self.calm.loss
            if ratio > MOST_LOSS:
                yield (
                    f"The final loss is {self.ending.loss:.4f}, {ratio - 1:.1%} above the calm run's "
                    f"{self.calm.loss:.4f}; at most {MOST_LOSS - 1:.0%} are allowed."
                )

    def plain(self) -> dict[str, Any]:
        """Everything, for JSON."""
        findings, fields, average = self.findings, asdict(self), self.averaged
        averages = {"alive": average.whole, "averaged": average.part, "share": average.share}
        work = {
            name: {"trained": each.whole, "applied": each.part, "share": each.share}
            for name, each in (("all", self.all_work), ("not_killed", self.sturdy_work))
        }
        return {
            **{name: fields[name] for name in ("mode", "disk", "rounds", "contributions")},
            "seconds": round(self.seconds, 1),
            "useful_work": work,
            "kills": fields["kill_costs"],
            "allowed_steps_a_kill": self.allowed,
            "averaged": averages,
            "faults": [
                {
                    "kind": each.fault.kind.name.lower(),
                    "target": each.fault.target,
                    "at_s": None if each.at is None else each.at - self.began,
                    "next_round_s": each.next_round,
                    "survived": each.survived,
                }
                for each in self.faults
            ],
            "table": list(rows(self.faults).values()),
            "audit": findings
            and {
                "versions": len(findings.lineage),
                "problems": findings.problems,
                "dropped": findings.dropped,
                "in_flight": findings.in_flight,
                "forgotten": findings.forgotten,
            },
            "ending": fields["ending"],
            "calm": fields["calm"],
            "problems": self.problems,
        }
