"""Identity of a peer where a broker asks for keys: a role and a name, which a key proves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from diloco_protocol.errors import UsageError

# A name is also the name of a file, on every system.
LONGEST_NAME = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")


class Role(str, Enum):
    """What a key is good for."""

    WORKER = "worker"  # trains, under its own id only, and reads
    OPERATOR = "operator"  # steers, and reads
    MONITOR = "monitor"  # reads the feed and the status
    RELAY = "relay"  # connects workers, whose names it vouches for


@dataclass(frozen=True)
class Peer:
    """Whoever proved to have a key.

    Attributes:
        name: of a worker: its worker id.
    """

    role: Role
    name: str

    def __str__(self) -> str:
        return f"the {self.role.value} {self.name}"


def check_name(name: str) -> str:
    """The name itself.

    Raises:
        UsageError: it cannot be the name of a key.
    """
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise UsageError(
            f"{name!r:.80} cannot be the name of a key; take 1 to {LONGEST_NAME} letters, digits, dots, "
            "dashes and underscores, a letter or digit first."
        )
    return name
