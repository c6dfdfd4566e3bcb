"""The faults of a run, their targets and times: a plan drawn from a seed. Pure.

Faults come one after the other, each a few rounds after the last; so the run must survive each of them,
while their effects (a worker that reconnects, a delayed delta) may overlap with the next. Two of the
workers are killed repeatedly, the others never: all work of the others must be in the final version.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

FRAGILE = ("w0", "w1")  # killed, and started again under the same id
STURDY = ("w2", "w3")  # stopped and cut off, never killed
WORKERS = (*FRAGILE, *STURDY)
NEWCOMERS = ("guest", "passer")  # join in the middle of the run; the second one is killed
BROKER = ("broker",)
RELAYS = (
    "north",
    "south",
)  # in the mode that has them: w0 and w2 are behind one, w1 and w3 the other

HEARTBEAT_TIMEOUT_S = 4.0  # of the drill's broker: after this silence a worker counts as dead
DISCONNECT_GRACE_S = 1.0
# Some stops end before the worker counts as dead, some do not.
STOPS_S = (HEARTBEAT_TIMEOUT_S + 2.0, HEARTBEAT_TIMEOUT_S / 3)


class Kind(Enum):
    """The faults, in the order of the table."""

    KILL_WORKER = ("worker killed -9, started again", 3, 1, FRAGILE)
    STOP_WORKER = ("worker stopped, continued", 2, 1, STURDY, STOPS_S)
    CUT = ("connections cut", 2, 1, (*WORKERS[1:], WORKERS[0]))
    CUT_WITHIN = ("connections cut within a message", 3, 1, WORKERS)
    PARTITION = ("worker cut off for a while", 1, 0, STURDY[-1:], (DISCONNECT_GRACE_S + 2.0,))
    KILL_BROKER = ("broker killed -9, started again", 3, 1, BROKER)
    STOP_BROKER = ("broker stopped, continued", 1, 0, BROKER, (1.5,))
    FILL_DISK = ("checkpoint disk full", 1, 1, BROKER)
    GUEST = ("newcomer joins and leaves", 1, 1, NEWCOMERS[:1])
    PASSER = ("newcomer joins and is killed -9", 1, 0, NEWCOMERS[1:])
    KILL_RELAY = ("relay killed -9, started again", 3, 1, RELAYS)
    CUT_WAN = ("relay's line cut within a message", 2, 1, RELAYS)
    PARTITION_WAN = ("relay cut off for a while", 2, 1, RELAYS, (DISCONNECT_GRACE_S + 3.0, 0.5))

    def __init__(
        self,
        words: str,
        whole: int,
        short: int,
        targets: Sequence[str],
        seconds: Sequence[float] = (0.0,),
    ) -> None:
        self.words = words
        self.whole, self.short = whole, short  # their number in a drill
        self.targets = targets  # in turn
        self.seconds = seconds  # in turn

    @property
    def is_kill(self) -> bool:
        return self in (Kind.KILL_WORKER, Kind.KILL_BROKER, Kind.PASSER, Kind.KILL_RELAY)

    @property
    def is_of_relays(self) -> bool:
        return self.targets == RELAYS

    @property
    def is_within(self) -> bool:
        """Whether it cuts within a message."""
        return self in (Kind.CUT_WITHIN, Kind.CUT_WAN)


@dataclass(frozen=True)
class Fault:
    kind: Kind
    target: str  # a worker's or relay's name, or "broker"
    gap: int  # rounds that close before it, counted from the last one
    delay: float  # seconds after that, so that it comes anywhere in a round
    seconds: float = 0.0  # its length, if any
    within: int = 0  # bytes until the cut within a message


@dataclass
class Injected:
    fault: Fault
    at: float | None = None  # when it took effect, on the monotonic clock; None until it has
    is_over: bool = False  # its end was seen, if that takes more than new versions


@dataclass(frozen=True)
class Scale:
    """The extent of one mode: the least number of rounds, and faults of each kind."""

    rounds: int
    gap: tuple[int, int]
    counts: Mapping[Kind, int]

    def of(self, relays: Sequence[str]) -> Scale:
        """The same for a mode with these relays; without relays there are no faults of relays."""
        return replace(
            self, counts={k: n for k, n in self.counts.items() if relays or not k.is_of_relays}
        )


WHOLE = Scale(40, (1, 2), {kind: kind.whole for kind in Kind})
SHORT = Scale(10, (1, 1), {kind: kind.short for kind in Kind})


def plan(seed: int, mode: str, scale: Scale) -> list[Fault]:
    """The faults of one mode, in order. The same arguments give the same plan."""
    draw = random.Random(f"{seed} {mode}")
    kinds = [kind for kind, count in scale.counts.items() for _ in range(count)]
    draw.shuffle(kinds)
    numbers: Counter[Kind] = Counter()
    faults = []
    for kind in apart(kinds, Kind.KILL_BROKER):
        number = numbers[kind]
        numbers[kind] += 1
        faults.append(
            Fault(
                kind,
                kind.targets[number % len(kind.targets)],
                draw.randint(*scale.gap),
                round(draw.uniform(0.0, 0.6), 3),
                kind.seconds[number % len(kind.seconds)],
                draw.randrange(2_000, 1_500_000) if kind.is_within else 0,
            )
        )
    return faults


def apart(kinds: Sequence[Kind], which: Kind) -> list[Kind]:
    """The same kinds, with `which` spread evenly over the plan."""
    others = [kind for kind in kinds if kind is not which]
    amount = len(kinds) - len(others)
    for number in range(amount):
        place = (2 * number + 1) * len(others) // (2 * amount) + number
        others.insert(place, which)
    return others
