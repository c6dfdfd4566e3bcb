"""What one mode of the drill has shown, and which promises it has broken. Pure.

Each broken promise is one sentence that names the values.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from diloco_tools.chaos.audit import Findings
from diloco_tools.chaos.figures import Aftermath, Averaged, Stay, Work, kills, rows

LEAST_SHARE_AVERAGED = 0.95
MOST_LOSS = 1.03  # of the calm run's
RECOVERY_S = 20.0  # from a kill to the next round, starting a process on a busy machine included


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
    """How a run ended.

    Attributes:
        versions: the final one of each fragment, as the audit logs write it.
        checksum: of its parameters, as the drill pulled it.
        checksums: as each surviving worker pulled it, by name of its life.
        loss: of the final parameters, nats per byte of held-out text.
        exits: exit codes of the workers that were not killed, by name of their life.
        broker_exit: exit code of the broker after SIGTERM; None if it had to be killed.
        broker_seconds: that it took.
    """

    versions: list[list[Any]]
    checksum: str
    checksums: dict[str, str]
    loss: float
    exits: dict[str, int | None]
    broker_exit: int | None
    broker_seconds: float


@dataclass
class ModeReport:
    """See the head of this module.

    Attributes:
        allowed: inner steps that one kill may cost.
        least_rounds: that the run had to have.
        broken: promises that were broken on the way, so that the run could not go on.
        rounds, contributions: in the lineage of the final version.
        all_work: of everybody; `sturdy_work` of those lives that were not killed.
    """

    mode: str
    allowed: int
    least_rounds: int = 0
    disk: str = ""
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)
    aftermaths: list[Aftermath] = field(default_factory=list)
    findings: Findings | None = None
    ending: Ending | None = None
    rounds: float = 0.0
    contributions: int = 0
    all_work: Work = field(default_factory=Work)
    sturdy_work: Work = field(default_factory=Work)
    kill_costs: list[KillCost] = field(default_factory=list)
    averaged: Averaged = field(default_factory=Averaged)
    calm: Calm | None = None

    def add_work(self, stay: Stay, work: Work) -> None:
        """One life of a worker."""
        self.all_work += work
        if not stay.was_killed:
            self.sturdy_work += work

    @property
    def problems(self) -> list[str]:
        """A sentence for each broken promise."""
        found = [*self.broken, *self._unsurvived(), *self._slow()]
        if self.findings is not None:
            found += self.findings.problems
        if self.ending is not None:
            found += [*self._ending(self.ending), *self._work(), *self._figures()]
        return [f"{self.mode}: {sentence}" for sentence in found]

    @property
    def remarks(self) -> list[str]:
        """What happened to pushes that are in no final version for a reason."""
        found = self.findings
        return [] if found is None else [*found.dropped, *found.in_flight, *found.forgotten]

    def _unsurvived(self) -> list[str]:
        return [
            f"The run did not get over a fault: {each.fault.kind.value} ({each.fault.target}, "
            f"{'never carried out' if each.at is None else f'{each.at:.0f} s after the start'})."
            for each in self.aftermaths
            if not each.survived
        ]

    def _slow(self) -> list[str]:
        return [
            f"After {each.fault.target} was killed the next round closed in {each.next_round:.1f} s; "
            f"at most {RECOVERY_S:g} s are allowed."
            for each in kills(self.aftermaths)
            if each.next_round is not None and each.next_round > RECOVERY_S
        ]

    def _ending(self, ending: Ending) -> list[str]:
        found = [
            f"{name} pulled other parameters than the drill ({told[:12]} instead of "
            f"{ending.checksum[:12]})."
            for name, told in ending.checksums.items()
            if told != ending.checksum
        ]
        found += [
            f"{name} ended with exit code {code} instead of 0."
            for name, code in ending.exits.items()
            if code != 0
        ]
        if ending.broker_exit != 0:
            found.append(
                f"The broker ended with exit code {ending.broker_exit} after SIGTERM, in "
                f"{ending.broker_seconds:.1f} s; 0 was promised."
            )
        return found

    def _work(self) -> list[str]:
        found = []
        work = self.sturdy_work
        if work.applied != work.trained:
            found.append(
                f"Workers that were not killed trained {work.trained} steps and {work.applied} are in "
                "the final version; all of them should be."
            )
        found += [
            f"The kill of {cost.life} cost {cost.lost:g} inner steps; at most {self.allowed} are "
            "allowed."
            for cost in self.kill_costs
            if cost.lost > self.allowed
        ]
        return found

    def _figures(self) -> list[str]:
        found = []
        if self.rounds < self.least_rounds:
            found.append(f"The run had {self.rounds:g} rounds; {self.least_rounds} were to be.")
        if self.averaged.share < LEAST_SHARE_AVERAGED:
            found.append(
                f"{self.averaged.averaged} of {self.averaged.alive} workers alive throughout a round "
                f"were averaged in it; at least {LEAST_SHARE_AVERAGED:.0%} should be."
            )
        if self.calm is not None and self.ending is not None:
            ratio = self.ending.loss / self.calm.loss
            if ratio > MOST_LOSS:
                found.append(
                    f"The final loss is {self.ending.loss:.4f}, {ratio - 1:.1%} above the calm run's "
                    f"{self.calm.loss:.4f}; at most {MOST_LOSS - 1:.0%} are allowed."
                )
        return found

    def plain(self) -> dict[str, Any]:
        """Everything, for JSON."""
        work = {"all": self.all_work, "not_killed": self.sturdy_work}
        findings, ending = self.findings, self.ending
        return {
            "mode": self.mode,
            "seconds": round(self.seconds, 1),
            "disk": self.disk,
            "rounds": self.rounds,
            "contributions": self.contributions,
            "useful_work": {
                name: {**asdict(each), "share": each.share} for name, each in work.items()
            },
            "kills": [asdict(cost) for cost in self.kill_costs],
            "allowed_steps_a_kill": self.allowed,
            "averaged": {**asdict(self.averaged), "share": self.averaged.share},
            "faults": [
                {
                    "kind": each.fault.kind.name.lower(),
                    "target": each.fault.target,
                    "at_s": each.at,
                    "next_round_s": each.next_round,
                    "survived": each.survived,
                }
                for each in self.aftermaths
            ],
            "table": [{**asdict(row), "kind": row.kind.value} for row in rows(self.aftermaths)],
            "audit": {
                "versions": len(findings.lineage),
                "problems": findings.problems,
                "dropped": findings.dropped,
                "in_flight": findings.in_flight,
                "forgotten": findings.forgotten,
            }
            if findings
            else None,
            "ending": asdict(ending) if ending else None,
            "calm": asdict(self.calm) if self.calm else None,
            "problems": self.problems,
        }
