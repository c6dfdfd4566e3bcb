"""The commands of `diloco-broker`. Each fails with one sentence on stderr and exit code 2."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NoReturn

from diloco_protocol.clients import command_line

COMMAND = "diloco-broker"


def fail(sentence: object) -> NoReturn:
    """Print the error, and exit."""
    command_line.fail(COMMAND, sentence)


def failing_in_a_sentence() -> AbstractContextManager[None]:
    """A context in which a usage or connection error exits the process with its message."""
    return command_line.failing_in_a_sentence(COMMAND)
