"""After a vote for a root broker a worker refuses standbys for a while, and vice versa."""

from __future__ import annotations

import pytest

from diloco_protocol.messages import Join, Leave, Notice, Vote, Welcome
from diloco_worker.session.connection import SAFETY, Votes
from diloco_worker.session.effects import Send
from diloco_worker.session.events import Received
from kit.session_harness import CONFIG, desk

L = 3.0


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


def test_the_longest_promise_holds() -> None:
    votes = Votes(99)
    list(votes.asked(Notice("lease", nonce=5, seconds=100.0), b"s", 0.0))
    assert asked(votes, "lease", 1.0)
    assert not asked(votes, "standby", 99.0)


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
