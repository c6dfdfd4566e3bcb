"""The file of a tape (`core.tape`): bounded, since what it held first is moved aside and then dropped.

A stream of msgpack values: a head, the state that the tape begins with, then an entry for each event.
When a file is full the next one begins, with the state of that moment, and the full one keeps its name
with `.1` at its end. Each can be replayed by itself; a broker that was killed leaves a last entry that
is cut, which is not read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgpack

from diloco_broker.core.effects import Effect
from diloco_broker.core.events import Event, Now
from diloco_broker.core.machine import Core
from diloco_broker.core.state import RunState
from diloco_broker.core.tape import FORMAT, Codec, Entry, NotPlain, write
from diloco_protocol.errors import UsageError

logger = logging.getLogger("diloco.broker")

_Noted = tuple[Event, Now, Sequence[Effect] | None]

LONGEST = 64 << 20  # bytes of a file, from which on the next one begins
# Entries that are written together. What they hold meanwhile is 64 chunks, and twice as many while the
# thread is at work.
AT_A_TIME = 64
LONGEST_STATE = 1 << 30  # bytes of a value that is read
NAME = "diloco_tape"


class TapeWriter:
    """Writes what a core is told and does, in a thread of its own.

    A tape that cannot be written ends, and the run goes on. Raises UsageError where the file cannot be
    made. `longest` is in bytes; `close` waits until all is written.
    """

    def __init__(self, path: Path, core: Core, version: str, longest: int = LONGEST) -> None:
        self._path, self._core, self._version, self._longest = path, core, version, longest
        self._noted: list[_Noted] = []
        self._codec = Codec()
        self._packer = msgpack.Packer()
        self._written = 0
        self._is_over = False  # nothing more is written
        self._thread = ThreadPoolExecutor(1, "diloco-tape")
        self._under_way: deque[Future[None]] = deque()
        try:
            self._file: IO[bytes] | None = self._make(self._state())
        except OSError as error:
            raise UsageError(f"--tape {path} cannot be written: {error.strerror}.") from None

    def note(self, event: Event, now: Now, asked_for: Sequence[Effect] | None) -> None:
        """An event was handled; `asked_for` is what came of it, None where that was an error."""
        if self._is_over:
            return
        self._noted.append((event, now, asked_for))
        if len(self._noted) >= AT_A_TIME or asked_for is None:
            self._hand_over()
            if self._written >= self._longest:
                self._written = 0
                self._do(self._begin, self._state())

    def close(self) -> None:
        """Write what was noted. A second call does nothing."""
        if not self._is_over:
            self._hand_over()
        self._is_over = True
        self._thread.shutdown()
        self._end()

    def _hand_over(self) -> None:
        noted, self._noted = self._noted, []
        if noted:
            self._do(self._write, noted)

    def _do(self, work: Callable[[Any], None], what: Any) -> None:
        """What waits holds chunks, so the disk is waited for before that is much."""
        self._under_way.append(self._thread.submit(work, what))
        while self._under_way[0].done() or len(self._under_way) > 2:
            self._under_way.popleft().result()
            if not self._under_way:
                return

    def _state(self) -> tuple[Codec, Any]:
        codec = Codec()
        return codec, codec.freeze(self._core.state)

    # In the thread.

    def _write(self, noted: list[_Noted]) -> None:
        if self._file is None:  # it was given up
            return
        try:
            for event, now, asked_for in noted:
                entry = write(event, now, asked_for, self._codec)
                self._written += self._file.write(self._packer.pack(entry))
            self._file.flush()
        except (OSError, NotPlain) as error:
            self._give_up(error)

    def _begin(self, state: tuple[Codec, Any]) -> None:
        """The file is full: go on in another one."""
        try:
            self._end()
            self._file = self._make(state)
        except OSError as error:
            self._give_up(error)

    def _make(self, state: tuple[Codec, Any]) -> IO[bytes]:
        if self._path.exists():
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        # It has session tokens, with which one can speak for a worker.
        made = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        file = open(made, "wb")  # noqa: SIM115 - kept open
        self._codec, frozen = state
        head = {NAME: FORMAT, "version": self._version, "unix_s": time.time()}
        for value in (head, [self._codec.new_shapes(), frozen]):
            self._written += file.write(self._packer.pack(value))
        self._longest = max(self._longest, 2 * self._written)
        return file

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what was noted is flushed already
                file.close()

    def _give_up(self, error: Exception) -> None:
        self._is_over = True
        logger.warning("The tape %s ends here, and the run goes on: %s.", self._path, error)
        self._end()


@dataclass(frozen=True)
class Tape:
    """A tape that is read: its head, a core as it was at its beginning, and what it was told then."""

    version: str  # of the broker that made it
    unix_s: float  # when it begins
    core: Core
    entries: Iterator[Entry]


@contextmanager
def read_tape(path: Path) -> Iterator[Tape]:
    """A tape, as long as it is read; raises UsageError for what is none, also while entries are read."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    with file:
        yield _tape(
            msgpack.Unpacker(file, strict_map_key=False, max_buffer_size=LONGEST_STATE), path
        )


def _tape(values: Any, path: Path) -> Tape:
    head = _next(values, path)
    if not isinstance(head, dict) or NAME not in head:
        raise UsageError(f"{path} is not a tape; serve --tape FILE makes one.")
    if head[NAME] != FORMAT:
        raise UsageError(
            f"{path} is a tape of format {head[NAME]!r:.20}, and this release reads {FORMAT}: replay it "
            f"with the release that made it, {head.get('version')!s:.40}."
        )
    codec = Codec()
    try:
        shapes, frozen = _next(values, path)
        codec.know(shapes)
        state = codec.thaw(frozen)
        if not isinstance(state, RunState):
            raise ValueError("it begins with no state")
    except _UNSOUND as error:
        raise UsageError(_damaged(path, head, error)) from None
    entries = _entries(values, codec, path, head)
    return Tape(str(head["version"]), float(head["unix_s"]), Core.with_state(state), entries)


_UNSOUND = (ValueError, TypeError, LookupError, AttributeError)


def _next(values: Any, path: Path) -> Any:
    try:
        return next(values)
    except StopIteration:
        raise UsageError(f"{path} ends before a tape begins.") from None
    except ValueError:
        raise UsageError(f"{path} is not a tape; serve --tape FILE makes one.") from None


def _entries(values: Any, codec: Codec, path: Path, head: dict[str, Any]) -> Iterator[Entry]:
    try:
        for value in values:
            yield Entry.read(value, codec)
    except _UNSOUND as error:
        raise UsageError(_damaged(path, head, error)) from None


def _damaged(path: Path, head: dict[str, Any], error: Exception) -> str:
    return (
        f"{path} cannot be read on ({error!s:.100}): it is damaged, or was made by a release with other "
        f"records; {head.get('version')!s:.40} made it."
    )
