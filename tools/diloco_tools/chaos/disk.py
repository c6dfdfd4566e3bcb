"""A disk for checkpoints that can be filled: the best that this machine allows.

1. A tmpfs of its own size, in a mount namespace that a process of ours holds open; it is gone with that
   process, whatever happens to the drill. As another user than root in a user namespace as well.
2. A limit on the size of files (RLIMIT_FSIZE) that is put on the running broker: its checkpoints no
   longer fit, its logs do.
3. A folder that may not be written, where the user is not root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

TMPFS_BYTES = 48 << 20  # three checkpoints of the demo's model, the next one, and some room
LIMIT_BYTES = 1 << 20  # less than a fragment of a checkpoint, more than a log
PIECE = bytes(1 << 16)
END_WITHIN_S = 5.0
MOUNT = f'mount -t tmpfs -o size={TMPFS_BYTES} tmpfs "$0" && echo ready && exec cat'


class Disk(Protocol):
    """Where the checkpoints go.

    Attributes:
        how: what it is, for the table.
        prefix: the command that the broker's is put behind, so that it sees the disk.
    """

    how: str
    prefix: list[str]

    def fill(self, broker: int) -> None:
        """From here on no checkpoint fits; `broker` is the broker's process id."""

    def make_room(self, broker: int) -> None:
        """Checkpoints fit again."""

    def close(self) -> None:
        """Give back what the disk needs."""


def small_disk(folder: Path) -> Disk:
    """The disk for this folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    limit = SizeLimit() if hasattr(resource, "prlimit") else ReadOnly(folder)
    return Tmpfs.mounted(folder) or limit


@dataclass
class Tmpfs:
    """A tmpfs that only our processes see."""

    folder: Path
    holder: subprocess.Popen[bytes]
    prefix: list[str]
    how: str = f"tmpfs of {TMPFS_BYTES >> 20} MiB"

    @classmethod
    def mounted(cls, folder: Path) -> Tmpfs | None:
        """None where namespaces or mounting are not allowed."""
        own = [] if os.geteuid() == 0 else ["--map-root-user"]
        try:
            holder = subprocess.Popen(
                ["unshare", *own, "--mount", "sh", "-c", MOUNT, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return None  # no such command
        entered = ["--user", "--preserve-credentials"] if own else []
        prefix = ["nsenter", *entered, "--mount", f"--target={holder.pid}", "--"]
        disk = cls(folder, holder, prefix)
        assert holder.stdout is not None
        is_ready = holder.stdout.readline() == b"ready\n" and shutil.which("nsenter") is not None
        if is_ready and disk._filler.parent.is_dir():
            return disk
        disk.close()
        return None

    @property
    def _filler(self) -> Path:
        return Path(f"/proc/{self.holder.pid}/root{self.folder}") / "filler"

    def fill(self, broker: int) -> None:
        with open(self._filler, "wb", buffering=0) as file:
            try:
                while file.write(PIECE):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def make_room(self, broker: int) -> None:
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.holder.communicate(timeout=END_WITHIN_S)  # `cat` ends with its input
        if self.holder.poll() is None:
            self.holder.kill()
            self.holder.wait()


@dataclass
class SizeLimit:
    """A limit on the size of the broker's files; Python then gets EFBIG instead of ENOSPC."""

    how: str = f"RLIMIT_FSIZE of {LIMIT_BYTES >> 20} MiB on the broker"
    prefix: list[str] = field(default_factory=list)

    def fill(self, broker: int) -> None:
        _, most = resource.prlimit(broker, resource.RLIMIT_FSIZE)
        resource.prlimit(broker, resource.RLIMIT_FSIZE, (LIMIT_BYTES, most))

    def make_room(self, broker: int) -> None:
        _, most = resource.prlimit(broker, resource.RLIMIT_FSIZE)
        resource.prlimit(broker, resource.RLIMIT_FSIZE, (most, most))

    def close(self) -> None:
        pass


@dataclass
class ReadOnly:
    """A folder that cannot be written for a while. Without effect on root."""

    folder: Path
    how: str = "a folder without the right to write"
    prefix: list[str] = field(default_factory=list)

    def fill(self, broker: int) -> None:
        self.folder.chmod(0o500)

    def make_room(self, broker: int) -> None:
        self.folder.chmod(0o700)

    def close(self) -> None:
        self.make_room(0)
