"""Messages of peers that have not joined get a share of the time; those of members never wait."""

from __future__ import annotations

from collections import Counter

from diloco_broker.shell.sockets import Incoming
from diloco_broker.shell.strangers import ROOM, SAVED_AT_MOST_S, SHARE, Intake

COST_S = 0.005
STRANGER, OTHER, MEMBER = b"stranger", b"other", b"member"


class Shell:
    """An intake that charges each message of a stranger with `COST_S`, and what it did."""

    def __init__(self) -> None:
        self.taken: Counter[bytes] = Counter()
        self.ended: list[bytes] = []
        self.intake = Intake(
            lambda route: route == MEMBER,
            lambda message: self.taken.update([message.route]),
            lambda route, _: self.ended.append(route),
            COST_S,
        )

    def sends(self, route: bytes, count: int = 1) -> None:
        for _ in range(count):
            self.intake.deliver(Incoming(route, [b"x"], is_of_stranger=route != MEMBER), 0.0)


def test_flood_waits_and_a_member_does_not() -> None:
    shell = Shell()
    shell.sends(STRANGER, 500)
    burst = SAVED_AT_MOST_S / COST_S
    assert shell.taken[STRANGER] <= burst + 1
    shell.sends(MEMBER)
    assert shell.taken[MEMBER] == 1


def test_waiting_messages_are_taken_at_the_rate_of_the_share() -> None:
    shell = Shell()
    shell.sends(STRANGER, 500)
    before = shell.taken[STRANGER]
    for second in range(1, 11):
        shell.intake.catch_up(lambda now=float(second): now, 10.0, is_idle=False)  # type: ignore[misc]
    assert abs(shell.taken[STRANGER] - before - 10 * SHARE / COST_S) <= 11
    shell.intake.catch_up(lambda: 10.0, 10.0, is_idle=True)
    assert shell.taken[STRANGER] == 500 and not shell.intake


def test_peer_with_the_most_waiting_messages_is_disconnected() -> None:
    shell = Shell()
    shell.sends(STRANGER, ROOM)
    shell.sends(OTHER)
    shell.sends(STRANGER, ROOM)
    assert set(shell.ended) == {STRANGER}
    shell.intake.catch_up(lambda: 0.0, 10.0, is_idle=True)
    assert shell.taken[OTHER] == 1
