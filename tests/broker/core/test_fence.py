"""A hub with a standby releases versions only while it has its lease."""

import math
from collections import Counter
from typing import Any

import pytest

from diloco_broker.core.effects import Send
from diloco_broker.core.events import Now, Received, Tick
from diloco_broker.core.machine import Core
from diloco_broker.core.operations.ending import LAST_ROUND_S, LEAVE_WITHIN_S
from diloco_broker.core.versions.record import InitialModel
from diloco_broker.standby import fence
from diloco_broker.standby.lease import Ballot, Lease
from diloco_protocol import messages
from diloco_protocol.errors import Code
from diloco_protocol.messages import Error, Notice, Promise, Rejoin, Released, Vote, Welcome
from kit.core_harness import Puppet, Stage, a_config, a_stage, layered

L = 3.0


class Hub:
    """A hub under a fake clock, and what its standby says."""

    def __init__(self, **options: Any) -> None:
        usual = {"workers": 1, "standby": True, "lease": L, "recover_wait": 0.0}
        self.stage: Stage = a_stage(**(usual | options))
        self.route = self.stage.route()

    @property
    def lease(self) -> Any:
        return self.stage.state.standby

    @property
    def leases(self) -> list[messages.Lease]:
        return [m for m in self.stage.inbox.get(self.route, []) if isinstance(m, messages.Lease)]

    def says(self, **said: Any) -> None:
        """The standby speaks."""
        usual: dict[str, Any] = {"standby": "sb", "incarnation": 5}
        self.stage.happens(Received(self.route, Promise(**(usual | said))))

    def promises(self) -> None:
        """The standby greets, or returns the newest nonce."""
        self.says(nonce=self.leases[-1].nonce if self.leases else None)

    def greets(self) -> None:
        """The standby comes, and promises."""
        self.says()
        self.promises()

    def is_promised_for(self, seconds: float) -> None:
        """The standby returns each nonce for so long."""
        for _ in range(int(seconds / 0.5)):
            self.stage.passes(0.5)
            self.promises()


def promised(**options: Any) -> Hub:
    """One whose standby has promised."""
    hub = Hub(**options)
    hub.greets()
    return hub


@pytest.fixture
def hub() -> Hub:
    return promised()


def joined(hub: Hub, **voters: int) -> list[Puppet]:
    """Workers with these numbers, which hold the current version."""
    puppets = [hub.stage.worker(name).joins(voter=voter) for name, voter in voters.items()]
    hub.stage.provide()
    for puppet in puppets:
        puppet.pulls()
    return puppets


def asked(puppet: Puppet) -> list[Notice]:
    """The votes that a worker was asked for."""
    return [notice for notice in puppet.all(Notice) if notice.what == "lease"]


def votes(puppet: Puppet) -> None:
    notice = asked(puppet)[-1]
    assert puppet.session is not None and notice.nonce is not None
    voter = puppet.stage.state.members.named(puppet.worker_id).voter
    puppet.sends(Vote(puppet.session, voter, notice.nonce))


def test_hub_that_has_not_heard_its_standby_admits_no_worker() -> None:
    hub = Hub()
    error = hub.stage.worker("a").joins().error()
    assert (error.code, error.retry) == (Code.STANDBY, True)
    hub.greets()
    assert hub.stage.worker("b").joins().got(Welcome)


def test_broker_without_the_option_has_no_lease() -> None:
    stage = a_stage(workers=1)
    route = stage.route()
    stage.happens(Received(route, Promise("sb", 5)))
    assert stage.shown()["standby"] is None
    assert [m.code for m in stage.inbox[route] if isinstance(m, Error)] == [Code.NOT_ALLOWED]
    assert stage.worker("a").joins().got(Welcome)


def test_a_version_is_released_only_with_the_lease(hub: Hub) -> None:
    (a,) = joined(hub, a=1)
    hub.stage.by_hand = True
    a.pushes(7)
    hub.stage.passes(L + 0.1)  # its chunks are folded after the lease has lapsed
    hub.stage.work()
    assert hub.stage.version().counter == 0
    assert "for its lease" in hub.stage.shown()["waiting_for"]
    hub.promises()
    hub.stage.passes(0.1)
    hub.stage.work()
    assert hub.stage.version().counter == 1
    assert hub.stage.counted() == [Counter({("a", 7): 1})] * 3


def test_workers_are_told_of_a_version_only_with_the_lease(hub: Hub) -> None:
    """It may be the first that hears of it, and another broker may have the run by then."""
    (a,) = joined(hub, a=1)
    a.pushes(7)
    assert hub.stage.version().counter == 1
    hub.stage.passes(L + 0.1)
    a.pulls()
    assert a.got(Released).version.counter == 0
    hub.promises()
    hub.stage.passes(0.1)
    assert a.got(Released).version.counter == 1


@pytest.mark.parametrize("from_file", [False, True], ids=["worker", "file"])
def test_a_run_begins_only_with_the_lease(from_file: bool) -> None:
    hub = Hub()
    if from_file:
        hub.stage = Stage(hub.stage.config, initial=InitialModel({"weight": (12,)}))
        hub.route = hub.stage.route()
    hub.stage.by_hand = True
    hub.greets()
    a = hub.stage.worker("a").joins(voter=1)
    hub.stage.passes(0.1)
    if not from_file:
        a.seeds()
    hub.stage.passes(L + 0.1)  # while the parameters come in the lease lapses
    hub.stage.work()
    hub.stage.passes(0.1)
    a.pulls()
    assert hub.stage.state.round is None and not a.all(Released)
    hub.promises()
    hub.stage.passes(0.1)
    hub.stage.work()
    assert hub.stage.version().counter == 0 and a.all(Released)


def test_hub_replaced_during_seeding_starts_no_run(hub: Hub) -> None:
    a = hub.stage.worker("a").joins(voter=1)
    hub.stage.by_hand = True
    a.seeds()
    hub.says(wants="charge")
    hub.stage.work()
    hub.stage.passes(0.1)
    a.pulls()
    assert hub.leases[-1].is_over
    assert hub.stage.state.round is None and not a.all(Released)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "async"},
        {"durable": True, "save_dir": "run"},
        {"num_fragments": 2, "sync_every": 10},
        {"quorum": 1},
        {"deterministic": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_mode_passes_the_fence(options: dict[str, Any]) -> None:
    hub = Hub(**options)
    if "num_fragments" in options:
        hub.stage.manifest = layered(4)
    hub.greets()
    (a,) = joined(hub, a=1)
    hub.stage.passes(L + 0.1)
    a.pushes(7)
    if hub.stage.saves:
        hub.stage.is_saved()
    assert hub.stage.version().counter == 0
    hub.promises()
    hub.stage.passes(0.2)
    hub.stage.work()
    if hub.stage.config.durable:
        hub.stage.is_saved()
    assert hub.stage.version().counter == 1


def test_time_in_which_the_broker_stood_still_counts() -> None:
    config = a_config(1, standby=True, lease=L)
    core = Core(config, iter(range(1000)).__next__, 0.0)
    (sent,) = core.handle(Received(b"s", Promise("sb", 5)), Now(0.0, 100.0))
    assert isinstance(sent, Send) and isinstance(sent.message, messages.Lease)
    core.handle(Received(b"s", Promise("sb", 5, sent.message.nonce)), Now(0.0, 100.0))
    assert fence.may_release(core.state)
    core.handle(Tick(), Now(0.0, 100.0 + L + 0.01))
    assert not fence.may_release(core.state)


def test_workers_keep_the_lease_of_a_hub_whose_standby_is_silent(hub: Hub) -> None:
    a, b, c = joined(hub, a=1, b=2, c=3)
    hub.is_promised_for(2.0)  # the standby has the list of the three
    assert not asked(a)
    for _ in range(40):
        hub.stage.passes(0.25)
        for puppet in (a, b):
            votes(puppet) if asked(puppet) else None
    assert hub.lease.holds
    for _ in range(20):
        hub.stage.passes(0.25)
        votes(c)  # one of three
    assert not hub.lease.holds


def test_votes_do_not_bring_a_lapsed_lease_back(hub: Hub) -> None:
    (a,) = joined(hub, a=1)
    hub.is_promised_for(2.0)
    hub.stage.passes(L)
    assert asked(a) and not hub.lease.holds
    votes(a)
    assert not hub.lease.holds
    hub.promises()
    assert hub.lease.holds


def test_workers_are_sent_away_from_a_hub_without_a_lease(hub: Hub) -> None:
    (a,) = joined(hub, a=1)
    hub.stage.passes(2 * L)
    assert not a.all(Rejoin)
    hub.stage.passes(L + 0.2)
    assert a.got(Rejoin)
    assert not len(hub.stage.here)


def test_worker_that_was_sent_away_does_not_replace_a_dead_one_when_it_rejoins() -> None:
    hub = promised(workers=2)
    a, _ = joined(hub, a=1, b=2)
    a.dies()
    hub.stage.passes(3 * L + 0.2)
    assert hub.stage.shown()["counts"]["due"] == 2
    hub.promises()
    hub.stage.worker("b").joins(voter=2)
    assert [each["id"] for each in hub.stage.shown()["dead"]] == ["a"]


def test_hub_does_not_end_its_last_round_without_a_lease() -> None:
    hub = promised(max_rounds=2)
    (a,) = joined(hub, a=1)
    a.pushes(7)
    hub.is_promised_for(1.0)
    assert a.notices[-1] == "last_round"
    a.dies()
    hub.stage.passes(10 * LAST_ROUND_S)
    assert not hub.stage.ends and not hub.stage.shown()["end"]["is_over"]
    assert "for its lease" in hub.stage.shown()["waiting_for"]
    hub.promises()
    a.joins(session=None, voter=1)
    hub.is_promised_for(1.0)
    a.pushes(8)
    assert hub.stage.version().counter == 2 and a.notices[-1] == "over"
    a.leaves()
    hub.stage.passes(0.2)
    assert [end.is_complete for end in hub.stage.ends] == [True]


def test_hub_without_a_lease_does_not_exit_after_the_run() -> None:
    """The last version may be nowhere else, and the standby may make another one."""
    hub = promised(max_rounds=1)
    (a,) = joined(hub, a=1)
    hub.is_promised_for(1.0)
    a.pushes(7)
    a.loses_connection()
    hub.stage.passes(10 * LEAVE_WITHIN_S)
    assert not hub.stage.ends
    hub.says(wants="over", term=1)
    hub.stage.passes(10 * LEAVE_WITHIN_S)
    assert not hub.stage.ends, "another broker has the run"


def test_hub_without_a_standby_ends_once_its_workers_have_left() -> None:
    hub = promised(max_rounds=1, workers=2)
    a, b = joined(hub, a=1, b=2)
    hub.is_promised_for(2.0)
    hub.stage.pushes(a=7, b=7)
    assert hub.stage.shown()["end"]["is_over"]
    a.leaves()
    for _ in range(20):
        hub.stage.passes(0.5)
        votes(b) if asked(b) else None
    assert hub.lease.holds, "one that has left a run that is over votes for no other broker"
    b.leaves()
    hub.stage.passes(0.2)
    assert [end.is_complete for end in hub.stage.ends] == [True]


def test_a_hub_that_was_replaced_never_releases_again(hub: Hub) -> None:
    (a,) = joined(hub, a=1)
    nonce = hub.leases[-1].nonce
    hub.says(wants="over", term=4)
    assert hub.lease.superseded_by == 4
    hub.says(nonce=nonce)
    hub.stage.passes(0.5)
    assert a.got(Rejoin) and not hub.lease.holds
    assert hub.stage.worker("b").joins().last(Welcome) is None
    assert hub.stage.shown()["standby"]["is_replaced"]
    assert not hub.stage.asks("promote").ok


def test_before_a_planned_takeover_the_round_ends_and_the_run_is_saved() -> None:
    hub = promised(save_dir="run", save_every=10)
    joined(hub, a=1, b=2)
    hub.stage.is_saved()
    hub.stage.pushes(a=7, b=7)
    asked_before = len(hub.stage.saves)
    hub.says(wants="hold", nonce=hub.leases[-1].nonce)
    assert {lease.settled for lease in hub.leases} == {None}
    assert len(hub.stage.saves) == asked_before + 1
    hub.stage.is_saved()
    hub.says(wants="hold", nonce=hub.leases[-1].nonce)
    hub.stage.passes(1.1)
    assert hub.leases[-1].settled == hub.stage.round.number == 1
    hub.stage.pushes(a=8, b=8)
    assert hub.stage.version().counter == 1  # no other round closes


def test_another_standby_is_refused_until_an_operator_says_that_the_first_is_gone(hub: Hub) -> None:
    other = hub.stage.route()
    hub.stage.happens(Received(other, Promise("other", 6)))
    (error,) = hub.stage.inbox[other]
    assert isinstance(error, Error) and "(sb)" in error.text
    assert not hub.stage.asks("promote").ok
    assert hub.stage.asks("promote", force=True).ok
    hub.stage.passes(3 * L)
    assert hub.lease.holds  # alone
    hub.stage.happens(Received(other, Promise("other", 6)))
    assert not hub.lease.holds  # until its new standby promises something
    lease = hub.stage.inbox[other][-1]
    assert isinstance(lease, messages.Lease)
    hub.stage.happens(Received(other, Promise("other", 6, lease.nonce)))
    assert hub.lease.holds


def test_former_standby_with_a_higher_term_replaces_the_hub() -> None:
    hub = promised(save_dir="run", save_every=100)
    joined(hub, a=1)
    hub.stage.is_saved()
    hub.stage.asks("promote", force=True)
    hub.says(standby="other", incarnation=9)
    assert hub.stage.checkpoints[-1].record.standby == "other", "it is saved at once"
    hub.says(standby="other", incarnation=9, nonce=hub.leases[-1].nonce)
    assert hub.lease.holds
    hub.says(wants="over", term=0)  # no higher than the hub's own
    assert hub.lease.holds
    hub.says(wants="over", term=1)
    assert hub.lease.superseded_by == 1 and not hub.lease.holds


def test_hub_continues_alone_after_a_lease_of_silence(hub: Hub) -> None:
    hub.stage.passes(L + 0.1)
    assert hub.stage.asks("promote").ok
    assert hub.lease.holds


def test_a_hub_that_was_started_again_knows_its_standby_and_its_term() -> None:
    hub = promised(save_dir="run")
    joined(hub, a=1)
    hub.stage.is_saved()
    again = Hub()
    again.stage = hub.stage.restarted()
    again.route = again.stage.route()
    assert again.lease.standby == "sb" and not again.lease.holds
    again.greets()
    assert again.lease.holds


class Count:
    """A ballot on a clock that goes on by a second with each nonce."""

    def __init__(self) -> None:
        self.ballot, self.now = Ballot(iter(range(1, 100)).__next__, 100.0), 0.0

    def nonce(self) -> int:
        self.now += 1.0
        return self.ballot.nonce(self.now)

    def vote(self, *voters: int) -> None:
        """All of them return a new nonce."""
        at = self.ballot.drawn_at(self.nonce())
        assert at == self.now
        for voter in voters:
            self.ballot.vote(voter, at)

    def agreed(self, *voters: int) -> None:
        self.ballot.propose(frozenset(voters))
        self.ballot.has_come(self.nonce())


def test_voters_count_once_the_standby_has_them() -> None:
    count = Count()
    count.ballot.propose(frozenset({1, 2, 3}))
    count.vote(1, 2, 3)
    assert count.ballot.supported_at == -math.inf
    count.ballot.has_come(count.nonce())
    assert count.ballot.supported_at == 1.0
    count.vote(7, 8, 9)  # of peers that are no voters
    assert count.ballot.supported_at == 1.0


def test_while_new_voters_are_on_their_way_both_sets_need_a_majority() -> None:
    count = Count()
    count.agreed(1, 2, 3)
    before = count.nonce()
    count.ballot.propose(frozenset({3, 4, 5}))
    count.ballot.propose(frozenset({1}))  # not before those have come
    count.vote(3, 4, 5)
    assert count.ballot.supported_at == -math.inf  # of the first set 3 alone
    count.vote(1)
    assert count.ballot.supported_at == 3.0
    count.ballot.has_come(before)  # the standby may not have them yet
    assert count.ballot.voters == {1, 2, 3}
    count.ballot.has_come(count.nonce())
    assert count.ballot.voters == {3, 4, 5} and count.ballot.supported_at == 3.0


def test_nonce_confirms_only_its_own_proposal() -> None:
    count = Count()
    count.ballot.propose(frozenset({1}))
    early = count.nonce()
    count.ballot.has_come(early)
    count.agreed(2)
    count.ballot.propose(frozenset({1}))
    count.ballot.has_come(early)
    assert count.ballot.voters == {2}


def test_restarted_hub_keeps_the_voters_until_workers_return() -> None:
    hub = promised()
    hub.is_promised_for(2.0)
    assert hub.lease.holds
    assert {lease.voters for lease in hub.leases} == {()}
    joined(hub, a=1)
    hub.is_promised_for(2.0)
    assert (1,) in {lease.voters for lease in hub.leases}
    assert hub.leases[-1].voters == ()  # it has them


def test_a_lease_runs_from_its_nonce() -> None:
    lease = Lease(Ballot(iter(range(100)).__next__, L))
    nonce = lease.ballot.nonce(lease.now)
    lease.now = 2.0
    lease.promised(nonce)
    assert lease.ends_at == L
    lease.now = L
    lease.promised(nonce)
    assert not lease.holds
