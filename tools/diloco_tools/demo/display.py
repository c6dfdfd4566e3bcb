"""Progress of a demo: bars on a terminal, now and then a plain line everywhere else."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

PLAIN_EVERY = 5.0  # seconds between lines if the output is not a terminal


class Display:
    """A context manager; `show` may be called at any rate."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: dict[str, str] = {}
        self._tasks: dict[str, TaskID] = {}
        self._last_line = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description:<13}", markup=False),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", style="cyan", markup=False),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._progress.disable:  # some versions of Rich print an empty line otherwise
            self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True)
        self._lines.clear()

    def show(self, name: str, done: int, total: int, figures: str) -> None:
        """Show the progress of `name` and its latest figures."""
        if self._progress.disable:
            self._lines[name] = f"{name} {done}/{total} {figures}"
            if time.monotonic() - self._last_line >= PLAIN_EVERY:
                self._last_line = time.monotonic()
                line = " | ".join(self._lines.values())
                self._console.print(line, highlight=False, soft_wrap=True)
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, figures="")
        self._progress.update(self._tasks[name], completed=done, figures=figures)
