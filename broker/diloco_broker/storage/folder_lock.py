"""The folder of a run: one broker at a time saves there, and `--fresh` moves it aside.

Two brokers that save to one folder would each remove what the other keeps.
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
# Besides checkpoints, what shows that a broker has saved a run in a folder.
RUN_FILES = (HISTORY, ACTIONS)
# Errors that last until a person changes the folder or its permissions. Any other, such as a full disk,
# may pass while the run goes on.
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
# What flock says when another process has the lock. Anything else means that there are no locks.
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class FolderLock:
    """Holds a folder from the start on; on a full disk, from the first moment it can be written.

    The lock ends with the process, however it ends.

    Raises:
        UsageError: another broker has the folder, the lock belongs to another user, or this user cannot
            write there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[str] | None = None
        try:
            self.take()
        except OSError as error:
            if error.errno in LASTING:
                raise UsageError(self._why_not(error)) from None
            text = "%s cannot be written: %s. There will be no checkpoints until it can."
            logger.warning(text, folder, error.strerror)

    def _why_not(self, error: OSError) -> str:
        if self.folder.exists() and not self.folder.is_dir():
            return f"--save-dir is {self.folder}, which is a file; give a folder."
        return (
            f"--save-dir {self.folder} cannot be written: {error.strerror}; give a folder that this "
            "user may write in."
        )

    def set_aside(self) -> Path | None:
        """Rename the folder if it holds a run, and lock a new one under its name.

        Returns the new name of the old folder; None where there was no run.

        Raises:
            UsageError: it cannot be renamed, or a new folder cannot be made or locked. The run is where
                it was, or the message says where it is.
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
                f"--fresh cannot begin in a new folder {self.folder}: {why} The earlier run is in "
                f"{where}."
            ) from None
        self.release()
        self._file = file
        return former

    def _free_name(self) -> Path:
        """A free name beside the folder: its own, and the time at which its run was last saved."""
        here = self.folder.resolve()
        files = [path for path in here.iterdir() if path.name != LOCK]  # the lock is of now
        written_at = max(path.stat().st_mtime for path in files)
        stem = f"{here.name}-{time.strftime('%Y-%m-%d-%H%M%S', time.localtime(written_at))}"
        endings = chain([""], (f"-{number}" for number in count(2)))
        names = (here.with_name(stem + ending) for ending in endings)
        return next(name for name in names if not name.exists())

    def take(self) -> None:
        """Take the lock unless it is held already; raises UsageError as above, or OSError."""
        if self._file is None:
            self._file = self._opened()
            checkpoint.sweep(self.folder)

    def _opened(self) -> IO[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / LOCK
        try:
            file = open(path, "a+")  # noqa: SIM115 - kept open for as long as it is locked
        except PermissionError as error:
            if path.exists():
                raise UsageError(
                    f"{path} cannot be opened: {error.strerror}. A broker of another user saves there, "
                    "or did; give this one another --save-dir, or remove the file if none is running."
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
                    f"Another broker (process {holder}) saves to {self.folder}; give this one another "
                    "--save-dir."
                ) from None
            logger.warning(
                "%s is on a file system without locks (%s): make sure that no other broker saves there.",
                self.folder,
                error.strerror,
            )
        # For the sentence above; a full disk takes nothing from the lock.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())
        return file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
