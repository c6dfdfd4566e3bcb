"""A second way in for workers on the broker's own machine: a socket file, which costs less than TCP.

It lies in a folder of its own, which only this user may enter: connections through it are not counted
(`connection_watch`), as those of TCP are. A lock in the folder is held as long as the broker lives, so
what a broker left that was killed is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from diloco_protocol.clients.same_host import FOLDER, LONGEST_PATH

LOCK, SOCKET = "lock", "s"
TRIES = 3


class SocketFolder:
    """A new folder with a lock, until `close`; `address` is for the socket in it.

    Raises OSError where there can be none.
    """

    def __init__(self) -> None:
        prefix = f"{FOLDER}{_machine()}-"
        _remove_those_of_the_dead(prefix)
        for _ in range(TRIES):
            self._folder = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock = os.open(self._folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            if _is_taken(self._lock):
                break
            os.close(self._lock)  # another broker was quicker to take it for one that was left
        else:
            raise OSError("no folder for a socket stays")
        self.path = str(self._folder / SOCKET)
        if len(os.fsencode(self.path)) > LONGEST_PATH:
            self.close()
            raise OSError(f"{self.path} is too long for the path of a socket")
        self.address = f"ipc://{self.path}"

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def _remove_those_of_the_dead(prefix: str) -> None:
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    if folder.lstat().st_uid != os.geteuid() or folder.is_symlink():
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if _is_taken(lock):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _is_taken(lock: int) -> bool:
    """Take the lock; False where somebody else has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _machine() -> str:
    """A short name of this machine: the folder of temporary files may be one that several share."""
    with open("/proc/sys/kernel/random/boot_id") as found:
        return hashlib.sha256(found.read().strip().encode()).hexdigest()[:8]
