"""Messages of peers that have not joined get a share of the loop's time; those of members never wait."""

from diloco_broker.shell.receive_queue import ROOM, SAVED_AT_MOST_S, SHARE, ReceiveQueue
from diloco_broker.shell.sockets import Incoming

COST_S = 0.005
UNAUTHENTICATED, OTHER, MEMBER = b"stranger", b"other", b"member"


class Shell:
    """An intake that charges each message of an unauthenticated peer with `COST_S`, and what it did."""

    def __init__(self) -> None:
        self.now = 0.0
        self.members = {MEMBER}
        self.taken: list[bytes] = []
        self.ended: list[bytes] = []
        self.intake = ReceiveQueue(
            lambda route: route in self.members,
            lambda message: self.taken.append(message.route),
            lambda route, _: self.ended.append(route),
            COST_S,
        )

    def sends(self, route: bytes, count: int = 1, size: int = 1) -> None:
        for _ in range(count):
            is_unauthenticated = route not in self.members
            self.intake.deliver(Incoming(route, [bytes(size)], None, is_unauthenticated), self.now)

    def catches_up(self, *, is_idle: bool = True) -> None:
        self.intake.catch_up(lambda: self.now, 10.0, is_idle=is_idle)


def spent() -> Shell:
    """One in which unauthenticated peers have just used up their share."""
    shell = Shell()
    shell.sends(b"early", int(SAVED_AT_MOST_S / COST_S) + 1)
    shell.catches_up()
    shell.taken.clear()
    return shell


def test_flood_waits_and_a_member_does_not() -> None:
    shell = Shell()
    shell.sends(UNAUTHENTICATED, 500)
    assert len(shell.taken) <= SAVED_AT_MOST_S / COST_S + 1
    shell.sends(MEMBER)
    assert shell.taken[-1] == MEMBER


def test_waiting_messages_are_taken_at_the_rate_of_the_share() -> None:
    shell = spent()
    shell.sends(UNAUTHENTICATED, 500)
    for _ in range(1000):
        shell.now += 0.01
        shell.catches_up(is_idle=False)
    assert abs(len(shell.taken) - 10 * SHARE / COST_S) <= 2
    shell.catches_up()
    assert len(shell.taken) == 500 and not shell.intake


def test_messages_of_one_connection_stay_in_order() -> None:
    shell = spent()
    shell.sends(UNAUTHENTICATED)
    shell.members.add(UNAUTHENTICATED)
    shell.now = 100.0  # there is time again
    shell.sends(UNAUTHENTICATED)
    shell.sends(OTHER)
    assert not shell.taken
    shell.catches_up()
    assert shell.taken == [UNAUTHENTICATED, UNAUTHENTICATED, OTHER] and not shell.intake
    shell.sends(OTHER)
    assert shell.taken[-1] == OTHER and not shell.intake


def test_peer_with_the_most_waiting_messages_is_disconnected() -> None:
    shell = spent()
    shell.sends(OTHER)
    shell.sends(UNAUTHENTICATED, ROOM - 1)
    assert not shell.ended
    shell.sends(UNAUTHENTICATED)
    assert shell.ended == [UNAUTHENTICATED]
    shell.catches_up()
    assert shell.taken == [OTHER]


def test_receive_queue_is_bounded_by_bytes() -> None:
    shell = spent()
    shell.sends(OTHER)
    for route in (b"a", b"b", b"c", b"d"):
        shell.sends(route, 171, 48 << 10)
    assert not shell.ended
    shell.sends(UNAUTHENTICATED, 319, 48 << 10)
    assert not shell.ended
    shell.sends(UNAUTHENTICATED, 1, 48 << 10)
    assert shell.ended == [UNAUTHENTICATED]
    shell.catches_up()
    assert len(shell.taken) == 1 + 4 * 171
