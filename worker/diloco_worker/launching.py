"""For programs that start training scripts: when to start them again, and why a script's worker left.

`torchrun` ends with 1 whatever its processes end with, and `srun` with the greatest of several codes. So
the program that starts a script names an end file, and each process of the worker writes one word there
as it leaves. If none did, the script never joined a run or was killed. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from diloco_worker.session.restarts import (
    ASKED,
    INTERRUPTED,
    LEFT,
    OVER,
    RUN_IS_OVER,
    TERMINATED,
    Restarts,
    meant,
)

__all__ = [
    "END_FILE",
    "INTERRUPTED",
    "RUN_IS_OVER",
    "TERMINATED",
    "Restarts",
    "code_of",
    "forget",
    "meant",
    "tell_launcher",
    "word",
]

logger = logging.getLogger("diloco.worker")

END_FILE = "DILOCO_END_FILE"  # the variable that names it
LONGEST = 100  # bytes that are read of it


def code_of(returned: int) -> int:
    """The exit code as a shell says it: 128 + N where signal N has ended the process."""
    return returned if returned >= 0 else 128 - returned


def tell_launcher(is_over: bool, *, asked: bool) -> None:
    """Write why this worker has left, if a file is named.

    Args:
        is_over: the run is.
        asked: SIGTERM, or an operator, has asked the script to end.
    """
    if name := os.environ.get(END_FILE, "").strip():
        try:
            Path(name).write_text(OVER if is_over else ASKED if asked else LEFT)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s): who started this script may start it again.",
                name,
                error.strerror,
            )


def forget(file: Path) -> None:
    """Before another life."""
    with suppress(OSError):
        file.unlink()


def word(file: Path) -> str:
    """Why the worker left; empty where it has not said."""
    try:
        with file.open("rb") as opened:
            return opened.read(LONGEST).decode(errors="replace")
    except OSError:
        return ""
