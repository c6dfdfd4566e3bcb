"""The audit log: one line of JSON for each version, written before anybody is told of the version.

Whoever wants to know that no contribution was counted twice or lost needs nothing but these lines and
the workers' own logs. A broker that was killed may leave lines of versions that nobody ever got; the
history of a version is found by following `after`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco_broker.events import Audit
from diloco_protocol.errors import UsageError
from diloco_protocol.version import VersionId


class AuditLog:
    """Appends to a file, each line at once.

    Args:
        path: of the file; made if it is not there.
        epoch: this life of the broker.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: Path, epoch: str) -> None:
        self._epoch = epoch
        try:
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - kept open
        except OSError as error:
            raise UsageError(f"--audit {path} cannot be written: {error.strerror}.") from None

    def add(self, audit: Audit) -> None:
        """One version. Raises OSError when the disk is full."""
        line = {
            "version": _plain(audit.version),
            "after": None if audit.after is None else _plain(audit.after),
            "fragment": audit.fragment,
            "round": audit.round,
            "epoch": self._epoch,
            "pushes": [
                {
                    "worker": each.worker_id,
                    "push_id": f"{each.push.push_id:016x}",
                    "steps": each.push.steps,
                    "chunks": "all" if each.chunks.is_full else each.chunks.to_bytes().hex(),
                    "weight": each.weight,
                }
                for each in audit.pushes
            ],
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


def _plain(version: VersionId) -> list[Any]:
    return [version.run, version.counter, f"{version.tag:016x}"]
