"""Measures a broker and its run: memory, files, rounds, heartbeats."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from diloco_lab.bench.process_pool import Probes
from diloco_lab.driver import machine
from diloco_tools.processes import JsonLines

LOOK_EVERY_S = 0.01
PROBE_EVERY_S = 0.02
CALM_S, CALM_MS = 0.5, 50.0
LONG_S = 2.0  # a longer attack has a pace of its own

STRING = re.compile(r'"(?:[^"\\]|\\.)*"')  # of JSON
Sample = tuple[float, float]  # time of the monotonic clock, value


class Rounds:
    """The ends of rounds, from the broker's audit log."""

    def __init__(self, log: Path) -> None:
        self._log = JsonLines(log)
        self._lock = threading.Lock()
        self._times: list[float] = []

    def seen(self) -> list[float]:
        """Read new records."""
        with self._lock:
            new = [each for each in self._log.new() if each["after"] is not None]
            self._times += [time.monotonic()] * len(new)
            return list(self._times)


class Watch:
    """Samples a broker's memory and rounds during the context, in a thread."""

    def __init__(self, pid: int, rounds: Rounds) -> None:
        self._pid = pid
        self.rounds = rounds
        self.memory: list[Sample] = []  # bytes
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            try:
                self.memory.append((time.monotonic(), machine.resident(self._pid)))
            except (OSError, ValueError):  # the process has ended; the drill reports it
                return
            self.rounds.seen()


def await_calm(probes: Probes, within_s: float) -> None:
    """Wait until the broker has answered quickly for half a second, within a bound."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        probes.begin(PROBE_EVERY_S)
        time.sleep(CALM_S)
        beats, pings = probes.end()
        if max(beats) - max(pings) < CALM_MS:
            return


def within(samples: Iterable[Sample], start: float, end: float) -> list[float]:
    """The values of a window."""
    return [value for at, value in list(samples) if start <= at <= end]


def pace(times: list[float], start: float, end: float) -> float:
    """Rounds per second in a window, with parts of the rounds that it cuts.

    `times` should have one before the window and one behind it: a round that has not ended then counts
    as long as it lasted until `end`, so it is nothing.
    """
    if not times:
        return 0.0
    first, last = np.interp([start, end], times, range(1, len(times) + 1), left=0)
    return float(last - first) / (end - start)


def pace_beside(times: list[float], began: float, ended: float, settled: float) -> float:
    """Rounds per second from an attack's beginning until a moment after it.

    A calm time after a long attack does not compensate for a slow one during it.
    """
    whole = pace(times, began, settled)
    return min(whole, pace(times, began, ended)) if ended - began >= LONG_S else whole


def size_of(files: Iterable[Path]) -> int:
    """The bytes of the existing files."""
    return sum(each.stat().st_size for each in files if each.exists())


def unprintable(text: str) -> bool:
    """Whether it would control a terminal, or begin a new line."""
    return any(not char.isprintable() for char in text)


def forged(log: Path, history: Iterable[Path], mark: str) -> list[str]:
    """Sentences about an attacker's texts in the log and the history of a broker."""
    found = []
    for line in log.read_text(encoding="utf-8", errors="replace").split("\n"):
        if unprintable(line):
            found.append(f"the log has an unprintable line: {line!a:.120}")
        elif mark in line.split(" ", 3)[-1][: len(mark)]:
            found.append(f"a line of the log is forged: {line:.120}")
    for file in history:
        if file.exists():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            said = (json.loads(text) for line in lines for text in STRING.findall(line))
            found += [f"{file.name} has {text!a:.120}" for text in said if unprintable(text)]
    return found
