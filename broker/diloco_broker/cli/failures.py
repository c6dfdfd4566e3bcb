"""How a command fails: with one sentence on stderr and an exit code that a script can tell apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from diloco_protocol.errors import ProtocolError, Unreachable, UsageError

# Wrong usage, no broker, or nothing that could be read.
FAILED = 2


def fail(sentence: object) -> NoReturn:
    """Say why, and end the process."""
    typer.echo(f"diloco-broker: {sentence}", err=True)
    raise typer.Exit(FAILED) from None


@contextmanager
def failing_in_a_sentence() -> Iterator[None]:
    """Within it, an error of the caller or of the other side ends the process with its sentence."""
    try:
        yield
    except (UsageError, Unreachable, ProtocolError) as error:
        fail(error)
