"""A disk for checkpoints that can be filled: the best that this machine allows.

1. A tmpfs of its own size, in a mount namespace that a process of ours holds open; it is gone with that
   process, whatever happens to the drill. As another user than root in a user namespace as well.
2. A limit on the size of files (RLIMIT_FSIZE) that is put on the running broker: its checkpoints no
   longer fit, its logs do.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TMPFS_BYTES = 48 << 20  # three checkpoints of the demo's model, the next one, and some room
LIMIT_BYTES = 1 << 20  # less than a fragment of a checkpoint, more than a log
PIECE = bytes(1 << 16)
MOUNT = f'mount -t tmpfs -o size={TMPFS_BYTES} tmpfs "$0" && echo ready && exec cat'


@dataclass(frozen=True)
class Disk:
    how: str  # what it is, for the table
    fill: Callable[[int], object]  # from here on no checkpoint of the broker with this pid fits
    make_room: Callable[[int], object]  # checkpoints fit again
    close: Callable[[], object]  # gives back what the disk needs
    prefix: tuple[str, ...] = ()  # of the broker's command, so that it sees the disk


def small_disk(folder: Path) -> Disk:
    """The disk for this folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return tmpfs(folder) or size_limit()


def tmpfs(folder: Path) -> Disk | None:
    """One that only our processes see; None where namespaces or mounting are not allowed."""
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
    filler = Path(f"/proc/{holder.pid}/root{folder}") / "filler"

    def fill(_: int) -> None:
        with open(filler, "wb", buffering=0) as file:
            try:
                while file.write(PIECE):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def close() -> None:
        holder.kill()
        holder.communicate()

    assert holder.stdout is not None
    is_ready = holder.stdout.readline() == b"ready\n" and shutil.which("nsenter") is not None
    if not is_ready or not filler.parent.is_dir():
        close()
        return None
    entered = ("--user", "--preserve-credentials") if own else ()
    return Disk(
        f"tmpfs of {TMPFS_BYTES >> 20} MiB",
        fill,
        lambda _: filler.unlink(missing_ok=True),
        close,
        ("nsenter", *entered, "--mount", f"--target={holder.pid}", "--"),
    )


def size_limit() -> Disk:
    """A limit on the size of the broker's files; Python then gets EFBIG instead of ENOSPC."""

    def limit(broker: int, size: int | None) -> None:
        _, most = resource.prlimit(broker, resource.RLIMIT_FSIZE)
        resource.prlimit(broker, resource.RLIMIT_FSIZE, (most if size is None else size, most))

    return Disk(
        f"RLIMIT_FSIZE of {LIMIT_BYTES >> 20} MiB on the broker",
        lambda broker: limit(broker, LIMIT_BYTES),
        lambda broker: limit(broker, None),
        lambda: None,
    )
