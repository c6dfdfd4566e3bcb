"""When a standby vouches for its hub, whom it keeps, and when it takes over."""

from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from diloco_broker.standby import core
from diloco_broker.standby.lease import SAFETY
from diloco_protocol import messages
from diloco_protocol.errors import Code

L = 3.0
VOTERS = (11, 12, 13)

M = TypeVar("M", bound=messages.Message)


class Desk:
    """A standby, a clock, and what it did last."""

    def __init__(self) -> None:
        self.now = 100.0
        draws: Iterator[int] = iter(range(1, 100_000))
        self.standby = core.Standby("sb", "tcp://hub:1", draws.__next__, self.now)
        self.commands: list[core.Command] = []
        self.incarnation = self.greeting().incarnation

    def does(self, commands: core.Commands) -> None:
        self.commands = list(commands)

    def greeting(self) -> messages.Promise:
        self.does(self.standby.tick(self.now))
        (greeting,) = self.promises()
        return greeting

    def promises(self) -> list[messages.Promise]:
        found = [each.message for each in self.commands if isinstance(each, core.SendToHub)]
        return [each for each in found if isinstance(each, messages.Promise)]

    def answers(self, kind: type[M]) -> list[M]:
        found = [each.message for each in self.commands if isinstance(each, core.Send)]
        return [each for each in found if isinstance(each, kind)]

    def hears_hub(self, **said: Any) -> None:
        usual: dict[str, Any] = {
            "incarnation": self.incarnation,
            "term": 0,
            "nonce": 7,
            "seconds": L,
            "voters": VOTERS,
        }
        self.does(self.standby.receive_from_hub(messages.Lease(**(usual | said)), self.now))

    def passes(self, seconds: float) -> None:
        """Time goes on in steps; what was done in all of them is kept."""
        done: list[core.Command] = []
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            done += self.standby.tick(self.now)
        self.commands = done

    def comes(self, voter: int) -> list[messages.Notice]:
        """A worker asks to be let in."""
        join = messages.Join(f"w{voter}", voter=voter)
        self.does(self.standby.receive(b"%d" % voter, join, self.now))
        return self.answers(messages.Notice)

    def votes(self, voter: int) -> None:
        """It comes, and votes at once."""
        (asked,) = self.comes(voter)
        vote = messages.Vote(b"", voter, asked.nonce or 0)
        self.does(self.standby.receive(b"%d" % voter, vote, self.now))

    def all_vote(self) -> None:
        for voter in VOTERS:
            self.votes(voter)
        self.passes(0.1)

    def asks(self, action: str, **arguments: Any) -> messages.Result:
        control = messages.Control(action, 1, arguments)
        self.does(self.standby.receive(b"operator", control, self.now))
        (result,) = self.answers(messages.Result)
        return result

    @property
    def taken_over(self) -> list[int]:
        return [each.term for each in self.commands if isinstance(each, core.TakeOver)]


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.hears_hub()
    return desk


@pytest.fixture
def alone(desk: Desk) -> Desk:
    """The hub has been silent for so long that the last promise is over."""
    desk.passes(SAFETY * L + 0.1)
    assert not desk.taken_over
    return desk


def test_nonce_of_an_earlier_incarnation_or_hub_is_not_returned(desk: Desk) -> None:
    assert desk.promises() == [messages.Promise("sb", desk.incarnation, 7)]
    desk.hears_hub(incarnation=desk.incarnation + 1)
    assert not desk.promises()
    desk.hears_hub(term=3)
    assert desk.promises()
    desk.hears_hub(term=2)
    assert not desk.promises()


def test_a_standby_greets_its_hub_while_it_does_not_hear_it(desk: Desk) -> None:
    desk.passes(1.0)
    assert not desk.promises()
    desk.passes(L)
    assert {promise.nonce for promise in desk.promises()} == {None}


def test_workers_are_sent_back_to_a_hub_that_is_heard(desk: Desk) -> None:
    assert not desk.comes(11)
    (error,) = desk.answers(messages.Error)
    assert (error.code, error.retry) == (Code.STANDBY, True)


def test_standby_takes_over_with_a_majority(alone: Desk) -> None:
    alone.votes(11)
    alone.passes(0.1)
    assert not alone.taken_over
    alone.votes(12)
    alone.passes(0.1)
    assert alone.taken_over == [1]
    alone.passes(10.0)
    alone.hears_hub()
    assert not alone.commands  # it says nothing any more


def test_takeover_waits_until_the_last_promise_ends(desk: Desk) -> None:
    desk.passes(L)
    desk.all_vote()
    assert not desk.taken_over
    desk.passes(0.1)
    assert desk.taken_over == [1]


def test_a_vote_counts_for_as_long_as_a_lease(alone: Desk) -> None:
    alone.votes(11)
    alone.passes(L + 0.1)
    alone.votes(12)
    alone.passes(0.1)
    assert not alone.taken_over


def test_votes_of_others_than_the_voters_do_not_count(alone: Desk) -> None:
    for voter in (11, 98, 99):
        alone.votes(voter)
    alone.passes(0.1)
    assert not alone.taken_over


def test_old_or_unknown_nonce_is_not_a_vote(alone: Desk) -> None:
    (asked,) = alone.comes(11)
    alone.comes(12)
    alone.passes(L + 0.1)
    alone.votes(13)
    for voter, nonce in ((11, asked.nonce or 0), (12, 1 << 40)):
        vote = messages.Vote(b"", voter, nonce)
        alone.does(alone.standby.receive(b"%d" % voter, vote, alone.now))
    alone.passes(0.1)
    assert not alone.taken_over


def test_votes_do_not_count_for_longer_than_they_were_asked_for(desk: Desk) -> None:
    desk.asks("promote")
    desk.standby.hub_lost()
    for voter in VOTERS:
        desk.votes(voter)
    desk.hears_hub(seconds=10 * L, settled=0)  # the hub was started again, with a longer lease
    desk.standby.hub_lost()
    desk.passes(2 * L)
    assert not desk.taken_over


def test_settings_of_the_hub_are_followed_once(desk: Desk) -> None:
    for settings, count in (({"outer_lr": 0.5}, 1), ({"outer_lr": 0.5}, 0), ({"outer_lr": 0.6}, 1)):
        desk.hears_hub(settings=settings)
        found = [each.settings for each in desk.commands if isinstance(each, core.FollowSettings)]
        assert found == [settings] * count


def test_worker_that_stays_long_is_sent_to_the_hub(alone: Desk) -> None:
    assert alone.comes(11)
    for _ in range(int(core.STAYS_FOR * L)):
        alone.passes(1.0)
        alone.comes(11)
        assert [error.code for error in alone.answers(messages.Error)] == [Code.NO_MODEL]
    alone.passes(1.0)
    assert not alone.comes(11)
    assert alone.comes(11)  # and may come again


def test_flood_of_joins_is_asked_for_one_vote(alone: Desk) -> None:
    asked = [alone.comes(11) for _ in range(500)]
    assert len(asked[0]) == 1 and not any(asked[1:])
    vote = messages.Vote(b"", 11, asked[0][0].nonce or 0)
    alone.does(alone.standby.receive(b"11", vote, alone.now))
    alone.votes(12)
    alone.passes(0.1)
    assert alone.taken_over == [1]


def test_a_hub_without_workers_is_not_replaced_by_itself() -> None:
    desk = Desk()
    desk.hears_hub(voters=())
    desk.passes(60.0)
    assert not desk.taken_over


def test_a_standby_that_was_started_again_waits_for_what_it_may_have_promised() -> None:
    desk = Desk()
    desk.asks("promote")
    desk.hears_hub(settled=0)
    assert desk.promises()[0].nonce is None
    desk.standby.hub_lost()
    desk.all_vote()
    assert not desk.taken_over


def test_a_planned_takeover_waits_for_the_copy(desk: Desk) -> None:
    assert desk.asks("promote").data == {"is_over": False}
    desk.hears_hub(nonce=8)
    assert desk.promises() == [messages.Promise("sb", desk.incarnation, 8, "hold")]
    desk.standby.saved = 11
    desk.hears_hub(nonce=9, settled=12)
    assert desk.promises()[0].wants == "hold"
    desk.standby.saved = 12
    desk.hears_hub(nonce=10, settled=12)
    assert desk.promises() == [messages.Promise("sb", desk.incarnation, None, "charge")]
    assert not desk.taken_over
    desk.hears_hub(is_over=True)
    assert desk.taken_over == [1]


def test_standby_without_a_hub_says_which_votes_are_missing(alone: Desk) -> None:
    text = alone.asks("promote").text
    assert "2 of its 3 workers" in text and "--force" in text


def test_standby_with_other_options_never_takes_over(desk: Desk) -> None:
    desk.standby.misfit = "--num-fragments is 1."
    for force in (False, True):
        result = desk.asks("promote", force=force)
        assert not result.ok and "--num-fragments" in result.text
    assert "--num-fragments" in desk.asks("status").text
    desk.hears_hub(settled=0)
    assert desk.promises()[0].wants == ""
    desk.hears_hub(is_over=True)
    assert not desk.taken_over
    desk.passes(SAFETY * L + 0.1)
    desk.all_vote()
    assert not desk.taken_over
    desk.standby.misfit = None
    desk.passes(0.1)
    assert desk.taken_over == [1]


@pytest.mark.parametrize("is_forced", [False, True])
def test_takeover_that_cannot_be_recorded_is_retried(alone: Desk, is_forced: bool) -> None:
    if is_forced:
        assert alone.asks("promote", force=True).data == {"is_over": True}
    else:
        alone.all_vote()
    assert alone.taken_over == [1]
    alone.standby.cannot_take_over(alone.now)
    alone.passes(core.RETRY_S - 0.1)
    assert not alone.taken_over
    alone.passes(0.2)
    assert alone.taken_over == [1]


def test_standby_refuses_other_actions(desk: Desk) -> None:
    result = desk.asks("kick", worker="a")
    assert not result.ok and "tcp://hub:1" in result.text
    assert desk.asks("status").data["hears_hub"] is True


def test_refusal_by_the_hub_is_logged_once(desk: Desk) -> None:
    for count in (1, 0):
        desk.does(
            desk.standby.receive_from_hub(
                messages.Error(Code.NOT_ALLOWED, "There is another."), desk.now
            )
        )
        assert len([each for each in desk.commands if isinstance(each, core.Log)]) == count
