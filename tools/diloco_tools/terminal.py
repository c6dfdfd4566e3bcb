"""What is printed for people by way of Rich: text as it is, and styles only where `Text` asks for them.

Rich takes what stands in square brackets for its markup, and words between colons for emoji. Folders,
workers and the names of extras have both, so nothing here reads either.
"""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from diloco_protocol.clients import Keys, find_keys
from diloco_protocol.clients.command_line import KeyFile as KeysOption
from diloco_protocol.clients.command_line import fail
from diloco_protocol.roles import Role

__all__ = ["KeysOption", "console", "console_for_tables", "fail", "installed", "keys_of"]


def keys_of(given: Path | None, *, steers: bool) -> Keys | None:
    """The key of a display; of a folder that of an operator where the display also steers.

    Raises:
        UsageError: what is wrong with it.
    """
    first, second = Role.OPERATOR, Role.MONITOR
    order = (first, second) if steers else (second, first)
    return find_keys(given, *order, Role.WORKER)


def console(**options: Any) -> Console:
    """A console, with the `options` of Rich, that prints each string as it is."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def console_for_tables(width: int) -> Console:
    """A console that is so wide where there is no terminal, which would have a width of its own."""
    shown = console()
    return shown if shown.is_terminal else console(width=width)


def installed(command: str) -> str:
    """A command of this package as a shell finds it: by its path where the environment is not active."""
    if shutil.which(command):
        return command
    path, here = Path(sys.executable).with_name(command), Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
