"""The output of `diloco-launch local`: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from diloco_protocol.feed import Snapshot

# Between two plain lines: doubled after each, so that a long run keeps a short log.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0


def rounds_of(snapshot: Snapshot) -> int:
    """Rounds that the run has closed, those before a restart of its broker included."""
    if snapshot.round is not None:  # the open one; they count from 0
        return snapshot.round.number
    return 0 if snapshot.last_round is None else snapshot.last_round.number + 1


def status_line(snapshot: Snapshot | None, workers: int) -> str:
    """Rounds, loss, workers, and what the run waits for; `snapshot` None: nothing was received yet."""
    if snapshot is None:
        return f"starting a broker and {workers} worker{'s'[: workers != 1]}"
    most = snapshot.end.max_rounds if snapshot.end else None
    parts = [f"round {rounds_of(snapshot)}" + (f" of {most}" if most else "")]
    if snapshot.last_round is not None and snapshot.last_round.loss is not None:
        parts.append(f"loss {snapshot.last_round.loss:.4f}")
    parts.append(f"{snapshot.counts.alive} of {workers} workers")
    if snapshot.waiting_for and not snapshot.ended:
        parts.append(f"waiting {snapshot.waiting_for}")
    return ", ".join(parts)


class Status:
    """A context manager: `show` replaces the live line, `say` prints a line that stays."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._line = ""
        self._pause_s = FIRST_PAUSE_S
        self._next_line = clock() + self._pause_s
        self._live = Live(console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Status:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def show(self, line: str) -> None:
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif line != self._line and self._clock() >= self._next_line:
            self._line = line
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
            self._next_line = self._clock() + self._pause_s
            self.say(line)
