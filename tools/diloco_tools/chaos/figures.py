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

from diloco_tools.chaos import audit
from diloco_tools.chaos.audit import Contribution, Push
from diloco_tools.chaos.faults import KILLS, Fault, Kind


@dataclass(frozen=True)
class Stay:
    """One life of a worker as seen from outside; times in seconds of one clock.

    Attributes:
        trained: inner steps.
        joined_at, ended_at: None where it never did.
        stops: from when to when it was stopped.
    """

    worker: str
    number: int
    trained: int
    joined_at: float | None
    ended_at: float | None
    was_killed: bool
    stops: tuple[tuple[float, float], ...] = ()

    def is_alive_throughout(self, start: float, end: float) -> bool:
        """Had it joined before, did it stay beyond, and did nobody stop it in between?"""
        if self.joined_at is None or self.joined_at >= start:
            return False
        if self.ended_at is not None and self.ended_at <= end:
            return False
        return not any(began < end and over > start for began, over in self.stops)


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
    stay: Stay, life: audit.Life, entered: Mapping[Push, Sequence[Contribution]], fragments: int
) -> Work:
    """What became of the steps of one life; `entered` is what the final versions contain."""
    applied = 0
    for push_id, frozen in life.frozen.items():
        parts = entered.get((stay.worker, push_id), ())
        if any(p.chunks is None for p in parts) or (parts and push_id in life.counted):
            applied += frozen.steps
    return Work(stay.trained * fragments, applied)


@dataclass(frozen=True)
class Averaged:
    """Of the workers alive throughout a round, how many its version contains; over all rounds."""

    alive: int = 0
    averaged: int = 0

    @property
    def share(self) -> float:
        return self.averaged / self.alive if self.alive else 1.0


def averaged(
    versions: Sequence[tuple[float, Collection[str]]], stays: Iterable[Stay], window: int = 1
) -> Averaged:
    """Count who was averaged of those who could have been.

    Args:
        versions: when each was seen, and which workers are in it, in order.
        window: versions that make a round: 1, where there are rounds. In asynchronous mode each version
            is one worker's, so it is twice the number of workers: who is in none of them was left out.
    """
    stays = list(stays)
    alive = hits = 0
    for end in range(window, len(versions), window):
        start_at, end_at = versions[end - window][0], versions[end][0]
        inside = {name for _, names in versions[end - window + 1 : end + 1] for name in names}
        there = {s.worker for s in stays if s.is_alive_throughout(start_at, end_at)}
        alive += len(there)
        hits += len(there & inside)
    return Averaged(alive, hits)


@dataclass(frozen=True)
class Aftermath:
    """A fault and what came after it.

    Attributes:
        at: seconds from the start; None if it was never carried out.
        next_round: seconds to the next version; None when there was none.
        survived: the run went on, and its target took part again, or left as it was meant to.
    """

    fault: Fault
    at: float | None
    next_round: float | None
    survived: bool


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


def rows(aftermaths: Iterable[Aftermath]) -> list[Row]:
    """The faults by kind, in the order of `Kind`."""
    every = list(aftermaths)
    made = []
    for kind in Kind:
        these = [each for each in every if each.fault.kind is kind]
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
