"""The audit log: one line of JSON for each version, written before the version is released.

These lines and the workers' own logs suffice to verify that no contribution was counted twice or lost. A
killed broker may leave lines of versions that no worker received; follow `after` for the history of a
version.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from diloco_broker.core.effects import RecordVersion
from diloco_protocol.errors import UsageError
from diloco_protocol.version import as_hex


class AuditLog:
    """Appends to a file without buffering; raises UsageError if it cannot be written."""

    def __init__(self, path: Path, epoch: str) -> None:
        self._epoch = epoch
        try:
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 - kept open
        except OSError as error:
            raise UsageError(f"--audit {path} cannot be written: {error.strerror}.") from None
        # A crash may have truncated the last line.
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(size - 1, 0))
        self._is_cut = self._file.read(1) not in (b"", b"\n")

    def add(self, audit: RecordVersion) -> None:
        """Append the line of one version. Raises OSError, for example if the disk is full."""
        line = {
            "version": audit.version.plain(),
            "after": None if audit.after is None else audit.after.plain(),
            "fragment": audit.fragment,
            "round": audit.round,
            "epoch": self._epoch,
            "pushes": [
                {
                    "worker": each.worker_id,
                    "push_id": as_hex(each.push.push_id),
                    "steps": each.push.steps,
                    "chunks": "all" if each.added.is_full else each.added.to_bytes().hex(),
                    "weight": each.weight,
                }
                for each in audit.pushes
            ],
        }
        data = b"\n" * self._is_cut + json.dumps(line).encode() + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(data)
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise
        self._is_cut = False

    def close(self) -> None:
        self._file.close()
