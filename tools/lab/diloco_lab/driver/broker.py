"""Command lines of brokers, relays and standbys."""

from __future__ import annotations

import sys
from collections.abc import Sequence

ANYWHERE = "tcp://127.0.0.1:*"  # an address on this machine that the system chooses


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
