"""Reads checkpoints in parts for peers that copy them, without blocking the loop.

The loop passes requests to a thread, and sends its results. Files of a checkpoint never change, so their
parts may be requested in any order while the checkpoint is kept. Each request opens and closes its file,
so an abandoned copy leaves nothing open. A checkpoint that is being copied is not removed (`spared`);
otherwise a copy over a slow link might never finish.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_broker.core.effects import ReadCheckpoint, Route
from diloco_broker.storage import checkpoint
from diloco_broker.storage.background import Background
from diloco_broker.storage.checkpoint import FILE, MANIFEST, NAME, Damaged
from diloco_protocol.messages import Result

# Bytes of a file in one reply. A turn of the loop sends one, which takes 0.1 s at 100 Mb/s.
PIECE_BYTES = 1 << 20
# Pending requests of all peers together; each may hold one part in memory.
MOST_WAITING = 16
# Seconds since its last request during which a checkpoint is kept, because a link may be down for
# minutes; and the number of checkpoints, the last requested ones, that may use disk space this way.
SPARED_S = 300.0
MOST_SPARED = 2
# Data of a refusal that is not an error: the peer should request the newest checkpoint again.
AGAIN = {"again": True}


class PieceReader(Background[ReadCheckpoint, tuple[Route, Result]]):
    """Reads parts of checkpoints in a thread, which calls `wake` after each."""

    def __init__(self, folder: Path, wake: Callable[[], None]) -> None:
        super().__init__("diloco-reader", self._answer, wake)
        self._folder = folder
        # By checkpoint, the time of the last request, the oldest first.
        self._asked_at: dict[str, float] = {}
        # The newest checkpoint and its files, as last listed.
        self._listed: tuple[Path, list[dict[str, Any]]] | None = None

    def ask(self, wanted: ReadCheckpoint) -> Result | None:
        """Queue a request, whose reply is in `results` later. Returns the reply if it is refused."""
        if len(self) + len(self.results) >= MOST_WAITING:
            text = "Too many parts of checkpoints are being read; retry later."
            return Result(wanted.request, False, text, AGAIN)
        self.add(wanted)
        return None

    def spared(self) -> frozenset[str]:
        """Names of the checkpoints that are being copied; for any thread."""
        with self._changed:
            now = time.monotonic()
            return frozenset(n for n, at in self._asked_at.items() if now - at < SPARED_S)

    def _spare(self, name: str) -> None:
        with self._changed:
            self._asked_at.pop(name, None)
            self._asked_at[name] = time.monotonic()
            if len(self._asked_at) > MOST_SPARED:
                del self._asked_at[next(iter(self._asked_at))]

    def _answer(self, wanted: ReadCheckpoint) -> tuple[Route, Result]:
        try:
            result = self._list(wanted) if wanted.checkpoint is None else self._read(wanted)
        except Exception as error:  # noqa: BLE001 - the run must continue
            text = f"Cannot read the checkpoint: {error!r:.200}."
            result = Result(wanted.request, False, text)
        return wanted.route, result

    def _list(self, wanted: ReadCheckpoint) -> Result:
        for path in checkpoint.found(self._folder):
            try:
                if self._listed is None or self._listed[0] != path:
                    self._listed = path, files_of(path)
            except (Damaged, OSError):  # removed meanwhile, or damaged
                continue
            data = {"checkpoint": path.name, "files": self._listed[1]}
            return Result(wanted.request, True, f"The newest checkpoint is {path.name}.", data)
        text = "No checkpoint yet; the first is saved with the first version."
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
            text = f"{name} was removed; request the newest checkpoint."
            return Result(wanted.request, False, text, AGAIN)
        except OSError as error:
            text = f"{name}/{file} cannot be read: {error.strerror}."
            return Result(wanted.request, False, text)
        text = f"{len(piece)} bytes of {name}/{file} at offset {wanted.offset}."
        return Result(wanted.request, True, text, {"offset": wanted.offset, "bytes": piece})


def files_of(path: Path) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of each file of a checkpoint; raises Damaged or OSError."""
    listed = checkpoint.read_manifest(path)["files"]
    with checkpoint.opened(path / MANIFEST, follow=False) as file:
        size, digest = os.fstat(file.fileno()).st_size, hashlib.sha256()
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    # The manifest comes last: a copy that has it is complete.
    rows = [(name, each["bytes"], each["sha256"]) for name, each in sorted(listed.items())]
    rows.append((MANIFEST, size, digest.hexdigest()))
    return [{"name": name, "bytes": size, "sha256": sum_} for name, size, sum_ in rows]
