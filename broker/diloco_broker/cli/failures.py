"""How a command of the broker fails: with one sentence on stderr and exit code 2."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NoReturn

from diloco_protocol.clients import command_line

COMMAND = "diloco-broker"


def fail(sentence: object) -> NoReturn:
    """Say why, and end the process."""
    command_line.fail(COMMAND, sentence)


def failing_in_a_sentence() -> AbstractContextManager[None]:
    """Within it, an error of the caller or of the other side ends the process with its sentence."""
    return command_line.failing_in_a_sentence(COMMAND)
