"""The command line of an experiment: its folder, its output, and its end."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import typer

from diloco_tools import terminal
from diloco_tools.demo.data import DataError
from diloco_tools.processes import ChildFailed, end_like_an_error_on_signals

T = TypeVar("T")


def emptied(folder: Path, mark: str) -> Path:
    """Empty a folder of an earlier start, recognised by a file named `mark`.

    Raises:
        OSError: the folder contains something else.
    """
    if folder.exists() and any(folder.iterdir()):
        if not (folder / mark).exists():
            raise FileExistsError(f"{folder} contains something else, and no file {mark}")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Experiment:
    """One start of an experiment.

    Args:
        command: the command in a checkout; it begins each message to standard error.
        out: the folder for its results and logs.
        interrupted: the message after Ctrl-C.
        width: of tables without a terminal.

    Attributes:
        has_failed: a part could not be measured.
    """

    def __init__(
        self,
        command: str,
        out: Path,
        *,
        interrupted: str = "all of its processes have ended",
        width: int = 130,
    ) -> None:
        self.command, self.out = command, out.resolve()
        self.shown = terminal.console_for_tables(width)
        self.has_failed = False
        self._interrupted = interrupted
        self._at, self._began = datetime.now().astimezone(), time.monotonic()

    @property
    def at(self) -> str:
        """The time of its start, in ISO 8601 with the offset of the time zone."""
        return self._at.isoformat(timespec="seconds")

    @property
    def stamp(self) -> str:
        """The same, for names of files."""
        return f"{self._at:%Y%m%d-%H%M%S}"

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._began

    @property
    def started_as(self) -> str:
        """Its command with all options."""
        return shlex.join([*self.command.split()[:3], *sys.argv[1:]])

    def say(self, text: str) -> None:
        self.shown.print(text, soft_wrap=True)

    def tick(self, text: str) -> None:
        """Print a text with the seconds since the start."""
        self.say(f"{self.seconds:4.0f} s  {text}")

    def refuse(self, sentence: str) -> NoReturn:
        """End with an error in the options."""
        terminal.fail(self.command, sentence, 2)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """The folder for results while the experiment runs; an error ends it with a message."""
        end_like_an_error_on_signals()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            yield self.out
        except DataError as error:
            self.refuse(str(error))
        except ChildFailed as error:
            terminal.fail(self.command, str(error), 1)
        except OSError as error:
            self.refuse(f"cannot work in {self.out} ({error}); name another folder with --out")
        except KeyboardInterrupt:
            terminal.fail(self.command, f"interrupted; {self._interrupted}", 130)

    def logs(self) -> Path:
        """Make the folder for logs."""
        logs = self.out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return logs

    def measure(
        self,
        parts: Mapping[str, Callable[[], Iterable[T]]],
        failed: Callable[[str], None],
        failures: tuple[type[Exception], ...] = (ChildFailed,),
        each: Callable[[T], None] = lambda _: None,
    ) -> list[T]:
        """The results of all parts, in order. If one fails, the others remain valid.

        Args:
            failed: called with the name of a failed part, to clean up.
            each: called with each result.
        """
        found: list[T] = []
        for number, (name, part) in enumerate(parts.items(), start=1):
            self.tick(f"{number}/{len(parts)}  {name}")
            try:
                for result in part():
                    found.append(result)
                    each(result)
            except failures as error:
                self.say(f"{self.command}: {error}")
                self.has_failed = True
                failed(name)
        return found

    def save(self, name: str, document: Any) -> Path:
        """Write a document as JSON into the folder."""
        path = self.out / name
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        return path

    def end(self, tables: Iterable[Any], notes: Sequence[str], problems: Sequence[str]) -> None:
        """Print tables, notes, and a line for each broken promise; exit code 1 if there is one."""
        for table in tables:
            self.shown.print(table)
        for sentence in [*notes, *(f"BROKEN  {each}" for each in problems)]:
            self.shown.print(sentence, soft_wrap=True)
        if problems or self.has_failed:
            raise typer.Exit(1)
