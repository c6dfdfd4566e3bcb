"""What adds up along a history: of each worker, and of each life of the broker. Memory is bounded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from diloco_tools.monitor.report.facts import Curve, Life, Said, Worker
from diloco_tools.monitor.report.history.plain_values import LONGEST_NAME, count, number, text
from diloco_tools.monitor.report.history.presence import Track
from diloco_tools.monitor.report.thinning import Point, Spread, Thinned

BUCKETS_OF_WORKER = 48  # of a curve: at most four points each
MOST_HOSTS = 4
MOST_SAID = 200  # different warnings


class Counted:
    """A counter that steps back now and then: what it has come to in all."""

    def __init__(self) -> None:
        self.sum = self._last = 0

    def stands_at(self, value: int | None, most: int | None = None) -> None:
        """It has this value. One that steps back has begun again at 0; but not if it is above `most`,
        all that can have been counted since: then it went on from an older checkpoint."""
        if value is None:
            return
        if value >= self._last:
            self.sum += value - self._last
        elif most is None or value <= most:
            self.sum += value
        self._last = value


class WorkerTally:
    """One worker, from the lines of rounds that it contributed to."""

    def __init__(self, name: str, at: float) -> None:
        self.name, self.first_seen, self.last_seen = name, at, at
        self.id, self.restarts = name, 0  # its newest, and how many it had before
        self.track = Track()
        self.contributions = self.rounds_here = 0
        self.curves = {key: Thinned(BUCKETS_OF_WORKER) for key in ("loss", "norm", "speed")}
        self.hosts: list[str] = []
        self._behind: int | None = None  # of a relay: how many workers, last
        self._step: int | None = None
        self._loss: float | None = None
        self._norm: float | None = None
        self._speeds = Spread()
        self._up, self._down = Counted(), Counted()
        self._staleness, self._staleness_told, self._stalest = 0, 0, 0

    def came_from(self, host: str) -> None:
        host = text(host, LONGEST_NAME)
        if host and host not in self.hosts and len(self.hosts) < MOST_HOSTS:
            self.hosts.append(host)

    def contributed(
        self, at: float, round_: int, line: Mapping[str, Any], life: LifeTally
    ) -> int | None:
        """A round that it is in; returns the staleness of its work, if that is told."""
        self.contributions += 1
        self.last_seen = at
        self._behind = count(line.get("workers"))
        self.came_from(text(line.get("host")))
        self._step = count(line.get("step")) if line.get("step") is not None else self._step
        loss, norm = number(line.get("loss")), number(line.get("delta_norm"))
        speed = number(line.get("steps_per_s"))
        self._loss = loss if loss is not None else self._loss
        self._norm = norm if norm is not None else self._norm
        for key, value in (("loss", loss), ("norm", norm), ("speed", speed)):
            if value is not None:
                self.curves[key].add(Point(at, round_, value))
        if speed is not None:
            self._speeds.add(max(0.0, speed))
        self._up.stands_at(count(line.get("bytes_up")), life.up.sum)
        self._down.stands_at(count(line.get("bytes_down")), life.down.sum)
        staleness = count(line.get("staleness"))
        if staleness is not None:
            self._staleness += staleness
            self._staleness_told += 1
            self._stalest = max(self._stalest, staleness)
        return staleness

    def curve(self, key: str) -> Curve:
        thinned = self.curves[key]
        pairs = pairwise(self.track.spans)
        absent = ((a.ended_at, b.began_at) for a, b in pairs if a.ended_at < b.began_at)
        return Curve(self.id, tuple(thinned), thinned.count, tuple(absent))

    def facts(self, active: tuple[tuple[float, float], ...]) -> Worker:
        track, told = self.track, self._staleness_told
        return Worker(
            id=self.id,
            restarts=self.restarts,
            hosts=tuple(self.hosts),
            behind=self._behind,
            first_seen=self.first_seen,
            last_seen=self.last_seen,
            here_s=track.here_s,
            ended="here" if track.was_here_at_end else track.last_word or "away",
            contributions=self.contributions,
            rounds_here=self.rounds_here,
            step=self._step,
            steps_per_s=self._speeds.quantile(0.5),
            loss=self._loss,
            delta_norm=self._norm,
            staleness_mean=self._staleness / told if told else None,
            staleness_most=self._stalest if told else None,
            bytes_up=self._up.sum,
            bytes_down=self._down.sum,
            deaths=track.deaths,
            kicks=track.kicks,
            returns=track.returns,
            spans=tuple(track.spans),
            marks=tuple(track.marks),
            marks_left_out=track.marks_left_out,
            active=active,
        )


@dataclass
class LifeTally:
    """One life of the broker so far."""

    epoch: str
    began_at: float
    ended_at: float
    ending: str | None = None
    is_over: bool = False
    rounds: int = 0
    contributions: int = 0
    first: int | None = None
    last: int | None = None
    up: Counted = field(default_factory=Counted)
    down: Counted = field(default_factory=Counted)
    cpu_s: float | None = None
    rss_bytes: int | None = None
    longest_turn_ms: float | None = None
    version: str = ""

    def closed(self, number_: int, averaged: int, line: Mapping[str, Any]) -> None:
        """The line of a round."""
        self.rounds += 1
        self.contributions += averaged
        self.first = number_ if self.first is None else self.first
        self.last = number_
        self.up.stands_at(count(line.get("bytes_up")))
        self.down.stands_at(count(line.get("bytes_down")))
        cpu, rss = number(line.get("cpu_s")), count(line.get("rss_bytes"))
        turn = number(line.get("longest_turn_ms"))
        self.cpu_s = self.cpu_s if cpu is None else cpu
        self.rss_bytes = rss if self.rss_bytes is None else max(self.rss_bytes, rss or 0)
        if turn is not None:
            self.longest_turn_ms = max(self.longest_turn_ms or 0.0, turn)

    def facts(self) -> Life:
        names = ("epoch", "began_at", "ended_at", "ending", "is_over", "rounds", "contributions")
        others = ("first", "last", "cpu_s", "rss_bytes", "longest_turn_ms", "version")
        same = {name: getattr(self, name) for name in (*names, *others)}
        return Life(**same, bytes_up=self.up.sum, bytes_down=self.down.sum)


class Warnings:
    """Warnings and errors; those that differ in their numbers alone are counted together."""

    def __init__(self) -> None:
        self.by_level = {"warning": 0, "error": 0}
        self._said: dict[str, Said] = {}

    def add(self, at: float, level: str, sentence: str) -> None:
        if level not in self.by_level:
            return
        self.by_level[level] += 1
        key = f"{level} {re.sub(r'[0-9][0-9.]*', '#', sentence)}"
        known = self._said.get(key)
        if known is not None:
            self._said[key] = Said(level, sentence, known.count + 1, known.first_at, at)
        elif len(self._said) < MOST_SAID:
            self._said[key] = Said(level, sentence, 1, at, at)

    def facts(self) -> tuple[Said, ...]:
        """Errors first, then what was said most often."""
        return tuple(sorted(self._said.values(), key=lambda s: (s.level != "error", -s.count)))
