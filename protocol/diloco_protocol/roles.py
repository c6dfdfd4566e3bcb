"""Identities of peers of a broker that requires keys: a role and a name, authenticated by a key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from diloco_protocol.errors import UsageError

# Characters; a name is also a file name, on every system.
LONGEST_NAME = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")


class Role(str, Enum):
    """The permissions of a key."""

    WORKER = "worker"  # trains under its own id only, and reads
    OPERATOR = "operator"  # operates the run, and reads
    MONITOR = "monitor"  # reads the feed and the status
    RELAY = "relay"  # connects workers, whose names it vouches for


@dataclass(frozen=True)
class Peer:
    """An authenticated peer.

    Attributes:
        name: the worker id of a worker.
    """

    role: Role
    name: str

    def __str__(self) -> str:
        return f"the {self.role.value} {self.name}"


def check_name(name: str) -> str:
    """Return the name.

    Raises:
        UsageError: it is not a valid name of a key.
    """
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise UsageError(
            f"{name!r:.80} is not a valid name of a key; use 1 to {LONGEST_NAME} letters, digits, dots, "
            "dashes and underscores, starting with a letter or digit."
        )
    return name
