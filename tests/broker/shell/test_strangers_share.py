"""Those who have not joined get a share of the loop's time; above it they wait, in order."""

from __future__ import annotations

from diloco_broker.shell.sockets import Incoming
from diloco_broker.shell.strangers import ROOM, ROOM_BYTES, SAVED_AT_MOST_S, SHARE, Strangers


def message(route: bytes, *, is_of_stranger: bool = True, size: int = 0) -> Incoming:
    return Incoming(route, [bytes(size)], None, is_of_stranger)


def spent() -> Strangers:
    """Strangers who have used up their share, at 0 s."""
    strangers = Strangers()
    assert strangers.has_time(0.0)
    strangers.spend(SAVED_AT_MOST_S)
    return strangers


def test_strangers_get_their_share_of_the_time() -> None:
    strangers, used = spent(), 0.0
    for millisecond in range(10_000):
        while strangers.has_time(millisecond / 1000):
            strangers.spend(0.005)
            used += 0.005
    assert abs(used - 10 * SHARE) < 0.01


def test_members_never_wait_for_strangers() -> None:
    strangers = spent()
    assert strangers.comes_later(message(b"a"), 0.0)
    assert strangers.put_off(message(b"a")) is None
    assert not strangers.comes_later(message(b"b", is_of_stranger=False), 0.0)


def test_messages_of_one_connection_stay_in_order() -> None:
    strangers = spent()
    strangers.put_off(message(b"a"))
    assert strangers.comes_later(message(b"a", is_of_stranger=False), 100.0), "it has joined since"
    assert strangers.comes_later(message(b"b"), 100.0), "there is time, but one came before"
    strangers.put_off(message(b"b"))
    assert [strangers.next().route, strangers.next().route] == [b"a", b"b"]
    assert not strangers
    assert not strangers.comes_later(message(b"a"), 100.0)


def test_room_for_those_that_wait_is_bounded() -> None:
    strangers = spent()
    strangers.put_off(message(b"quiet"))
    ended = [strangers.put_off(message(b"loud")) for _ in range(ROOM)]
    assert ended == [None] * (ROOM - 1) + [b"loud"]
    assert strangers.next().route == b"quiet"
    assert not strangers


def test_four_descriptions_at_once_may_wait_and_the_loudest_by_bytes_goes() -> None:
    strangers = spent()
    assert strangers.put_off(message(b"quiet")) is None
    for _ in range(171):
        for route in (b"a", b"b", b"c", b"d"):
            assert strangers.put_off(message(route, size=48 << 10)) is None
    ended = [strangers.put_off(message(b"loud", size=ROOM_BYTES >> 2)) for _ in range(2)]
    assert ended == [None, b"loud"]
    assert not strangers.comes_later(message(b"loud", is_of_stranger=False), 0.0)
    left = []
    while strangers:
        left.append(strangers.next().route)
    assert len(left) == 1 + 4 * 171
    assert not strangers.comes_later(message(b"a", is_of_stranger=False), 0.0)
