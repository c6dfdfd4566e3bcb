"""What is measured of a broker and its run: memory, files, rounds, how soon a question is answered."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diloco_lab.chaos.attacks.worker import TIME
from diloco_lab.driver import machine
from diloco_protocol import messages
from diloco_protocol.clients import Keys, Operator
from diloco_protocol.clients.dealer import Dealer
from diloco_protocol.errors import DilocoError, Unreachable
from diloco_tools.tcp_proxy import HOST

MEMORY_EVERY_S = 0.01
PROBE_EVERY_S = 0.02
ANSWERS_WITHIN_S = 30.0
CALM_S, CALM_MS = 0.5, 50.0
LONG_S = 2.0  # an attack that lasts so long has a pace of its own

Sample = tuple[float, float]  # time of the monotonic clock, value


class Status:
    """Asks for the status, as an operator does."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        self._operator = Operator(address, timeout=ANSWERS_WITHIN_S, keys=keys)
        self.close = self._operator.close

    def ask(self) -> None:
        self._operator.ask("status")


class Heartbeats:
    """A member that sends heartbeats and never makes a step, so that no round waits for it long.

    Raises:
        DilocoError: it may not join.
    """

    def __init__(self, address: str, keys: Keys | None, name: str, description: bytes) -> None:
        self._dealer = Dealer(address, keys)
        self.close = self._dealer.close
        digest = hashlib.sha256(description).digest()
        try:
            self._dealer.send(messages.Join(name, digest=digest, size=len(description)))
            welcome = self._hear(messages.Welcome)
        except DilocoError:
            self.close()
            raise
        assert isinstance(welcome, messages.Welcome)
        self._session = welcome.session

    def ask(self) -> None:
        self._dealer.send(messages.Heartbeat(self._session, step=0))
        self._hear(messages.Notice)

    def _hear(self, kind: type[messages.Message]) -> messages.Message:
        until = time.monotonic() + ANSWERS_WITHIN_S
        while (found := self._dealer.receive(until)) is not None:
            if isinstance(found[0], kind):
                return found[0]
            if isinstance(found[0], messages.Error | messages.Rejoin):
                raise DilocoError(found[0].text)
        raise Unreachable(f"the broker did not answer a member within {ANSWERS_WITHIN_S:g} s")


class Watch:
    """Looks at one broker from entering to leaving, in threads; any window can be asked for later.

    Args:
        pid: the broker's.
        asker: it asks again and again, on a connection of its own. The time counts from when a
            question is sent until it is answered.
        echo: the port of a process that does nothing but answer, asked at the same time.
    """

    def __init__(self, pid: int, asker: Status | Heartbeats, echo: int) -> None:
        self._pid = pid
        self._asker = asker
        self.memory: list[Sample] = []  # bytes
        self.answers: list[Sample] = []  # seconds, by when they were asked for
        self.echoes: list[Sample] = []  # the same, of the process that does nothing else
        self._echo = socket.create_connection((HOST, echo), ANSWERS_WITHIN_S)
        self._asked_at: float | None = None  # of the question that waits for its answer
        self.troubles: list[tuple[float, str]] = []  # when and why a question was not answered
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=each, daemon=True)
            for each in (self._look, self._ask, self._hear)
        ]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(ANSWERS_WITHIN_S)
        self._asker.close()
        self._echo.close()

    def _look(self) -> None:
        while not self._is_over.wait(MEMORY_EVERY_S):
            try:
                self.memory.append((time.monotonic(), machine.resident(self._pid)))
            except (OSError, ValueError):  # the process has ended; the drill says so
                return

    def _ask(self) -> None:
        while not self._is_over.wait(PROBE_EVERY_S):
            self._asked_at = began = time.monotonic()
            try:
                self._asker.ask()
            except DilocoError as error:
                self.troubles.append((time.monotonic(), str(error)))
            self.answers.append((began, time.monotonic() - began))
            self._asked_at = None

    def _hear(self) -> None:
        while not self._is_over.wait(PROBE_EVERY_S):
            began = time.monotonic()
            self._echo.sendall(b"x")
            if not self._echo.recv(1):
                return
            self.echoes.append((began, time.monotonic() - began))

    def longest_ms(self, start: float, end: float) -> tuple[float, float]:
        """The longest answer of the broker in a window, and of the process that does nothing else."""
        asked_at = self._asked_at
        # One that still waits counts as long as it has waited, also where it was asked before.
        waits = time.monotonic() - asked_at if asked_at is not None and asked_at <= end else 0.0
        answers = within(self.answers, start, end)
        return 1e3 * max([*answers, waits]), 1e3 * max(within(self.echoes, start, end), default=0.0)

    def unanswered(self, start: float, end: float) -> list[str]:
        """A sentence for each question of a window that failed."""
        return [
            f"a question was not answered: {text}"
            for text in dict.fromkeys(text for at, text in self.troubles if start <= at <= end)
        ]

    def await_calm(self, within_s: float) -> None:
        """Wait until the broker answers as soon as it should for half a second; do not insist."""
        until = time.monotonic() + within_s
        while (now := time.monotonic()) < until:
            broker, echo = self.longest_ms(now - CALM_S, now)
            has_both = all(within(each, now - CALM_S, now) for each in (self.answers, self.echoes))
            if has_both and broker - echo < CALM_MS:
                return
            time.sleep(PROBE_EVERY_S)


def within(samples: Iterable[Sample], start: float, end: float) -> list[float]:
    """The values of a window; of the questions those that were asked in it."""
    return [value for at, value in list(samples) if start <= at <= end]


def read_times(path: Path) -> list[float]:
    """When the rounds of a worker ended, as it writes them down."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = len(data) - len(data) % TIME.size
    return [each for (each,) in TIME.iter_unpack(data[:whole])]


def pace(times: list[float], start: float, end: float) -> float:
    """Rounds per second in a window; of the rounds that it cuts, the part that lies in it.

    `times` should have one before the window and one behind it: a round that has not ended then counts
    as long as it lasted until `end`, so it is nothing.
    """
    return (_progress(times, end) - _progress(times, start)) / (end - start)


def pace_beside(times: list[float], began: float, ended: float, settled: float) -> float:
    """Rounds per second from an attack's begin until a moment after it.

    What is calm again after a long attack does not make up for what was slow during it.
    """
    whole = pace(times, began, settled)
    return min(whole, pace(times, began, ended)) if ended - began >= LONG_S else whole


def _progress(times: list[float], at: float) -> float:
    """Rounds until then, with the part of the one that is under way."""
    done = bisect_right(times, at)
    if done == 0 or done == len(times):
        return float(done)
    before, behind = times[done - 1], times[done]
    return done + (at - before) / (behind - before)


def size_of(files: Iterable[Path]) -> int:
    """Bytes of those that exist."""
    return sum(each.stat().st_size for each in files if each.exists())


def unprintable(text: str) -> bool:
    """Whether it would do something to a terminal, or begin a line of its own."""
    return any(not char.isprintable() for char in text)


def texts(plain: Any) -> Iterable[str]:
    """All strings of a document."""
    if isinstance(plain, str):
        yield plain
    elif isinstance(plain, dict):
        for key, value in plain.items():
            yield from texts(key)
            yield from texts(value)
    elif isinstance(plain, list | tuple):
        for each in plain:
            yield from texts(each)


def forged(log: Path, history: Iterable[Path], mark: str) -> list[str]:
    """Sentences on what an attacker could write into the log and the history of a broker."""
    found = []
    for line in log.read_text(encoding="utf-8", errors="replace").split("\n"):
        if unprintable(line):
            found.append(f"the log has an unprintable line: {line!a:.120}")
        elif mark in line.split(" ", 3)[-1][: len(mark)]:
            found.append(f"a line of the log is forged: {line:.120}")
    for file in history:
        if file.exists():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            said = (text for line in lines for text in texts(json.loads(line)))
            found += [f"{file.name} has {text!a:.120}" for text in said if unprintable(text)]
    return found
