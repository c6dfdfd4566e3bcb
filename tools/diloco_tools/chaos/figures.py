"""What a drill comes to: useful work, steps lost by kills, who was averaged, how soon it went on. Pure.

**Useful work** is inner steps inside applied contributions over inner steps trained. The unit is one
inner step on one fragment, so with P fragments a step counts P times: once for each fragment whose
pseudo-gradient has to carry it. A pseudo-gradient carries the steps since the last one of its fragment;
it is applied when all of it is in the lineage of the final version. What is in there by halves counts
as nothing. That holds in every mode; asynchronous runs of the drill have P = 1. Steps of killed lives
are known from a file that each step writes.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from diloco_tools.chaos.audit import Contribution, Push, WorkerLog
from diloco_tools.chaos.faults import KILLS, Fault, Kind
from diloco_tools.chaos.job import Life


@dataclass(frozen=True)
class Work:
    """Steps times fragments: trained, and inside applied contributions."""

    trained: int = 0
    applied: int = 0

    @property
    def share(self) -> float:
        return self.applied / self.trained if self.trained else 1.0

    def __add__(self, other: Work) -> Work:
        return Work(self.trained + other.trained, self.applied + other.applied)


def work_of(
    trained: int, log: WorkerLog, entered: Mapping[Push, Sequence[Contribution]], fragments: int
) -> Work:
    """What became of the inner steps of one life; `entered` is what the final versions contain."""
    applied = 0
    for push_id, frozen in log.frozen.items():
        parts = entered.get((log.worker, push_id), ())
        if any(p.chunks is None for p in parts) or (parts and push_id in log.counted):
            applied += frozen.steps
    return Work(trained * fragments, applied)


@dataclass(frozen=True)
class Averaged:
    """Of the workers alive throughout a round, how many its version contains; over all rounds."""

    alive: int = 0
    averaged: int = 0

    @property
    def share(self) -> float:
        return self.averaged / self.alive if self.alive else 1.0


def averaged(
    versions: Sequence[tuple[float, Collection[str]]], lives: Sequence[Life], window: int = 1
) -> Averaged:
    """Count who was averaged of those who could have been.

    Args:
        versions: when each was seen, and which workers are in it, in order.
        window: versions that make a round: 1, where there are rounds. In asynchronous mode each version
            is one worker's, so it is twice the number of workers: who is in none of them was left out.
    """
    alive = hits = 0
    for end in range(window, len(versions), window):
        start_at, end_at = versions[end - window][0], versions[end][0]
        inside = {name for _, names in versions[end - window + 1 : end + 1] for name in names}
        there = {e.job.worker for e in lives if e.is_alive_throughout(start_at, end_at)}
        alive += len(there)
        hits += len(there & inside)
    return Averaged(alive, hits)


@dataclass(frozen=True)
class Aftermath:
    """A fault and what came after it."""

    fault: Fault
    at: float | None  # seconds from the start; None if it was never carried out
    next_round: float | None  # seconds to the next version; None when there was none
    survived: bool  # the run went on, and its target took part again, or left as it was meant to


def next_after(at: float, moments: Iterable[float]) -> float | None:
    """Seconds from `at` to the first of these moments behind it."""
    return min((moment - at for moment in moments if moment > at), default=None)


@dataclass(frozen=True)
class Row:
    """All faults of one kind."""

    kind: Kind
    injected: int
    survived: int
    median: float | None
    worst: float | None


def rows(aftermaths: Sequence[Aftermath]) -> list[Row]:
    """The faults by kind, in the order of `Kind`."""
    made = []
    for kind in Kind:
        these = [each for each in aftermaths if each.fault.kind is kind]
        times = [each.next_round for each in these if each.next_round is not None]
        if these:
            made.append(
                Row(
                    kind,
                    len(these),
                    sum(each.survived for each in these),
                    statistics.median(times) if times else None,
                    max(times, default=None),
                )
            )
    return made


def kills(aftermaths: Iterable[Aftermath]) -> list[Aftermath]:
    """Those in which a process died."""
    return [each for each in aftermaths if each.fault.kind in KILLS]
