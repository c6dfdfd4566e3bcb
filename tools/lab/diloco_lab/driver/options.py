"""Command lines: values between commas, and those of brokers and relays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_tools.processes import Children


def words(text: str) -> list[str]:
    """The words between commas."""
    return [each.strip() for each in text.split(",") if each.strip()]


START_WITHIN_S = 60.0  # until a process prints its address, on a busy machine
ANYWHERE = "tcp://127.0.0.1:*"  # the system chooses the port


def broker_command(*words: str, inside: Sequence[str] = (), **options: object) -> list[str]:
    """`diloco-broker` with these words and options: `sync_every=6`; True is a flag, False leaves it out.

    `inside` is a command that runs another one somewhere else, by exec.
    """
    command = [*inside, sys.executable, "-m", "diloco_broker", *words]
    for name, value in options.items():
        if value is not False:
            command.append("--" + name.replace("_", "-"))
            command += [] if value is True else [str(value)]
    return command


def make_keys(children: Children, folder: Path, *workers: str, **others: str) -> None:
    """Make keys for these workers, and others by role, with diloco-broker; raises ChildFailed."""
    keygen = children.start("keygen", broker_command("keygen", str(folder), *workers, **others))
    if keygen.wait(START_WITHIN_S) != 0:
        raise keygen.failure()
