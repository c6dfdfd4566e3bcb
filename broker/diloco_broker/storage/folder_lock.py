"""Locks the folder of a run for one broker, and moves the folder aside for `--fresh`.

Two brokers that save to one folder would remove each other's checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from itertools import chain, count
from pathlib import Path
from typing import IO

from diloco_broker.storage import checkpoint
from diloco_broker.storage.history import ACTIONS, HISTORY
from diloco_protocol.errors import UsageError

logger = logging.getLogger("diloco.broker")

LOCK = ".lock"
# Files besides checkpoints that show that a broker has saved a run in a folder.
RUN_FILES = (HISTORY, ACTIONS)
# Errors that last until a person changes the folder or its permissions. Others, such as a full disk, may
# pass during the run.
LASTING = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOENT,
)
# Errors of flock if another process holds the lock. Any other error means that locks are unsupported.
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class FolderLock:
    """Holds the lock of a folder from construction on; on a full disk, from the first successful write.

    The system releases the lock when the process ends, even if it is killed.

    Raises:
        UsageError: another broker holds the lock, the lock file belongs to another user, or this user
            cannot write to the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[str] | None = None
        try:
            self.take()
        except OSError as error:
            if error.errno in LASTING:
                raise UsageError(self._why_not(error)) from None
            text = "%s cannot be written: %s. No checkpoints are saved until it can."
            logger.warning(text, folder, error.strerror)

    def _why_not(self, error: OSError) -> str:
        if self.folder.exists() and not self.folder.is_dir():
            return f"--save-dir is {self.folder}, which is a file; give a folder."
        return (
            f"--save-dir {self.folder} cannot be written: {error.strerror}; give a folder that is "
            "writable by this user."
        )

    def set_aside(self) -> Path | None:
        """Rename the folder if it holds a run, and lock a new one under its name.

        Returns the new path of the old folder; None if it held no run.

        Raises:
            UsageError: it cannot be renamed, or a new folder cannot be made or locked. The run has not
                moved, or the message says where it is.
        """
        if not any((self.folder / name).exists() for name in RUN_FILES) and not checkpoint.found(
            self.folder
        ):
            return None
        former = self._free_name()
        here = self.folder.resolve()
        try:
            if Path.cwd().is_relative_to(here):
                raise OSError(errno.EBUSY, "the broker was started in it")
            here.rename(former)
        except OSError as error:
            raise UsageError(
                f"--fresh cannot rename {self.folder} to {former.name}: {error.strerror}; give another "
                "--save-dir."
            ) from None
        try:
            here.mkdir()  # not `self.folder`, which may be a link
            file = self._opened()
        except (OSError, UsageError) as error:
            why = f"{error.strerror}." if isinstance(error, OSError) else error
            try:
                former.rename(here)  # replaces an empty folder
                where = self.folder
            except OSError:
                where = former
            raise UsageError(
                f"--fresh cannot start in a new folder {self.folder}: {why} The earlier run is in "
                f"{where}."
            ) from None
        self.release()
        self._file = file
        return former

    def _free_name(self) -> Path:
        """An unused path next to the folder: its name, and the time at which its run was last saved."""
        here = self.folder.resolve()
        files = [path for path in here.iterdir() if path.name != LOCK]  # the lock was just written
        written_at = max(path.stat().st_mtime for path in files)
        stem = f"{here.name}-{time.strftime('%Y-%m-%d-%H%M%S', time.localtime(written_at))}"
        endings = chain([""], (f"-{number}" for number in count(2)))
        names = (here.with_name(stem + ending) for ending in endings)
        return next(name for name in names if not name.exists())

    def take(self) -> None:
        """Take the lock unless this object holds it; raises UsageError as the class does, or OSError."""
        if self._file is None:
            self._file = self._opened()
            checkpoint.sweep(self.folder)

    def _opened(self) -> IO[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / LOCK
        try:
            file = open(path, "a+")  # noqa: SIM115 - kept open while it is locked
        except PermissionError as error:
            if path.exists():
                raise UsageError(
                    f"{path} cannot be opened: {error.strerror}. A broker of another user saves or has "
                    "saved there; give another --save-dir, or remove the file if no broker is running."
                ) from None
            raise
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in TAKEN:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                file.close()
                raise UsageError(
                    f"Another broker (process {holder}) saves to {self.folder}; give another "
                    "--save-dir."
                ) from None
            logger.warning(
                "%s is on a file system without locks (%s): make sure that no other broker saves there.",
                self.folder,
                error.strerror,
            )
        # The process id is for the message above; the lock holds even if the disk is full.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())
        return file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
