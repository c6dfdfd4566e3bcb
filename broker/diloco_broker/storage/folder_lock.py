"""One broker to a folder: two that save there would each remove what the other keeps."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import IO

from diloco_broker.storage import checkpoint
from diloco_protocol.errors import UsageError

logger = logging.getLogger("diloco.broker")

LOCK = ".lock"
# What flock says when somebody else has the lock. Anything else means that there are no locks.
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class FolderLock:
    """Holds a folder from the start on, or from the first moment at which it can be written.

    The lock ends with the process, however it ends. Raises UsageError where another broker has the
    folder, or the lock belongs to another user.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[str] | None = None
        try:
            self.take()
        except OSError as error:
            text = "%s cannot be written: %s. There will be no checkpoints until it can."
            logger.warning(text, folder, error.strerror)

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
