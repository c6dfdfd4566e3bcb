"""The end file: a worker writes there why it left the run, for the program that started its script.

`torchrun` ends with 1 whatever its processes end with, and `srun` with the greatest of several codes. So
`diloco-worker run` names a file, and each process of the worker writes one word there as it leaves. If
none did, the script never joined a run or was killed.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from diloco_worker.session.restarts import ASKED, LEFT, OVER

logger = logging.getLogger("diloco.worker")

VARIABLE = "DILOCO_END_FILE"
LONGEST = 100  # bytes


def tell_launcher(is_over: bool, *, asked: bool) -> None:
    """Write why this worker has left, if a file is named.

    Args:
        is_over: the run is.
        asked: SIGTERM, or an operator, has asked the script to end.
    """
    if name := os.environ.get(VARIABLE, "").strip():
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
