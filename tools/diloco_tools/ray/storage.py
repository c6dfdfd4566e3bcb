"""The folder of a run, on storage that all nodes share: checkpoints, keys, and the broker's address."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from diloco_protocol.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")


@dataclass(frozen=True)
class Storage:
    """The paths of one run; `root` is Ray's storage_path."""

    root: Path
    name: str

    @classmethod
    def of(cls, storage_path: object, name: str) -> Storage:
        """Raises UsageError for a path outside the file system, and for an invalid name."""
        text = str(storage_path)
        if "://" in text and not text.startswith("file:///"):
            raise UsageError(
                f"storage_path is {text!r:.200}; the broker's checkpoints need a folder that all nodes "
                "share, such as /mnt/shared/runs."
            )
        root = Path(text.removeprefix("file://")).expanduser()
        if not root.is_absolute():
            raise UsageError(f"storage_path is {text!r:.200}; give an absolute path.")
        if not NAME.fullmatch(name):
            raise UsageError(
                f"The name of the run is {name!r:.80}; expected at most 60 letters, digits, dots and "
                "dashes."
            )
        return cls(root, name)

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def checkpoints(self) -> Path:
        """The broker's."""
        return self.folder / "broker"

    @property
    def address_file(self) -> Path:
        return self.folder / "address"

    @property
    def final(self) -> Path:
        """The folder of the final checkpoint."""
        return self.folder / "final"

    def metrics_of(self, worker: str) -> Path:
        """The file of an island's last report."""
        return self.folder / f"{worker}.metrics.json"

    def key_of(self, worker: str) -> Path:
        return self.keys / "clients" / f"worker-{worker}.key"

    def island(self, number: int) -> str:
        """The name of an island's own run of Ray Train, in the same storage."""
        return f"{self.name}/island-{number}"
