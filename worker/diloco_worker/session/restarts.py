"""When a training program that has ended is started again, and after which pause. Pure.

Exit codes decide. What starting again cannot mend ends it: the program is done, the run is over, the
program was called wrongly. Everything else may pass: a machine out of memory, a node that went away, a
name that the broker still believes in use.
"""

from __future__ import annotations

from dataclasses import dataclass

# Exit code of a worker whose run is over, as of `diloco-broker serve`: nothing is left to do.
RUN_IS_OVER = 3
# What a shell says of a program that Ctrl-C or SIGTERM has ended, on purpose.
INTERRUPTED, TERMINATED = 130, 143
# Exit code of Python and of most programs that were called wrongly.
WRONG_USAGE = 2
FINAL: dict[int, str] = {
    0: "it is done",
    RUN_IS_OVER: "the run is over",
    WRONG_USAGE: "it was called wrongly",
    126: "it cannot be run",
    127: "there is no such program",
    INTERRUPTED: "it was asked to end, by Ctrl-C",
    TERMINATED: "it was asked to end",
}
# Why a worker left: the run is over, it was asked to end, or its script came to an end by itself.
OVER, ASKED, LEFT = "over", "asked", "left"
# Seconds before the first restart, doubled for each that follows in a row, and the longest of them.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
# A program that has run for so long had begun well: what ended it is the first failure in a row.
BEGAN_WELL_S = 600.0


def meant(code: int, word: str) -> int:
    """The exit code that a program would have ended with, had nothing between lost it.

    Args:
        code: as a shell says it.
        word: why the worker of the program left the run, if it has said so.
    """
    if code in FINAL:
        return code
    return {OVER: RUN_IS_OVER, ASKED: TERMINATED}.get(word, code)


@dataclass
class Restarts:
    """Counts failures in a row. At most `most` of them are followed by a restart."""

    most: int
    in_a_row: int = 0

    def pause(self, code: int, ran_s: float) -> float | None:
        """Seconds until the next start of a program that ended; None: it is left alone.

        Args:
            code: as a shell says it; 128 + N where signal N has ended it.
            ran_s: how long it ran.
        """
        if code in FINAL:
            return None
        self.in_a_row = 1 if ran_s >= BEGAN_WELL_S else self.in_a_row + 1
        if self.in_a_row > self.most:
            return None
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.in_a_row - 1, 16))
