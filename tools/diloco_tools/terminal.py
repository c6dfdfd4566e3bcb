"""What is printed for people by way of Rich: text as it is, and styles only where `Text` asks for them.

Rich takes what stands in square brackets for its markup, and words between colons for emoji. Folders,
workers and the names of extras have both, so nothing here reads either.
"""

from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

FeedOption = Annotated[
    str,
    typer.Option(
        metavar="ADDR",
        envvar="DILOCO_FEED",
        help="Feed address that diloco-broker serve printed.",
    ),
]


def console(**options: Any) -> Console:
    """A console, with the `options` of Rich, that prints each string as it is."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def console_for_tables(width: int) -> Console:
    """A console that is so wide where there is no terminal, which would have a width of its own."""
    shown = console()
    return shown if shown.is_terminal else console(width=width)


def fail(command: str, sentence: str, code: int) -> NoReturn:
    """End a command with a sentence on its standard error and this exit code."""
    typer.echo(f"{command}: {sentence}", err=True)
    raise typer.Exit(code)
