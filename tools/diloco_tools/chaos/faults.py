"""What is done to a run, to whom, and when: a plan drawn from a seed. Pure.

Faults come one after the other, each once a few rounds have closed since the last; so the run must live
through each of them, while what they left behind (a worker on its way back, a delta that was held up)
may well meet the next. Two of the workers are killed again and again, the others never: what those
have trained must all be in the end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

FRAGILE = ("w0", "w1")  # killed, and started again under the same id
STURDY = ("w2", "w3")  # stopped and cut off, never killed
WORKERS = (*FRAGILE, *STURDY)
GUEST = "guest"  # joins in the middle of the run and leaves politely
PASSER = "passer"  # joins in the middle of the run and is killed
BROKER = "broker"

HEARTBEAT_TIMEOUT_S = 4.0  # of the drill's broker: a worker silent for so long counts as dead
DISCONNECT_GRACE_S = 1.0


class Kind(str, Enum):
    """The faults, in the order of the table."""

    KILL_WORKER = "worker killed -9, started again"
    STOP_WORKER = "worker stopped, continued"
    CUT = "connections cut"
    CUT_WITHIN = "connections cut within a message"
    PARTITION = "worker cut off for a while"
    KILL_BROKER = "broker killed -9, started again"
    STOP_BROKER = "broker stopped, continued"
    FILL_DISK = "checkpoint disk full"
    GUEST = "newcomer joins and leaves"
    PASSER = "newcomer joins and is killed -9"


KILLS = (Kind.KILL_WORKER, Kind.KILL_BROKER, Kind.PASSER)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        target: a worker's name, or "broker".
        gap: rounds that close before it, counted from the last one.
        delay: seconds after that, so that it may come anywhere in a round.
        seconds: how long it lasts, where it lasts.
        within: bytes that still pass, where a connection is cut within a message.
    """

    kind: Kind
    target: str
    gap: int
    delay: float
    seconds: float = 0.0
    within: int = 0


@dataclass(frozen=True)
class Scale:
    """How much is done in one mode: faults of each kind, and the least number of rounds."""

    rounds: int
    gap: tuple[int, int]
    counts: tuple[tuple[Kind, int], ...]


WHOLE = Scale(
    rounds=40,
    gap=(1, 2),
    counts=(
        (Kind.KILL_WORKER, 3),
        (Kind.STOP_WORKER, 2),
        (Kind.CUT, 2),
        (Kind.CUT_WITHIN, 3),
        (Kind.PARTITION, 1),
        (Kind.KILL_BROKER, 3),
        (Kind.STOP_BROKER, 1),
        (Kind.FILL_DISK, 1),
        (Kind.GUEST, 1),
        (Kind.PASSER, 1),
    ),
)
SHORT = Scale(
    rounds=10,
    gap=(1, 1),
    counts=(
        (Kind.KILL_WORKER, 1),
        (Kind.STOP_WORKER, 1),
        (Kind.CUT, 1),
        (Kind.CUT_WITHIN, 1),
        (Kind.KILL_BROKER, 1),
        (Kind.FILL_DISK, 1),
        (Kind.GUEST, 1),
    ),
)


def plan(seed: int, mode: str, scale: Scale) -> list[Fault]:
    """The faults of one mode, in order. The same arguments give the same plan."""
    draw = random.Random(f"{seed} {mode}")
    kinds = [kind for kind, count in scale.counts for _ in range(count)]
    draw.shuffle(kinds)
    kinds = apart(kinds, Kind.KILL_BROKER)
    count = dict.fromkeys(Kind, 0)
    faults = []
    for kind in kinds:
        number = count[kind]
        count[kind] += 1
        faults.append(
            Fault(
                kind,
                target(kind, number),
                draw.randint(*scale.gap),
                round(draw.uniform(0.0, 0.6), 3),
                seconds(kind, number),
                draw.randrange(2_000, 1_500_000) if kind is Kind.CUT_WITHIN else 0,
            )
        )
    return faults


def target(kind: Kind, number: int) -> str:
    """Whom the fault of this kind with this number (from 0) befalls."""
    match kind:
        case Kind.KILL_WORKER:
            return FRAGILE[number % len(FRAGILE)]
        case Kind.STOP_WORKER:
            return STURDY[number % len(STURDY)]
        case Kind.CUT | Kind.CUT_WITHIN:
            return WORKERS[(number + (kind is Kind.CUT)) % len(WORKERS)]
        case Kind.PARTITION:
            return STURDY[-1]
        case Kind.GUEST:
            return GUEST
        case Kind.PASSER:
            return PASSER
        case _:
            return BROKER


def seconds(kind: Kind, number: int) -> float:
    """How long a fault lasts: some are over before anybody counts as dead, and some are not."""
    match kind:
        case Kind.STOP_WORKER:
            return HEARTBEAT_TIMEOUT_S + 2.0 if number % 2 == 0 else HEARTBEAT_TIMEOUT_S / 3
        case Kind.PARTITION:
            return DISCONNECT_GRACE_S + 2.0
        case Kind.STOP_BROKER:
            return 1.5
        case _:
            return 0.0


def apart(kinds: Sequence[Kind], which: Kind) -> list[Kind]:
    """The same kinds, these spread over the plan: the first third has the first of three, and so on.

    >>> [k.name for k in apart([Kind.CUT, Kind.GUEST, Kind.CUT, Kind.GUEST], Kind.GUEST)]
    ['CUT', 'GUEST', 'CUT', 'GUEST']
    """
    others = [kind for kind in kinds if kind is not which]
    amount = len(kinds) - len(others)
    for number in range(amount):
        place = (2 * number + 1) * len(others) // (2 * amount) + number
        others.insert(place, which)
    return others
