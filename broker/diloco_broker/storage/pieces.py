"""Reading checkpoints for those who copy them, piece by piece, without holding up the loop.

A thread reads; the loop hands it the requests and sends the results. Files of a checkpoint are never
written again, so their pieces may be asked for in any order, as long as it is kept. Each piece opens its
file and closes it: a reader that stops in the middle leaves nothing open. A checkpoint that is being
copied is not removed (`spared`), or a copy over a slow line would never end.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_broker.core.effects import ReadCheckpoint, Route
from diloco_broker.storage import checkpoint
from diloco_broker.storage.checkpoint import FILE, MANIFEST, NAME, Damaged
from diloco_protocol.messages import Result

# Of a file, in one answer: a turn of the loop sends one, and it takes 0.1 s of 100 Mb/s.
PIECE_BYTES = 1 << 20
# Requests that wait, of all peers together; each may have a piece in memory.
MOST_WAITING = 16
# A checkpoint that was asked for within SPARED_S seconds is being copied: a link may be cut for minutes.
# Only the MOST_SPARED that were asked for last are kept on the disk for that.
SPARED_S = 300.0
MOST_SPARED = 2
# In refusals after which the peer asks again, for the newest: nothing is wrong.
AGAIN = {"again": True}


class PieceReader:
    """See the head of this module. The thread calls `wake` when there is something in `results`."""

    def __init__(self, folder: Path, wake: Callable[[], None]) -> None:
        self._folder = folder
        self._wake = wake
        self.results: deque[tuple[Route, Result]] = deque()
        self._wanted: deque[ReadCheckpoint] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._asked_at: dict[
            str, float
        ] = {}  # checkpoints; the one that was asked for last comes last
        self._listed: tuple[Path, list[dict[str, Any]]] | None = (
            None  # of the newest, as it was last
        )

    def ask(self, wanted: ReadCheckpoint) -> Result | None:
        """Read this; the answer is in `results` later, or returned where it is a refusal."""
        if len(self._wanted) + len(self.results) >= MOST_WAITING:
            text = "Too many pieces of checkpoints are asked for at the same time; ask again later."
            return Result(wanted.request, False, text, AGAIN)
        with self._changed:
            self._wanted.append(wanted)
            self._changed.notify_all()
        if self._thread is None:
            thread = threading.Thread(target=self._main, name="diloco-reader", daemon=True)
            thread.start()
            self._thread = thread
        return None

    def spared(self) -> frozenset[str]:
        """The checkpoints that are being copied; from any thread."""
        with self._changed:
            now = time.monotonic()
            return frozenset(n for n, at in self._asked_at.items() if now - at < SPARED_S)

    def _spare(self, name: str) -> None:
        with self._changed:
            self._asked_at.pop(name, None)
            self._asked_at[name] = time.monotonic()
            if len(self._asked_at) > MOST_SPARED:
                del self._asked_at[next(iter(self._asked_at))]

    def close(self) -> None:
        """End the thread when it has read what it is at."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._is_closed)
                if self._is_closed:
                    return
                wanted = self._wanted[0]
            try:
                result = self._list(wanted) if wanted.checkpoint is None else self._read(wanted)
            except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
                result = Result(wanted.request, False, f"It cannot be read: {error!r:.200}.")
            self.results.append((wanted.route, result))
            self._wanted.popleft()  # only now: what waits is never more than it may be
            self._wake()

    def _list(self, wanted: ReadCheckpoint) -> Result:
        for path in checkpoint.found(self._folder):
            try:
                if self._listed is None or self._listed[0] != path:
                    self._listed = path, files_of(path)
            except (Damaged, OSError):  # removed meanwhile, or one that no broker would go on from
                continue
            data = {"checkpoint": path.name, "files": self._listed[1]}
            return Result(wanted.request, True, f"The newest checkpoint is {path.name}.", data)
        text = "This run has no checkpoint yet; the first comes with the first version."
        return Result(wanted.request, False, text, AGAIN)

    def _read(self, wanted: ReadCheckpoint) -> Result:
        name, file = str(wanted.checkpoint), wanted.file
        if not NAME.fullmatch(name) or not (FILE.fullmatch(file) or file == MANIFEST):
            text = f"{name!r:.80}, {file!r:.80} is not a file of a checkpoint."
            return Result(wanted.request, False, text)
        place = self._folder / name
        try:
            if place.is_symlink():
                raise FileNotFoundError
            with checkpoint.opened(place / file, follow=False) as found:
                self._spare(name)
                found.seek(wanted.offset)
                piece = found.read(PIECE_BYTES)
        except FileNotFoundError:
            text = f"{name} is not kept any more; ask for the newest checkpoint."
            return Result(wanted.request, False, text, AGAIN)
        except OSError as error:
            text = f"{name}/{file} cannot be read: {error.strerror}."
            return Result(wanted.request, False, text)
        text = f"{len(piece)} bytes of {name}/{file} from {wanted.offset} on."
        return Result(wanted.request, True, text, {"offset": wanted.offset, "bytes": piece})


def files_of(path: Path) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of each file of a checkpoint; raises Damaged or OSError."""
    told = checkpoint.read_manifest(path)["files"]
    with checkpoint.opened(path / MANIFEST, follow=False) as file:
        size, digest = os.fstat(file.fileno()).st_size, hashlib.sha256()
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    # It is small, and says what the others are good for, so it comes last.
    rows = [(name, each["bytes"], each["sha256"]) for name, each in sorted(told.items())]
    rows.append((MANIFEST, size, digest.hexdigest()))
    return [{"name": name, "bytes": size, "sha256": sum_} for name, size, sum_ in rows]
