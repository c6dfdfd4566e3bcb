"""A worker with several addresses: which it tries, when it moves on, where it stays."""

import pytest

from diloco_protocol import Code
from diloco_protocol.messages import Error, Join, Leave, Notice, Vote, Welcome
from diloco_worker.session.connection import (
    CONNECT_PATIENCE_S,
    FIRST_BACKOFF_S,
    JOIN_PATIENCE_S,
    LONGEST_PAUSE_S,
    RETRY_S,
    SAFETY,
    Phase,
    Votes,
)
from diloco_worker.session.effects import Close, JoinRefused, Open, Send
from diloco_worker.session.events import (
    Disconnected,
    LockedOut,
    Observe,
    Received,
    Unreached,
)
from diloco_worker.session.session import Session
from kit.session_harness import CONFIG, Desk, desk, version

STANDBY = Error(Code.STANDBY, "This is a standby.", retry=True, about="join")


@pytest.fixture
def made() -> Desk:
    return desk(places=3)


def opened(made: Desk) -> list[int]:
    """The address where it has just opened connections."""
    return [effect.place for effect in made.all(Open)]


def turns_to(made: Desk) -> list[int]:
    """The address where it opens connections at once, not later."""
    assert made.all(Close)
    made.passes(0.0)
    return opened(made)


@pytest.mark.parametrize(
    ("connects", "patience"), [(False, CONNECT_PATIENCE_S), (True, JOIN_PATIENCE_S)]
)
def test_silent_address_is_left_after_a_bounded_time(
    made: Desk, connects: bool, patience: float
) -> None:
    if connects:
        made.connects()
    assert made.session.wakes_at() == made.now + patience
    made.passes(patience - 0.1)
    assert not made.all(Close)
    made.passes(0.1)
    assert turns_to(made) == [1]


@pytest.mark.parametrize("code", [Code.STANDBY, Code.STOPPING])
def test_broker_that_admits_no_worker_is_left_for_the_next(made: Desk, code: Code) -> None:
    made.connects().hears(Error(code, "Not here.", retry=True, about="join"))
    assert turns_to(made) == [1]
    made.connects()
    assert made.sent(Join)


def test_worker_stays_at_a_broker_that_waits_for_a_model(made: Desk) -> None:
    made.connects().hears(Error(Code.NO_MODEL, "Wait.", retry=True, about="join"))
    made.passes(RETRY_S)
    assert made.sent(Join) and not made.all(Open)


def test_lost_broker_is_sought_at_its_address_then_at_the_others_in_order(made: Desk) -> None:
    made.happens(Unreached())
    assert turns_to(made) == [1]
    made.connects().is_welcomed(version(3))
    made.happens(Disconnected("It broke."))
    made.passes(FIRST_BACKOFF_S)
    assert opened(made) == [1]
    made.happens(Unreached())
    assert turns_to(made) == [0]
    made.happens(Unreached())
    assert turns_to(made) == [2]


def test_after_all_addresses_it_pauses_and_starts_over(made: Desk) -> None:
    pauses = []
    for _ in range(10):
        for place in range(3):
            assert opened(made) == [place]
            made.happens(Unreached())
            assert made.all(Close)
            wakes_at = made.session.wakes_at()
            assert wakes_at is not None
            if place == 2:
                pauses.append(round(wakes_at - made.now, 9))
            else:
                assert wakes_at == made.now
            made.passes(wakes_at - made.now)
    assert pauses[0] == FIRST_BACKOFF_S
    assert sorted(pauses) == pauses
    assert pauses[-1] == LONGEST_PAUSE_S


def test_answering_standby_and_silent_hub_cause_no_busy_loop(made: Desk) -> None:
    made = desk(places=2)
    for _ in range(5):
        made.happens(Unreached())
        assert turns_to(made) == [1]
        made.connects().hears(STANDBY)
        wakes_at = made.session.wakes_at()
        assert wakes_at is not None and wakes_at > made.now
        made.passes(wakes_at - made.now)
        assert opened(made) == [0]


def test_key_rejected_everywhere_is_final_and_one_accepted_once_is_not(made: Desk) -> None:
    for place in range(3):
        assert opened(made) == [place]
        made.happens(LockedOut("Your key is unknown."))
        assert bool(made.all(JoinRefused)) == (place == 2)
        made.passes(0.0)
    assert made.session.phase is Phase.REFUSED


def test_observer_stays_where_it_gets_an_answer() -> None:
    made = Desk(Session(None, lambda: 1))
    made.session.connection.places.count = 2
    ready = desk().connects().is_welcomed(version(3))
    assert ready.session.terms is not None
    made.happens(Observe(ready.session.terms))
    made.effects = [made.session.connection.open(made.now)]
    made.session.downloads.of(0).want_newest(None)
    made.connects().hears(Error(Code.STANDBY, "This is a standby.", retry=True, about="pull"))
    assert turns_to(made) == [1]
    made.connects()
    made.receives(version(4))
    made.happens(Disconnected("It broke."))
    made.passes(FIRST_BACKOFF_S)
    assert opened(made) == [1]


def test_single_address_is_not_left() -> None:
    made = desk()
    made.happens(Unreached())
    assert made.session.phase is Phase.CONNECTING and not made.effects
    assert made.session.wakes_at() is None


L = 3.0  # seconds of a lease


def asked(votes: Votes, what: str, now: float) -> list[int]:
    """The nonces of its votes."""
    sent = list(votes.asked(Notice(what, nonce=5, seconds=L), b"s", now))
    found = []
    for effect in sent:
        assert isinstance(effect, Send) and isinstance(effect.message, Vote)
        assert effect.message.voter == 99
        found.append(effect.message.nonce)
    return found


@pytest.mark.parametrize(("first", "other"), [("lease", "standby"), ("standby", "lease")])
def test_vote_is_a_promise_against_others(first: str, other: str) -> None:
    votes = Votes(99)
    assert asked(votes, first, 10.0) == [5], "at once"
    assert asked(votes, first, 11.0)
    assert not asked(votes, other, 11.0 + SAFETY * L - 0.01)
    assert asked(votes, other, 11.0 + SAFETY * L)
    assert not asked(votes, first, 12.0 + SAFETY * L)
    longest = Votes(99)
    list(longest.asked(Notice(first, nonce=5, seconds=100.0), b"s", 0.0))
    assert asked(longest, first, 1.0)
    assert not asked(longest, other, 99.0)


def test_a_session_votes_under_the_number_that_it_joined_with() -> None:
    worker = desk().connects()
    (join,) = worker.sent(Join)
    worker.is_welcomed()
    worker.hears(Notice("lease", nonce=5, seconds=L))
    assert worker.sent(Vote) == [Vote(b"\1" * 16, join.voter or 0, 5)]


def test_worker_of_a_later_hub_does_not_return_to_an_earlier_one() -> None:
    worker = desk(places=2).connects()
    worker.is_welcomed(term=1)
    worker.breaks()
    worker.is_welcomed(term=0)
    assert worker.sent(Leave) and worker.session.phase.value == "away"
    worker.passes(1.0)
    worker.connects()
    worker.is_welcomed(term=1)
    assert worker.session.phase.value == "joined"


def test_malformed_request_gets_no_vote() -> None:
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        assert not list(Votes(99).asked(Notice("lease", nonce=5, seconds=seconds), b"s", 0.0))


def test_worker_with_a_standby_detects_a_silent_hub_within_two_leases() -> None:
    one, two = (desk(places=count).connects() for count in (1, 2))
    for worker in (one, two):
        worker.happens(Received(Welcome(b"\1" * 16, "epoch", CONFIG, 0, lease=L)))
        worker.hears(Notice("alive"))
        for _ in range(11):
            worker.passes(2 * L / 10)
    assert one.session.connection.is_joined
    assert not two.session.connection.is_joined
