"""A worker's own record of its pushes, a JSON line for each event, for others to check.

    {"event": "joined", "worker": "a", "epoch": "4f0c..."}
    {"event": "frozen", "worker": "a", "push_id": "00c1...", "fragment": 0, "steps": 500,
     "base": ["9a31...", 7, "51d0..."], "step": 4000}
    {"event": "counted", "worker": "a", "push_id": "00c1...", "fragment": 0,
     "version": ["9a31...", 8, "e3f1..."]}
    {"event": "dropped", "worker": "a", "push_id": "00c1...", "fragment": 0, "why": "late"}
    {"event": "left", "worker": "a", "step": 4213}

A version is run, counter and tag; ids are hexadecimal. "frozen" is written before anything of the push
is sent. Each line is one write to a file opened for appending, so it is complete, it survives kill -9,
and several workers of one host may share a file. A worker that resumes from a checkpoint may log
"counted" again for a push.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from diloco_protocol import UsageError, VersionId
from diloco_protocol.version import as_hex
from diloco_worker.sync.fragment import InFlight
from diloco_worker.transport.forks import keep_from_children

logger = logging.getLogger("diloco.worker")


class PushLog:
    """The audit log; without a path nothing is written. Any thread may write. Raises UsageError where
    the file cannot be opened.
    """

    def __init__(self, path: str | Path | None, worker_id: str) -> None:
        self._path = path
        self._worker_id = worker_id
        self._file: int | None = None
        if path is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            try:
                self._file = os.open(path, flags, 0o644)
            except OSError as error:
                raise UsageError(
                    f"The audit log {str(path)!r} cannot be written ({error.strerror}); name a file "
                    "in a folder that exists and may be written to."
                ) from None
            keep_from_children(self)

    def joined(self, epoch: str) -> None:
        self._write("joined", epoch=epoch)

    def frozen(self, in_flight: InFlight) -> None:
        push, base = in_flight.push, in_flight.base.plain()
        about = {"steps": push.steps, "base": base, "step": in_flight.began}
        self._write("frozen", push_id=as_hex(push.push_id), fragment=push.fragment, **about)

    def ended(self, push_id: int, fragment: int, version: VersionId | None, why: str) -> None:
        """The push is in this version, or in none, and why."""
        event = "dropped" if version is None else "counted"
        about = {"why": why} if version is None else {"version": version.plain()}
        self._write(event, push_id=as_hex(push_id), fragment=fragment, **about)

    def left(self, step: int) -> None:
        self._write("left", step=step)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def leave_to_the_parent(self) -> None:
        """A forked child writes nothing."""
        self.close()

    def _write(self, event: str, **fields: object) -> None:
        if self._file is None:
            return
        line = json.dumps({"event": event, "worker": self._worker_id, **fields}) + "\n"
        try:
            os.write(self._file, line.encode())
        except OSError as error:  # a full disk must not end the training
            logger.warning(
                "The audit log %s could not be written (%s); it ends here.",
                self._path,
                error.strerror,
            )
            self.close()
