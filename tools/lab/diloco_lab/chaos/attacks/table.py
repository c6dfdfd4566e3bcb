"""The attacks: one row, one function, carried out by the role "attacker"."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_lab.chaos.attacks import floods, keyed, words
from diloco_lab.chaos.attacks.keyed import MONITOR, OPERATOR, THIEF
from diloco_lab.chaos.attacks.peers import Scene, Tally
from diloco_protocol.clients import find_keys
from diloco_protocol.roles import Peer as Owner

NICE = 5  # a third of the weight of others; with 19 it got no CPU time on a busy machine


@dataclass(frozen=True)
class Attack:
    """One row.

    Attributes:
        act: the attack, in a process of its own.
        with_key: the owner of its key at a broker with keys; None: it has no key.
        by: the attacker in the table; empty: the owner of its key.
        without_keys: it is also an attack on a broker without keys.
        waits: in the whole drill it lasts until the broker should have ended unread connections.
    """

    name: str
    act: Callable[[Scene], None]
    with_key: Owner | None = THIEF
    by: str = ""
    without_keys: bool = True
    waits: bool = False


ATTACKS = (
    Attack("3 million empty frames", floods.empty_frames),
    Attack("endless empty frames", floods.endless_empties),
    Attack("endless frames of a MiB", floods.endless_mebibytes),
    Attack("60 joins with headers of 7 MB", floods.large_joins),
    Attack("pieces of 8 MB descriptions", floods.large_description),
    Attack("30 observers that never read", floods.observers, waits=True),
    Attack("manifests asked for, never read", floods.manifests, waits=True),
    Attack("one-byte messages", floods.noise),
    Attack("host name with line ends, escapes", words.host_names),
    Attack("set to ruinous values", words.settings, with_key=OPERATOR),
    Attack("set, with a worker's key", words.lawful_settings, without_keys=False),
    Attack("no key: floods and questions", keyed.no_key, with_key=None, without_keys=False),
    Attack("a wrong key", keyed.wrong_key, by="a made-up key", without_keys=False),
    Attack("another worker's name, session", keyed.anothers_name, without_keys=False),
    Attack(
        "a monitor's key that steers", keyed.steering_monitor, with_key=MONITOR, without_keys=False
    ),
    Attack("messages of an old session", keyed.replay, by="old messages", without_keys=False),
)
BY_NAME = {each.name: each for each in ATTACKS}


def attack(name: str, *, keys: str, description: str, **scene: Any) -> Tally:
    """Carry one out; its time begins after the preparations.

    Args:
        keys: the attacker's key file; empty: none.
        description: a file with the packed manifest of the run.
        scene: see `Scene`.
    """
    found = find_keys(keys) if keys else None
    with contextlib.closing(
        Scene(keys=found, description=Path(description).read_bytes(), **scene)
    ) as at:
        at.tally.began_at = time.monotonic()
        BY_NAME[name].act(at)
        at.tally.ended_at = time.monotonic()
        return at.tally


class Attacker:
    """The role "attacker". It has a low priority, so that the measured processes have the cores."""

    def __init__(self, _: object) -> None:
        os.nice(NICE)
        with contextlib.suppress(OSError):  # Linux weighs autogroups first, and nice values in one
            Path("/proc/self/autogroup").write_text(str(NICE))

    def attack(self, **arguments: Any) -> dict[str, Any]:
        return asdict(attack(**arguments))
