"""For programs that start training scripts: when to start them again, and why a script's worker left.

Exit codes decide. Some cannot be repaired by a restart: the program is done, the run is over, the
program was called wrongly. All others may be transient, such as a machine out of memory.

`torchrun` exits with 1 whatever its processes exit with, and `srun` with the greatest of several codes.
So the launching program names an end file, and each process of the worker writes its reason into it on
leaving. If none did, the script never joined a run or was killed. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("diloco.worker")

END_FILE = "DILOCO_END_FILE"  # the variable that names it
LONGEST = 100  # bytes that are read of it
# Exit code of a worker whose run is over, as of `diloco-broker serve`.
RUN_IS_OVER = 3
# What a shell reports for a program that Ctrl-C or SIGTERM ended.
INTERRUPTED, TERMINATED = 130, 143
# Exit code of Python and of most programs that were called wrongly.
WRONG_USAGE = 2
# Codes that a restart cannot repair.
FINAL: dict[int, str] = {
    0: "it is done",
    RUN_IS_OVER: "the run is over",
    WRONG_USAGE: "it was called wrongly",
    126: "it cannot be run",
    127: "the program was not found",
    INTERRUPTED: "it was asked to end, by Ctrl-C",
    TERMINATED: "it was asked to end",
}
# Why a worker left: the run is over, it was asked to end, or its script ended by itself.
OVER, ASKED, LEFT = "over", "asked", "left"
# Seconds before the first restart, doubled for each consecutive failure, and the longest pause.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
# A program that ran this long had started well: its failure is the first in a row.
BEGAN_WELL_S = 600.0


def meant(code: int, word: str) -> int:
    """The exit code that the program meant, given the word in its end file.

    Args:
        code: as a shell reports it.
        word: why the program's worker left the run; empty where it did not say.
    """
    if code in FINAL:
        return code
    return {OVER: RUN_IS_OVER, ASKED: TERMINATED}.get(word, code)


@dataclass
class Restarts:
    """Counts consecutive failures. At most `most` of them are followed by a restart."""

    most: int
    in_a_row: int = 0

    def pause(self, code: int, ran_s: float) -> float | None:
        """Seconds until the next start of a program that ended; None: it is not restarted.

        Args:
            code: as a shell reports it; 128 + N where signal N ended it.
            ran_s: how long it ran.
        """
        if code in FINAL:
            return None
        self.in_a_row = 1 if ran_s >= BEGAN_WELL_S else self.in_a_row + 1
        if self.in_a_row > self.most:
            return None
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.in_a_row - 1, 16))


def code_of(returned: int) -> int:
    """The exit code as a shell reports it: 128 + N where signal N ended the process."""
    return returned if returned >= 0 else 128 - returned


def write_end(is_over: bool, *, asked: bool) -> None:
    """Write why this worker left, if a file is named.

    Args:
        is_over: the run is over.
        asked: SIGTERM or an operator asked the script to end.
    """
    if name := os.environ.get(END_FILE, "").strip():
        try:
            Path(name).write_text(OVER if is_over else ASKED if asked else LEFT)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s): the launcher may restart this script.",
                name,
                error.strerror,
            )


def forget(file: Path) -> None:
    """Delete the end file before another start."""
    with suppress(OSError):
        file.unlink()


def word(file: Path) -> str:
    """Why the worker left; empty where it did not say."""
    try:
        with file.open("rb") as opened:
            return opened.read(LONGEST).decode(errors="replace")
    except OSError:
        return ""
