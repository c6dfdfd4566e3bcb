"""Write tapes (`core.tape`) to files of bounded size, and read them.

A file is a stream of msgpack values: a head, the first state, then an entry for each event; all but the
head are checksummed. A full file is renamed with the suffix `.1`, replacing an earlier one, and a new
file begins with the current state, so each file can be replayed on its own. A truncated last entry, as a
killed broker leaves, is ignored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import msgpack

from diloco_broker.core.effects import Effect
from diloco_broker.core.events import Event, Now
from diloco_broker.core.machine import Core
from diloco_broker.core.state import RunState
from diloco_broker.core.tape import FORMAT, Codec, Entry, NotPlain, noted, written
from diloco_broker.storage.background import Background
from diloco_protocol.errors import UsageError

logger = logging.getLogger("diloco.broker")

LONGEST = 64 << 20  # size in bytes at which a file is rotated
AT_A_TIME = 64  # entries that are written together
# Pending batches at which the disk is too slow for a tape, which must not delay the run.
MOST_WAITING = 50
LONGEST_VALUE = 1 << 30  # bytes of one value when reading
NAME = "diloco_tape"


class TapeWriter:
    """Writes the events of a core and marks of their effects, in a background thread.

    If the file cannot be written, or the disk is too slow, the tape ends with a warning and the run
    continues. `close` waits until everything is written.

    Args:
        path: the file; an existing one must be a tape, and is renamed.
        longest: the size in bytes at which the next file begins; at least twice the size of the state.

    Raises:
        UsageError: if the file cannot be created, or `path` exists and is not a tape.
    """

    def __init__(self, path: Path, core: Core, version: str, longest: int = LONGEST) -> None:
        self._path, self._core, self._version, self._longest = path, core, version, longest
        self._noted: list[tuple[Any, Now, Any]] = []
        self._codec = Codec()
        self._written = 0  # bytes of the current file; owned by the thread, as the next two
        self._limit = longest
        self._is_full = False
        self._is_turning = False  # a rotation is pending
        self._is_over = False  # no more entries are written
        try:
            _check_free(path)
            self._file: IO[bytes] | None = self._make(self._state())
        except (OSError, NotPlain) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"--tape {path} cannot be written: {why}.") from None
        self._writing = Background[Callable[[], None], None]("diloco-tape", lambda write: write())

    def note(self, event: Event, now: Now, asked_for: Sequence[Effect] | None) -> None:
        """Record a handled event and its effects; None: the core failed to handle it."""
        if self._is_over:
            return
        try:
            said, marks = noted(event, asked_for)
            self._noted.append((said, now, marks))
            if len(self._noted) >= AT_A_TIME or asked_for is None:
                self._hand_over()
        except Exception as error:  # noqa: BLE001  the run must continue
            self._give_up(error)

    def close(self) -> None:
        """Write pending entries. May be called more than once."""
        if not self._is_over:
            self._hand_over()
        self._is_over = True
        self._writing.finish()
        self._writing.close()
        self._end()

    def _hand_over(self) -> None:
        noted_, self._noted = self._noted, []
        if len(self._writing) >= MOST_WAITING:
            self._give_up("the disk is too slow for it")
            return
        self._writing.add(partial(self._write, noted_))
        if self._is_full and not self._is_turning:
            self._is_turning = True
            self._writing.add(partial(self._begin, self._state()))

    def _state(self) -> tuple[Codec, Any]:
        codec = Codec()
        return codec, codec.freeze(self._core.state)

    # In the thread.

    def _write(self, entries: list[tuple[Any, Now, Any]]) -> None:
        file = self._file
        if file is None:  # the tape has ended
            return
        try:
            for said, now, marks in entries:
                self._written += file.write(_framed(written(said, now, marks, self._codec)))
            file.flush()
        except Exception as error:  # noqa: BLE001  the run must continue
            self._give_up(error)
        self._is_full = self._written >= self._limit

    def _begin(self, state: tuple[Codec, Any]) -> None:
        """Rotate: rename the full file and begin another."""
        try:
            self._end()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._file = self._make(state)
        except Exception as error:  # noqa: BLE001  the run must continue
            self._give_up(error)
        self._is_turning = False

    def _make(self, state: tuple[Codec, Any]) -> IO[bytes]:
        # Readable by its owner only: it has session tokens, which can impersonate workers.
        made = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        file = open(made, "wb")  # noqa: SIM115 - kept open
        self._codec, frozen = state
        head = {NAME: FORMAT, "version": self._version}
        first = [self._version, time.time(), self._codec.new_shapes(), frozen]
        self._written = file.write(msgpack.packb(head) + _framed(first))
        self._limit = max(self._longest, 2 * self._written)
        self._is_full = False
        return file

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # all entries are flushed already
                file.close()

    def _give_up(self, why: object) -> None:
        if not self._is_over:
            self._is_over = True
            logger.warning("The tape %s ends here; the run continues: %s.", self._path, why)


def _check_free(path: Path) -> None:
    """Rename an earlier tape; raises UsageError if `path` is anything else."""
    if not path.name or path.is_symlink() or (path.exists() and not _is_tape(path)):
        raise UsageError(f"--tape {path} exists and is not a tape; name a new file.")
    if path.exists():
        path.replace(path.with_name(f"{path.name}.1"))


def _is_tape(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return NAME.encode() in file.read(2 * len(NAME))


def _framed(value: Any) -> bytes:
    """Pack a value with its checksum."""
    body: bytes = msgpack.packb(value)
    framed: bytes = msgpack.packb([crc32(body), body])
    return framed


@dataclass(frozen=True)
class Tape:
    """An open tape: a core in its first state, and the events after that."""

    version: str  # of the broker that made it
    unix_s: float  # when it begins
    core: Core
    entries: Iterator[Entry]


# Errors that reading or replaying a damaged or forged tape may raise.
_UNSOUND = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
    MemoryError,
)


@contextmanager
def read_tape(path: Path) -> Iterator[Tape]:
    """Open a tape for replay; raises UsageError if the file is not a tape, or is damaged."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    with file:
        values = msgpack.Unpacker(file, strict_map_key=False, max_buffer_size=LONGEST_VALUE)
        version = _version(values, path)
        try:
            yield _tape(values)
        except _UNSOUND as error:
            raise UsageError(
                f"Cannot continue reading {path} ({error!s:.100}): it is damaged, or from a release "
                f"with other records; it was written by {version}."
            ) from error


def _version(values: Any, path: Path) -> str:
    """Return the version of the broker that wrote the tape."""
    no_tape = UsageError(f"{path} is not a tape; serve --tape FILE writes one.")
    try:
        head = next(values)
    except StopIteration:
        raise UsageError(f"{path} is empty.") from None
    except ValueError:
        raise no_tape from None
    if not isinstance(head, dict) or NAME not in head:
        raise no_tape
    version = f"{head.get('version')!s:.40}"
    if head[NAME] != FORMAT:
        raise UsageError(
            f"{path} is a tape of format {head[NAME]!r:.20}, but this release reads {FORMAT}; replay it "
            f"with release {version}, which wrote it."
        )
    return version


def _tape(values: Any) -> Tape:
    codec, bodies = Codec(), _bodies(values)
    first = next(bodies, None)
    if first is None:
        raise ValueError("it has no state")
    version, unix_s, shapes, frozen = first
    codec.know(shapes)
    state = codec.thaw(frozen)
    if not isinstance(state, RunState):
        raise ValueError("it does not begin with a state")
    entries = (Entry.read(body, codec) for body in bodies)
    return Tape(str(version), float(unix_s), Core.with_state(state), entries)


def _bodies(values: Any) -> Iterator[Any]:
    for number, (checksum, body) in enumerate(values):
        if crc32(body) != checksum:
            raise ValueError(f"the checksum of value {number} differs")
        yield msgpack.unpackb(body, strict_map_key=False)
