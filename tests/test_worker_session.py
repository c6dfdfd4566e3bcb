"""The worker's state machine, with a clock of our own and no socket."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from diloco_protocol import (
    Bitmap,
    Counted,
    Kind,
    Ledger,
    Manifest,
    RunConfig,
    TensorEntry,
    VersionId,
)
from diloco_protocol.messages import (
    Ack,
    Chunk,
    Commit,
    Control,
    Credit,
    Error,
    Grant,
    Heartbeat,
    Join,
    Leave,
    Message,
    Notice,
    Pull,
    Purpose,
    Push,
    Rejoin,
    Released,
    Result,
    Standing,
    Welcome,
)
from diloco_worker.events import (
    Answered,
    Ask,
    Beat,
    Begin,
    Close,
    Connected,
    Deliver,
    Depart,
    Discard,
    Disconnected,
    Effect,
    Event,
    Hold,
    JoinRefused,
    Observe,
    Offer,
    Open,
    PrepareDonation,
    PushOver,
    Received,
    Say,
    Send,
    SendChunk,
    Start,
    Stopping,
    Store,
    Tick,
    Uploaded,
    Want,
    Withdraw,
)
from diloco_worker.pulls import CREDIT_BATCH, DOWNLOAD_WINDOW
from diloco_worker.session import (
    JOIN_PATIENCE_S,
    LONGEST_BACKOFF_S,
    REFUSED_RETRY_S,
    Phase,
    Session,
)

RUN = "0123456789abcdef"
CONFIG = RunConfig(mode="sync", sync_every=5, chunk_elements=10, heartbeat_timeout=30.0)
# 10 chunks of parameters, then none of buffers; a frozen fragment of one chunk.
MANIFEST = Manifest(
    (
        TensorEntry("weight", (100,), "float32", Kind.TRAINABLE),
        TensorEntry("embedding", (3,), "float32", Kind.FROZEN),
    )
)
CHUNKS = 10
FROZEN = 1

E = TypeVar("E", bound=Effect)
M = TypeVar("M", bound=Message)


def version(counter: int, tag: int | None = None) -> VersionId:
    return VersionId(RUN, counter, counter if tag is None else tag)


def whole(push_id: int, worker: str = "me") -> Ledger:
    return Ledger({worker: (Counted(push_id),)})


def gradient(push_id: int = 77, base: int = 0) -> Push:
    return Push(b"", push_id, 0, CHUNKS, "bf16", base=version(base))


@dataclass
class Desk:
    """A session under test, what it asked for last, and shorthand for what may happen to it."""

    session: Session
    now: float = 100.0
    effects: list[Effect] = field(default_factory=list)
    sessions: int = 0

    def happens(self, *events: Event) -> list[Effect]:
        self.effects = []
        for event in events:
            self.effects += self.session.handle(event, self.now)
            self.session.check_invariants()
        return self.effects

    def hears(self, *messages: Message) -> list[Effect]:
        return self.happens(*(Received(message) for message in messages))

    def passes(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.happens(Tick())

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def sent(self, kind: type[M]) -> list[M]:
        return [e.message for e in self.all(Send) if isinstance(e.message, kind)]

    @property
    def chunks_sent(self) -> list[int]:
        return [effect.index for effect in self.all(SendChunk)]

    def connects(self) -> Desk:
        self.happens(Connected())
        return self

    def is_welcomed(self, *versions: VersionId | None, config: RunConfig = CONFIG) -> Desk:
        self.sessions += 1
        token = bytes([self.sessions]) * 16
        self.hears(Welcome(token, "epoch", config, 0, RUN if any(versions) else None, versions))
        return self

    def receives(
        self, what: VersionId, ledger: Ledger | None = None, fragment: int = 0, chunks: int = CHUNKS
    ) -> list[Effect]:
        arrive = [Chunk(fragment, index, version=what) for index in range(chunks)]
        return self.hears(*arrive, Released(fragment, what, ledger or Ledger()))

    def holds(self, what: VersionId, ledger: Ledger | None = None, fragment: int = 0) -> None:
        self.happens(Hold(fragment, what, ledger or Ledger()))

    def breaks(self) -> Desk:
        """The connection breaks, and a new one comes up."""
        self.happens(Disconnected("It broke."))
        self.passes(LONGEST_BACKOFF_S)
        assert self.all(Open)
        return self.connects()


def desk(heartbeat_interval: float | None = None) -> Desk:
    dice = random.Random(1)
    session = Session(
        "me", MANIFEST, lambda: dice.getrandbits(64), heartbeat_interval=heartbeat_interval
    )
    made = Desk(session)
    made.happens(Start())
    return made


@pytest.fixture
def fresh() -> Desk:
    return desk()


@pytest.fixture
def ready() -> Desk:
    """A worker that has joined and holds version 0."""
    made = desk().connects().is_welcomed(version(0))
    made.receives(version(0))
    made.receives(version(0), fragment=FROZEN, chunks=1)
    made.holds(version(0))
    made.holds(version(0), fragment=FROZEN)
    made.effects = []
    return made


# Joining.


def test_join_is_sent_when_control_is_up_and_not_before(fresh: Desk) -> None:
    assert fresh.effects == [Open()]
    fresh.passes(60)
    assert not fresh.sent(Join)
    fresh.connects()
    (join,) = fresh.sent(Join)
    assert (join.worker_id, join.manifest, join.session, join.run) == ("me", MANIFEST, None, None)


def test_welcome_is_answered_with_credit_on_bulk_before_any_pull(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(0))
    sends = fresh.all(Send)
    assert sends[0] == Send(Credit(DOWNLOAD_WINDOW, b"\1" * 16), bulk=True)
    assert [(p.fragment, p.after) for p in fresh.sent(Pull)] == [(0, -1), (FROZEN, -1)]
    assert fresh.session.is_joined


def test_broker_that_asks_to_wait_is_asked_again_within_two_seconds(fresh: Desk) -> None:
    fresh.connects().hears(Error("id_taken", "Soon.", retry=True))
    assert [say.text for say in fresh.all(Say)] == ["Soon."]
    fresh.passes(LONGEST_BACKOFF_S)
    assert len(fresh.sent(Join)) == 1


def test_stopping_broker_is_asked_again_although_it_says_no(fresh: Desk) -> None:
    fresh.connects().hears(Error("stopping", "Bye.", retry=False))
    assert not fresh.all(JoinRefused)
    fresh.passes(LONGEST_BACKOFF_S)
    assert fresh.sent(Join)


def test_refusal_at_joining_is_final(fresh: Desk) -> None:
    fresh.connects().hears(Error("model_differs", "It lacks head."))
    assert fresh.effects == [JoinRefused("model_differs", "It lacks head.", final=True)]
    fresh.passes(10 * REFUSED_RETRY_S)
    assert not fresh.effects
    assert fresh.session.wakes_at(fresh.now) is None


def test_refusal_in_mid_run_is_tried_again_later(ready: Desk) -> None:
    ready.breaks().hears(Error("id_taken", "Another one is alive."))
    assert ready.effects == [JoinRefused("id_taken", "Another one is alive.", final=False)]
    ready.passes(REFUSED_RETRY_S / 2)
    assert not ready.sent(Join)
    ready.passes(REFUSED_RETRY_S / 2)
    assert ready.sent(Join)


def test_unanswered_join_is_given_up_for_new_connections(fresh: Desk) -> None:
    fresh.connects()
    fresh.passes(JOIN_PATIENCE_S)
    assert fresh.all(Close)
    fresh.passes(LONGEST_BACKOFF_S)
    assert fresh.all(Open)


def test_connections_that_break_again_and_again_are_opened_ever_slower(fresh: Desk) -> None:
    waits = []
    for _ in range(10):
        fresh.connects().happens(Disconnected("It broke."))
        opens_at = fresh.session.wakes_at(fresh.now)
        assert opens_at is not None
        waits.append(opens_at - fresh.now)
        fresh.passes(waits[-1])
        assert fresh.all(Open)
    assert waits == sorted(waits)
    assert waits[0] < 0.1
    assert waits[-1] == pytest.approx(LONGEST_BACKOFF_S)


@pytest.mark.parametrize(("interval", "accepted"), [(0.0, False), (30.0, False), (29.0, True)])
def test_heartbeat_interval_must_fit_what_the_broker_tolerates(
    interval: float, accepted: bool
) -> None:
    made = desk(heartbeat_interval=interval).connects().is_welcomed(version(0))
    assert made.session.is_joined is accepted
    if not accepted:
        (refusal,) = made.all(JoinRefused)
        assert refusal.final
        assert "heartbeat" in refusal.text
        assert made.sent(Leave), "the broker would wait for a worker that is not coming"


@pytest.mark.parametrize(
    "config", [RunConfig("async", 5), RunConfig("sync", 5, num_fragments=2, chunk_elements=10)]
)
def test_run_that_this_release_cannot_train_is_refused_with_a_sentence(config: RunConfig) -> None:
    made = desk().connects().is_welcomed(version(0), config=config)
    (refusal,) = made.all(JoinRefused)
    assert config.mode in refusal.text


def test_broker_that_comes_back_with_other_chunks_is_refused(ready: Desk) -> None:
    other = RunConfig("sync", 5, chunk_elements=20)
    ready.breaks().is_welcomed(version(0), config=other)
    (refusal,) = ready.all(JoinRefused)
    assert "chunk_elements 20" in refusal.text
    assert not refusal.final


# Heartbeats and silence.


def test_heartbeat_is_sent_at_a_third_of_what_the_broker_tolerates(ready: Desk) -> None:
    ready.hears(Notice("alive"))
    ready.passes(9.9)
    assert not ready.all(Beat)
    ready.passes(0.2)
    assert ready.all(Beat) == [Beat(b"\1" * 16, uploading=False)]


def test_ping_is_answered_at_once(ready: Desk) -> None:
    ready.hears(Notice("ping"))
    assert len(ready.all(Beat)) == 1


def test_heartbeats_can_be_turned_off() -> None:
    made = desk(heartbeat_interval=0.0).connects()
    made.is_welcomed(version(0), config=RunConfig("sync", 5, heartbeat_timeout=0.0))
    made.passes(10_000)
    assert made.session.is_joined
    assert not made.all(Beat)


def test_silent_broker_counts_as_a_broken_connection(ready: Desk) -> None:
    heard = ready.now
    while ready.session.is_joined:
        ready.passes(1.0)
        assert ready.now - heard < 40
    assert ready.all(Close)
    assert ready.now - heard >= 30


def test_broker_that_answers_heartbeats_is_never_given_up(ready: Desk) -> None:
    for _ in range(100):
        ready.passes(10.0)
        ready.hears(Notice("alive"))
        assert ready.session.is_joined


# Up.


def test_chunks_are_sent_within_credit_and_acks_give_it_back(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    (push,) = ready.sent(Push)
    assert push.session == b"\1" * 16
    assert not ready.chunks_sent
    ready.hears(Grant(77, 0, Standing.NEW, credit=3))
    assert ready.chunks_sent == [0, 1, 2]
    ready.hears(Ack(77, 0, (1,)))
    assert ready.chunks_sent == [3]
    ready.hears(Ack(77, 0, (0, 2)))
    assert ready.chunks_sent == [4, 5]
    assert not ready.sent(Commit)


def test_commit_follows_the_last_chunk_sent_and_is_sent_once(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.NEW, credit=CHUNKS))
    kinds = [type(e) if isinstance(e, SendChunk) else type(e.message) for e in _outgoing(ready)]
    assert kinds == [SendChunk] * CHUNKS + [Commit]
    ready.hears(*(Ack(77, 0, (index,)) for index in range(CHUNKS)))
    assert not ready.sent(Commit)
    assert ready.all(Uploaded) == [Uploaded(77)]


def _outgoing(made: Desk) -> list[Send | SendChunk]:
    return [effect for effect in made.effects if isinstance(effect, Send | SendChunk)]


def test_resumed_push_sends_only_what_is_missing(ready: Desk) -> None:
    held = Bitmap(CHUNKS)
    for index in (0, 1, 4, 9):
        held.add(index)
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.RESUME, held.to_bytes(), credit=CHUNKS))
    assert ready.chunks_sent == [2, 3, 5, 6, 7, 8]
    assert ready.sent(Commit)


def test_push_that_is_wholly_held_is_committed_at_once(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.RESUME, Bitmap.full(CHUNKS).to_bytes(), credit=8))
    assert not ready.chunks_sent
    assert ready.sent(Commit)


def test_push_that_must_wait_sends_nothing_until_the_next_grant(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.WAIT))
    assert not _outgoing(ready)
    ready.hears(Grant(77, 0, Standing.NEW, credit=2))
    assert ready.chunks_sent == [0, 1]


def test_counted_push_sends_nothing_and_is_over_with_the_version_that_names_it(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    (pull,) = ready.sent(Pull)
    assert pull.after == 0
    ready.hears(Grant(77, 0, Standing.COUNTED))
    assert not _outgoing(ready)
    ready.receives(version(1), whole(77))
    assert ready.all(Deliver)[0].counted == 77
    assert PushOver(77) in ready.effects


def test_bitmap_that_does_not_fit_is_said_aloud_and_sends_nothing(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.RESUME, b"\xff\xff\xff", credit=8))
    assert not ready.chunks_sent
    assert ready.all(Say)[0].trouble


def test_push_is_offered_again_as_it_was_after_a_broken_connection(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    (first,) = ready.sent(Push)
    ready.hears(Grant(77, 0, Standing.NEW, credit=4))
    ready.breaks()
    (join,) = ready.sent(Join)
    assert join.session == b"\1" * 16
    assert join.run == RUN
    assert join.versions == (version(0), version(0))
    ready.is_welcomed(version(0))
    (again,) = ready.sent(Push)
    assert (again.push_id, again.base, again.session) == (77, first.base, b"\2" * 16)
    assert not ready.chunks_sent, "credits of the old connection are void"
    ready.hears(Grant(77, 0, Standing.RESUME, Bitmap(CHUNKS, 0b101).to_bytes(), credit=2))
    assert ready.chunks_sent == [1, 3]
    assert (ready.session.pushes.retries, ready.session.reconnections) == (1, 1)


def test_push_made_while_away_is_offered_at_the_next_welcome(ready: Desk) -> None:
    ready.happens(Disconnected("It broke."), Offer(gradient()))
    assert not ready.sent(Push)
    ready.passes(LONGEST_BACKOFF_S)
    ready.connects().is_welcomed(version(0))
    assert [push.push_id for push in ready.sent(Push)] == [77]
    assert ready.session.pushes.retries == 0


def test_rejoin_opens_new_connections_and_keeps_the_push(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Rejoin("other epoch", "I do not know you."))
    assert ready.all(Close)
    ready.passes(LONGEST_BACKOFF_S)
    ready.connects().is_welcomed(version(0))
    assert [push.push_id for push in ready.sent(Push)] == [77]


def test_version_without_the_push_is_discarded_and_the_next_one_asked_for(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.receives(version(1), Ledger({"me": (Counted(77, b"\x07\x00"),)}))
    assert ready.all(Discard) == [Discard(0)]
    assert not ready.all(Deliver)
    assert [pull.after for pull in ready.sent(Pull)] == [1]
    ready.receives(version(2), whole(77))
    assert [deliver.counted for deliver in ready.all(Deliver)] == [77]


def test_push_of_another_worker_with_the_same_id_does_not_count(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.receives(version(1), whole(77, worker="somebody else"))
    assert not ready.all(Deliver)


def test_rejected_push_is_over(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.NEW, credit=2))
    ready.hears(Error("non_finite", "Chunk 1 has NaN.", push_id=77))
    assert ready.effects == [PushOver(77, "non_finite", "Chunk 1 has NaN.")]
    ready.hears(Ack(77, 0, (0,)))
    assert not ready.effects
    ready.breaks().is_welcomed(version(0))
    assert not ready.sent(Push)


def test_not_now_leaves_the_push_as_it_is_and_offers_it_again(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Error("no_model", "Later.", retry=True, push_id=77))
    assert not ready.all(PushOver)
    ready.passes(LONGEST_BACKOFF_S)
    assert [push.push_id for push in ready.sent(Push)] == [77]


def test_another_push_abandons_the_unfinished_one(ready: Desk) -> None:
    ready.happens(Offer(gradient(77)))
    ready.happens(Offer(gradient(78)))
    assert [over.push_id for over in ready.all(PushOver)] == [77]
    ready.hears(Grant(77, 0, Standing.NEW, credit=2))
    assert not ready.chunks_sent


@pytest.mark.parametrize(
    "event",
    [
        Offer(Push(b"", 5, 3, CHUNKS, "bf16")),
        Offer(Push(b"", 5, 0, CHUNKS, "bf16", purpose=Purpose.DONATION)),
        Want(9),
        Hold(9, version(1), Ledger()),
        Start(),
    ],
)
def test_command_that_cannot_be_meant_raises_and_changes_nothing(ready: Desk, event: Event) -> None:
    before = (
        ready.session.phase,
        dict(ready.session.pushes.uploads),
        dict(ready.session.pulls.held),
    )
    with pytest.raises(ValueError, match=r"fragment|only|once"):
        ready.session.handle(event, ready.now)
    after = (ready.session.phase, ready.session.pushes.uploads, ready.session.pulls.held)
    assert after == before


# Donating.


def test_fresh_worker_donates_parameters_without_a_base(fresh: Desk) -> None:
    fresh.connects().is_welcomed()
    fresh.hears(Notice("donate", fragment=0))
    (prepare,) = fresh.all(PrepareDonation)
    (push,) = fresh.sent(Push)
    assert prepare == PrepareDonation(push.push_id, 0)
    assert fresh.effects.index(prepare) < fresh.effects.index(Send(push))
    assert (push.purpose, push.base, push.wire_dtype) == (Purpose.DONATION, None, "fp32")


def test_worker_donates_the_version_it_holds_with_its_ledger(ready: Desk) -> None:
    ready.holds(version(4), whole(5))
    ready.breaks().is_welcomed()
    ready.hears(Notice("donate", fragment=0))
    (push,) = ready.sent(Push)
    assert (push.base, push.ledger) == (version(4), whole(5))


def test_donation_is_over_when_all_of_it_is_in(fresh: Desk) -> None:
    fresh.connects().is_welcomed()
    fresh.hears(Notice("donate", fragment=0))
    (push,) = fresh.sent(Push)
    fresh.hears(Grant(push.push_id, 0, Standing.NEW, credit=CHUNKS))
    assert fresh.chunks_sent == list(range(CHUNKS))
    fresh.hears(Ack(push.push_id, 0, tuple(range(CHUNKS))))
    assert PushOver(push.push_id) in fresh.effects


def test_donation_ends_with_its_connection(fresh: Desk) -> None:
    fresh.connects().is_welcomed()
    fresh.hears(Notice("donate", fragment=0))
    (push,) = fresh.sent(Push)
    fresh.happens(Disconnected("It broke."))
    assert PushOver(push.push_id) in fresh.effects


def test_refused_donor_goes_on_waiting_for_the_parameters_of_another(fresh: Desk) -> None:
    fresh.connects().is_welcomed()
    fresh.hears(Notice("donate", fragment=0))
    (push,) = fresh.sent(Push)
    fresh.hears(Error("not_allowed", "The run has others.", push_id=push.push_id, about="push"))
    assert fresh.effects == [PushOver(push.push_id), Say("The run has others.", trouble=True)]
    fresh.receives(version(0))
    assert [deliver.released.version for deliver in fresh.all(Deliver)] == [version(0)]


def test_donation_and_pseudo_gradient_are_under_way_together(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.breaks().is_welcomed()
    ready.hears(Error("no_model", "Later.", retry=True, push_id=77, about="push"))
    ready.hears(Notice("donate", fragment=0))
    (donation,) = ready.sent(Push)
    ready.passes(LONGEST_BACKOFF_S)
    assert [push.push_id for push in ready.sent(Push)] == [77]
    ready.hears(Grant(donation.push_id, 0, Standing.NEW, credit=1))
    assert ready.all(SendChunk)[0].push_id == donation.push_id


# Down.


@pytest.mark.parametrize("released_at", [0, 5, CHUNKS])
def test_version_is_delivered_once_chunks_and_released_are_here_in_any_order(
    fresh: Desk, released_at: int
) -> None:
    fresh.connects().is_welcomed(version(3))
    messages: list[Message] = [Chunk(0, i, version=version(3)) for i in range(CHUNKS)]
    random.Random(released_at).shuffle(messages)
    messages.insert(released_at, Released(0, version(3), Ledger()))
    for message in messages[:-1]:
        fresh.hears(message)
        assert not fresh.all(Deliver)
    fresh.hears(messages[-1])
    (delivered,) = fresh.all(Deliver)
    assert delivered.released.version == version(3)


def test_credit_goes_back_in_batches_and_for_every_chunk(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(3))
    given = 0
    for index in [*range(CHUNKS), 0, 0, 1, 1, 2, 2]:  # some of them twice
        fresh.hears(Chunk(0, index, version=version(3)))
        for credit in fresh.sent(Credit):
            assert credit.chunks == CREDIT_BATCH
            given += credit.chunks
    assert given == (CHUNKS + 6) // CREDIT_BATCH * CREDIT_BATCH


def test_chunk_that_came_twice_is_stored_once(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(3))
    fresh.hears(*[Chunk(0, 4, version=version(3))] * 3)
    assert fresh.all(Store) == [Store(0, 4)]


def test_chunks_of_another_version_begin_the_assembly_anew(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(3))
    fresh.hears(*(Chunk(0, index, version=version(3)) for index in range(CHUNKS - 1)))
    fresh.hears(Released(0, version(4), Ledger()))
    fresh.hears(Chunk(0, CHUNKS - 1, version=version(4)))
    assert fresh.effects[-2:] == [Begin(0, version(4)), Store(0, CHUNKS - 1)]
    assert not fresh.all(Deliver), "nine chunks of version 3 and one of version 4 are no version"
    fresh.receives(version(4))
    assert fresh.all(Deliver)[0].released.version == version(4)


def test_released_of_the_next_version_may_come_before_its_chunks(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(3))
    fresh.hears(Chunk(0, 0, version=version(3)), Released(0, version(4), Ledger()))
    fresh.hears(*(Chunk(0, index, version=version(4)) for index in range(CHUNKS)))
    assert [deliver.released.version for deliver in fresh.all(Deliver)] == [version(4)]


def test_download_goes_on_where_it_stopped(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(3))
    fresh.hears(*(Chunk(0, index, version=version(3)) for index in (0, 3)))
    fresh.breaks().is_welcomed(version(3))
    pull = fresh.sent(Pull)[0]
    assert pull.held_version == version(3)
    assert pull.held == Bitmap(CHUNKS, 0b1001).to_bytes()
    missing = [i for i in range(CHUNKS) if i not in (0, 3)]
    fresh.hears(*(Chunk(0, index, version=version(3)) for index in missing))
    fresh.hears(Released(0, version(3), Ledger()))
    assert fresh.all(Deliver)
    assert not fresh.all(Begin)


def test_chunk_that_nobody_waits_for_is_dropped(ready: Desk) -> None:
    ready.hears(Chunk(0, 0, version=version(9)))
    assert not ready.all(Store)


@pytest.mark.parametrize(
    "chunk", [Chunk(7, 0, version=version(1)), Chunk(0, CHUNKS, version=version(1)), Chunk(0, 0)]
)
def test_chunk_that_does_not_exist_is_said_aloud(fresh: Desk, chunk: Chunk) -> None:
    fresh.connects().is_welcomed(version(1))
    fresh.hears(chunk)
    assert fresh.all(Say)[0].trouble
    assert not fresh.all(Store)


def test_newer_version_is_asked_for_after_coming_back(ready: Desk) -> None:
    ready.breaks().is_welcomed(version(6))
    assert [(pull.fragment, pull.after) for pull in ready.sent(Pull)] == [(0, -1)]


def test_frozen_parameters_come_once(ready: Desk) -> None:
    ready.breaks().is_welcomed(version(6), version(6, tag=99))
    assert [pull.fragment for pull in ready.sent(Pull)] == [0]


def test_version_held_is_kept_while_the_broker_is_behind(ready: Desk) -> None:
    ready.holds(version(6))
    ready.breaks().is_welcomed(version(2))
    assert not ready.sent(Pull)


def test_push_on_a_broker_that_went_back_waits_for_its_next_version(ready: Desk) -> None:
    ready.holds(version(6))
    ready.happens(Offer(gradient(base=6)))
    ready.breaks().is_welcomed(version(2, tag=99))
    assert [pull.after for pull in ready.sent(Pull)] == [-1]
    ready.receives(version(2, tag=99))
    assert [pull.after for pull in ready.sent(Pull)] == [2]
    ready.receives(version(3, tag=98), whole(77))
    assert ready.all(Deliver)[0].counted == 77


def test_asking_for_the_newest_costs_no_chunk_when_it_is_held(ready: Desk) -> None:
    ready.happens(Want(0))
    (pull,) = ready.sent(Pull)
    assert (pull.after, pull.held_version) == (-1, version(0))
    assert pull.held == Bitmap.full(CHUNKS).to_bytes()
    ready.hears(Released(0, version(0), Ledger()))
    (delivered,) = ready.all(Deliver)
    assert delivered.unchanged


def test_asking_for_the_newest_takes_a_newer_one(ready: Desk) -> None:
    ready.happens(Want(0))
    ready.receives(version(1))
    (delivered,) = ready.all(Deliver)
    assert not delivered.unchanged
    assert delivered.released.version == version(1)


def test_newest_is_delivered_even_if_chunks_of_the_next_one_were_under_way(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.happens(Want(0))
    ready.hears(Chunk(0, 0, version=version(1)))  # was on its way when we asked
    ready.hears(Released(0, version(0), Ledger()))
    assert [deliver.unchanged for deliver in ready.all(Deliver)] == [True]
    assert [pull.after for pull in ready.sent(Pull)] == [0], "the push is still waited for"


def test_version_that_was_asked_for_is_delivered_although_it_lacks_the_push(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.happens(Want(0))
    ready.receives(version(1))
    assert [deliver.counted for deliver in ready.all(Deliver)] == [None]
    ready.receives(version(2), whole(77))
    assert [deliver.counted for deliver in ready.all(Deliver)] == [77]


def test_pull_that_was_refused_is_sent_again_after_a_second(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(0))
    fresh.hears(Error("no_model", "Nobody has provided parameters yet.", retry=True, about="pull"))
    fresh.passes(1.1)
    assert {pull.fragment for pull in fresh.sent(Pull)} == {0, FROZEN}


# Notices, asking, leaving.


def test_shutdown_is_told(ready: Desk) -> None:
    ready.hears(Notice("shutdown", "SIGTERM."))
    assert ready.effects == [Stopping("SIGTERM.")]


def test_leaving_is_told_to_the_broker_and_ends_the_session(ready: Desk) -> None:
    ready.happens(Depart("done"))
    assert ready.sent(Leave) == [Leave(b"\1" * 16, "done")]
    assert ready.happens(Disconnected("It broke."), Tick()) == []


def test_leaving_without_having_joined_says_nothing(fresh: Desk) -> None:
    fresh.happens(Depart())
    assert not fresh.effects
    assert fresh.session.phase is Phase.LEFT


def test_action_is_answered_once(ready: Desk) -> None:
    ready.happens(Ask(1, "status"))
    assert ready.sent(Control) == [Control("status", 1)]
    answer = Result(1, True, "fine", {"a": 1})
    ready.hears(answer, answer)
    assert ready.effects == [Answered(1, True, "fine", {"a": 1})]


def test_action_that_may_have_been_carried_out_is_never_sent_twice(ready: Desk) -> None:
    ready.happens(Ask(1, "shutdown"), Ask(2, "status"))
    ready.breaks()
    assert not ready.sent(Control)
    ready.is_welcomed(version(0))
    assert [control.action for control in ready.sent(Control)] == ["status"]


def test_unanswered_action_is_told_when_the_connection_breaks(ready: Desk) -> None:
    ready.happens(Ask(1, "shutdown"))
    ready.happens(Disconnected("It broke."))
    (answered,) = ready.all(Answered)
    assert (answered.request, answered.ok) == (1, None)


def test_action_that_was_withdrawn_is_not_sent_later(ready: Desk) -> None:
    ready.happens(Disconnected("It broke."), Ask(1, "shutdown"), Withdraw(1))
    ready.passes(LONGEST_BACKOFF_S)
    ready.connects().is_welcomed(version(0))
    assert not ready.sent(Control)


def test_observer_pulls_with_credit_and_without_joining() -> None:
    observer = Desk(Session("eye", None, lambda: 0))
    observer.happens(Start(), Connected())
    assert not observer.sent(Join)
    observer.happens(Observe(MANIFEST, CONFIG), Want(0), Want(FROZEN))
    pulls = observer.sent(Pull)
    assert [(pull.session, pull.credit) for pull in pulls] == [(None, DOWNLOAD_WINDOW), (None, 0)]
    observer.receives(version(5))
    assert observer.all(Deliver)
    assert all(credit.session is None for credit in observer.sent(Credit))


@pytest.mark.parametrize("message", [Heartbeat(b"", 1), Join("x", MANIFEST), Commit(b"", 1, 0)])
def test_message_that_only_workers_send_is_said_aloud(ready: Desk, message: Message) -> None:
    ready.hears(message)
    assert [say.trouble for say in ready.all(Say)] == [True]


# All at once.


class LoyalBroker:
    """The least broker that keeps the specification: one worker, a round for each push.

    Counts every chunk of every push into versions, so that a test can ask what was counted how often.
    """

    def __init__(self, made: Desk, dice: random.Random) -> None:
        self.desk = made
        self.dice = dice
        self.at = 0
        self.ledger = Ledger()
        self.held: dict[int, Bitmap] = {}
        self.counted: Counter[tuple[int, int]] = Counter()
        self.queue: list[Message] = []
        self.pulls: dict[int, Pull] = {}
        self.credit = 0

    def takes(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Close):
                self.queue.clear()
                self.pulls.clear()
                self.credit = 0
            elif isinstance(effect, SendChunk):
                self._chunk(effect)
            elif isinstance(effect, Send):
                self._message(effect.message)

    def _chunk(self, effect: SendChunk) -> None:
        held = self.held[effect.push_id]
        if effect.index not in held:
            held.add(effect.index)
            self.counted[effect.push_id, effect.index] += 1
        self.queue.append(Ack(effect.push_id, 0, (effect.index,)))
        if held.is_full and not self.ledger.names_whole("me", effect.push_id):
            self.at += 1
            self.ledger = self.ledger.with_push("me", effect.push_id, held)
            self._serve()

    def _message(self, message: Message) -> None:
        if isinstance(message, Push):
            push_id = message.push_id
            if self.ledger.names_whole("me", push_id):
                self.queue.append(Grant(push_id, 0, Standing.COUNTED))
                return
            held = self.held.setdefault(push_id, Bitmap(CHUNKS))
            standing = Standing.RESUME if held else Standing.NEW
            self.queue.append(Grant(push_id, 0, standing, held.to_bytes(), credit=3))
        elif isinstance(message, Pull):
            self.pulls[message.fragment] = message
            self._serve()

    def _serve(self) -> None:
        pull = self.pulls.get(0)
        if pull is None or self.at <= pull.after:
            return
        del self.pulls[0]
        have = Bitmap(CHUNKS)
        if pull.held is not None and pull.held_version == version(self.at):
            have = Bitmap.from_bytes(pull.held, CHUNKS)
        chunks = [Chunk(0, index, version=version(self.at)) for index in have.missing()]
        messages: list[Message] = [*chunks, Released(0, version(self.at), self.ledger)]
        self.dice.shuffle(messages)
        self.queue += messages


@pytest.mark.parametrize("seed", range(30))
def test_every_chunk_counts_once_whatever_breaks(seed: int) -> None:
    dice = random.Random(seed)
    made = desk().connects().is_welcomed(version(0))
    made.receives(version(0))
    made.holds(version(0))
    made.receives(version(0), fragment=FROZEN, chunks=1)
    made.holds(version(0), fragment=FROZEN)
    broker = LoyalBroker(made, dice)
    pushed, delivered = 0, 0
    broker.takes(made.happens(Offer(gradient(1000))))
    for _ in range(3000):
        if dice.random() < 0.02:
            broker.takes(made.happens(Disconnected("It broke.")))
            broker.takes(made.passes(LONGEST_BACKOFF_S))
            broker.takes(made.happens(Connected()))
            made.is_welcomed(version(broker.at))
            broker.takes(made.effects)
        elif broker.queue:
            effects = made.hears(broker.queue.pop(0))
            broker.takes(effects)
            for effect in made.all(Deliver):
                if effect.counted is not None:
                    delivered += 1
                    assert effect.counted == 1000 + pushed
                    made.holds(effect.released.version, effect.released.ledger)
                    pushed += 1
                    push = gradient(1000 + pushed, base=effect.released.version.counter)
                    broker.takes(made.happens(Offer(push)))
    assert delivered > 10
    assert set(broker.counted.values()) == {1}
    assert broker.at in (delivered, delivered + 1)
