"""The session's handling of pushes, seeding and pulls: a simulated clock, no socket."""

import random
from copy import deepcopy

import pytest

from diloco_protocol import Bitmap, Counted, Ledger, VersionId
from diloco_protocol.messages import (
    Ack,
    Chunk,
    Commit,
    Credit,
    Error,
    Grant,
    Join,
    Message,
    Notice,
    Pull,
    Purpose,
    Push,
    Rejoin,
    Released,
    Standing,
)
from diloco_worker.session.connection import LONGEST_BACKOFF_S
from diloco_worker.session.downloads import CREDIT_BATCH
from diloco_worker.session.effects import (
    Beat,
    BeginVersion,
    Close,
    Deliver,
    PrepareSeeding,
    PushOver,
    Say,
    Send,
    SendChunk,
    StoreChunk,
)
from diloco_worker.session.events import (
    Disconnected,
    Event,
    Followed,
    Offer,
    Prepared,
    Received,
    RequestVersion,
    Spoilt,
    Start,
)
from kit.session_harness import CHUNKS, FROZEN, RUN, Desk, gradient, version, whole

ALL = tuple(range(CHUNKS))


@pytest.fixture
def offered(ready: Desk) -> Desk:
    """It has offered push 77, on version 0."""
    ready.happens(Offer(gradient()))
    return ready


def is_in(made: Desk) -> bool:
    return made.session.uploads.by_id[77].is_in


def _outgoing(made: Desk) -> list[Send | SendChunk]:
    return [effect for effect in made.effects if isinstance(effect, Send | SendChunk)]


def test_chunks_are_sent_within_credit_and_acks_return_it(offered: Desk) -> None:
    assert [push.session for push in offered.sent(Push)] == [b"\1" * 16]
    assert not offered.chunks_sent
    offered.hears(Grant(77, 0, Standing.NEW, credit=3))
    assert offered.chunks_sent == [0, 1, 2]
    offered.hears(Ack(77, 0, (1,)))
    assert offered.chunks_sent == [3]
    offered.hears(Ack(77, 0, (0, 2)))
    assert offered.chunks_sent == [4, 5]
    assert not offered.sent(Commit)


@pytest.mark.parametrize(("held", "missing"), [(0b1000010011, [2, 3, 5, 6, 7, 8]), (1023, [])])
def test_resumed_push_sends_missing_chunks(offered: Desk, held: int, missing: list[int]) -> None:
    bitmap = Bitmap(CHUNKS, held).to_bytes()
    offered.hears(Grant(77, 0, Standing.RESUME, bitmap, credit=CHUNKS))
    assert offered.chunks_sent == missing
    assert offered.sent(Commit)
    assert is_in(offered) == (not missing)


def test_waiting_push_sends_nothing_until_the_next_grant(offered: Desk) -> None:
    offered.hears(Grant(77, 0, Standing.WAIT))
    assert not _outgoing(offered)
    upload = offered.session.uploads.by_id[77]
    assert (upload.is_in, upload.is_put_off) == (False, True)
    offered.hears(Grant(77, 0, Standing.NEW, credit=2))
    assert offered.chunks_sent == [0, 1]
    assert (upload.is_in, upload.is_put_off) == (False, False)


@pytest.mark.parametrize("credit", [3, CHUNKS])
def test_push_whose_grant_is_revoked_sends_all_chunks_again(offered: Desk, credit: int) -> None:
    offered.hears(Grant(77, 0, Standing.NEW, credit=credit), Ack(77, 0, ALL[: credit - 2]))
    offered.hears(Grant(77, 0, Standing.WAIT), Ack(77, 0, ALL))
    assert not offered.effects[1:], "earlier acks are void"
    offered.hears(Grant(77, 0, Standing.NEW, credit=CHUNKS))
    assert offered.chunks_sent == list(ALL)
    kinds = [type(e) if isinstance(e, SendChunk) else type(e.message) for e in _outgoing(offered)]
    assert kinds == [SendChunk] * CHUNKS + [Commit]
    offered.hears(*(Ack(77, 0, (index,)) for index in ALL))
    assert not offered.sent(Commit), "it is sent once"
    assert is_in(offered)


def test_counted_push_sends_nothing_and_ends_with_the_version_that_names_it(offered: Desk) -> None:
    assert [pull.after for pull in offered.sent(Pull)] == [0]
    offered.hears(Grant(77, 0, Standing.COUNTED))
    assert not _outgoing(offered)
    offered.receives(version(1), whole(77))
    assert offered.all(Deliver)[0].counted == 77
    assert PushOver(77) in offered.effects


@pytest.mark.parametrize("event", [Disconnected("It broke."), Received(Rejoin("other epoch"))])
def test_push_is_offered_again_unchanged_on_new_connections(offered: Desk, event: Event) -> None:
    (first,) = offered.sent(Push)
    offered.hears(Grant(77, 0, Standing.NEW, credit=CHUNKS), Ack(77, 0, ALL))
    assert is_in(offered)
    offered.happens(event)
    assert offered.all(Close)
    offered.passes(LONGEST_BACKOFF_S)
    (join,) = offered.connects().sent(Join)
    assert join.session == b"\1" * 16
    assert join.run == RUN
    assert join.versions == (version(0), version(0))
    offered.is_welcomed(version(0))
    (again,) = offered.sent(Push)
    assert (again.push_id, again.base, again.session) == (77, first.base, b"\2" * 16)
    assert not offered.chunks_sent, "credits of the old connection are void"
    offered.hears(Grant(77, 0, Standing.RESUME, Bitmap(CHUNKS, 0b101).to_bytes(), credit=2))
    assert offered.chunks_sent == [1, 3]
    assert not is_in(offered)
    assert (offered.session.uploads.retries, offered.session.connection.reconnections) == (1, 1)


def test_push_made_while_away_is_offered_at_the_next_welcome(ready: Desk) -> None:
    ready.happens(Disconnected("It broke."), Offer(gradient()))
    assert not ready.sent(Push)
    ready.passes(LONGEST_BACKOFF_S)
    ready.connects().is_welcomed(version(0))
    assert [push.push_id for push in ready.sent(Push)] == [77]
    assert ready.session.uploads.retries == 0


@pytest.mark.parametrize(
    "ledger",
    [Ledger({"me": (Counted(77, b"\x07\x00"),)}), whole(77, worker="another")],
    ids=["a part of it", "of another worker"],
)
def test_version_without_the_push_is_not_delivered(offered: Desk, ledger: Ledger) -> None:
    offered.receives(version(1), ledger)
    assert not offered.all(Deliver)
    assert [pull.after for pull in offered.sent(Pull)] == [1]
    offered.receives(version(2), whole(77))
    assert [deliver.counted for deliver in offered.all(Deliver)] == [77]


def test_rejected_push_ends(offered: Desk) -> None:
    offered.hears(Grant(77, 0, Standing.NEW, credit=2))
    offered.hears(Error("non_finite", "Chunk 1 has NaN.", push_id=77))
    assert offered.effects == [PushOver(77, "non_finite", "Chunk 1 has NaN.")]
    offered.hears(Ack(77, 0, (0,)))
    assert not offered.effects
    offered.breaks().is_welcomed(version(0))
    assert not offered.sent(Push)


def test_malformed_bitmap_is_ignored_and_logged(offered: Desk) -> None:
    offered.hears(Grant(77, 0, Standing.RESUME, b"\xff\xff\xff", credit=8))
    assert not offered.chunks_sent
    assert offered.all(Say)[0].trouble
    offered.hears(Grant(77, 0, Standing.NEW, credit=2))
    offered.hears(Error("non_finite", "Chunk 1 has NaN.", push_id=77, counted=bytes(16)))
    (over,) = offered.all(PushOver)
    assert over.counted is None and [said.trouble for said in offered.all(Say)] == [True]


def test_another_push_abandons_the_unfinished_one(offered: Desk) -> None:
    offered.happens(Offer(gradient(78)))
    assert [over.push_id for over in offered.all(PushOver)] == [77]
    offered.hears(Grant(77, 0, Standing.NEW, credit=2))
    assert not offered.chunks_sent


@pytest.mark.parametrize(
    "event",
    [
        Offer(Push(b"", 5, 3, CHUNKS, "bf16")),
        Offer(Push(b"", 5, 0, CHUNKS, "bf16", purpose=Purpose.SEEDING)),
        RequestVersion(9),
        Start(),
    ],
)
def test_invalid_command_raises_and_changes_nothing(ready: Desk, event: Event) -> None:
    session = ready.session

    def state() -> object:
        return deepcopy((session.phase, session.uploads.by_id, session.downloads.by_fragment))

    before = state()
    with pytest.raises(ValueError, match=r"fragment|only|once"):
        session.handle(event, ready.now)
    assert state() == before


@pytest.fixture
def asked(fresh: Desk) -> Desk:
    """It has joined a run without parameters, and the broker asks for its own."""
    fresh.connects().is_welcomed()
    fresh.hears(Notice("seed", fragment=0))
    return fresh


def seeding(made: Desk) -> Push:
    (push,) = made.sent(Push)
    return push


def test_seeding_push_is_offered_before_the_model_is_copied(asked: Desk) -> None:
    """Copying a large model takes longer than the broker waits for an offer."""
    push = seeding(asked)
    assert (push.purpose, push.base, push.wire_dtype) == (Purpose.SEEDING, None, "fp32")
    assert asked.effects[-2:] == [Send(push), PrepareSeeding(push.push_id, 0)]
    asked.hears(Grant(push.push_id, 0, Standing.NEW, credit=4))
    assert not asked.chunks_sent
    asked.passes(10.0)
    assert [beat.uploading for beat in asked.all(Beat)] == [True], "heartbeats say that it uploads"
    asked.happens(Prepared(push.push_id))
    assert asked.chunks_sent == [0, 1, 2, 3]


def test_seeding_push_copied_early_waits_for_its_grant(asked: Desk) -> None:
    push = seeding(asked)
    asked.happens(Prepared(push.push_id))
    assert not asked.chunks_sent
    asked.hears(Grant(push.push_id, 0, Standing.NEW, credit=CHUNKS))
    assert asked.chunks_sent == list(ALL)
    asked.hears(Ack(push.push_id, 0, ALL))
    assert PushOver(push.push_id) in asked.effects


def test_rejected_seed_worker_drops_its_copy_and_waits_for_other_parameters(asked: Desk) -> None:
    push = seeding(asked)
    asked.hears(Error("not_allowed", "The run has others.", push_id=push.push_id, about="push"))
    assert asked.effects == [PushOver(push.push_id), Say("The run has others.", trouble=True)]
    assert not asked.happens(Prepared(push.push_id))
    asked.receives(version(0))
    assert [deliver.released.version for deliver in asked.all(Deliver)] == [version(0)]


def test_seeding_push_ends_with_its_connection(asked: Desk) -> None:
    push = seeding(asked)
    asked.happens(Disconnected("It broke."))
    assert PushOver(push.push_id) in asked.effects


def seeds_again(made: Desk) -> Push:
    """Its connection breaks, and the broker asks for the held version."""
    made.breaks().is_welcomed()
    made.hears(Notice("seed", fragment=0))
    return seeding(made)


def test_held_version_seeds_with_its_ledger_under_one_push_id(ready: Desk) -> None:
    push, again = seeds_again(ready), seeds_again(ready)
    assert (again.push_id, again.base) == (push.push_id, version(0))
    ready.holds(version(4), whole(5))
    other = seeds_again(ready)
    assert (other.base, other.ledger) == (version(4), whole(5))
    assert other.push_id != push.push_id, "other values are another push"


def test_seeding_push_and_pseudo_gradient_are_in_flight_together(offered: Desk) -> None:
    offered.breaks().is_welcomed()
    offered.hears(Error("no_model", "Later.", retry=True, push_id=77, about="push"))
    assert not offered.all(PushOver)
    offered.hears(Notice("seed", fragment=0))
    push = seeding(offered)
    offered.happens(Prepared(push.push_id))
    offered.passes(LONGEST_BACKOFF_S)
    assert [push.push_id for push in offered.sent(Push)] == [77]
    offered.hears(Grant(push.push_id, 0, Standing.NEW, credit=1))
    assert offered.all(SendChunk)[0].push_id == push.push_id


@pytest.mark.parametrize("released_at", [0, 5, CHUNKS])
def test_version_is_delivered_once_all_messages_arrived(fresh: Desk, released_at: int) -> None:
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


def test_credit_is_returned_in_batches_and_each_chunk_stored_once(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(3))
    given, stored = [], []
    for index in [*ALL, 0, 0, 1, 1, 2, 2]:  # some of them twice
        fresh.hears(Chunk(0, index, version=version(3)))
        given += [credit.chunks for credit in fresh.sent(Credit)]
        stored += fresh.all(StoreChunk)
    assert given == [CREDIT_BATCH] * ((CHUNKS + 6) // CREDIT_BATCH)
    assert stored == [StoreChunk(0, index) for index in ALL]


@pytest.mark.parametrize("released_first", [True, False])
def test_released_survives_chunks_of_an_older_version(fresh: Desk, released_first: bool) -> None:
    """They were in flight on the other connection when this reader was moved to the newer version."""
    fresh.connects().is_welcomed(version(3))
    released, older = Released(0, version(4), Ledger()), Chunk(0, 0, version=version(3))
    fresh.hears(*((released, older) if released_first else (older, released)))
    fresh.hears(*(Chunk(0, index, version=version(4)) for index in ALL))
    assert [deliver.released.version for deliver in fresh.all(Deliver)] == [version(4)]


def test_chunks_of_another_version_restart_the_assembly(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(3))
    fresh.hears(*(Chunk(0, index, version=version(3)) for index in range(CHUNKS - 1)))
    fresh.hears(Released(0, version(4), Ledger()))
    fresh.hears(Chunk(0, CHUNKS - 1, version=version(4)))
    assert fresh.effects[-2:] == [BeginVersion(0, version(4)), StoreChunk(0, CHUNKS - 1)]
    assert not fresh.all(Deliver), "chunks of two versions are not a version"
    fresh.receives(version(4))
    assert fresh.all(Deliver)[0].released.version == version(4)


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
    assert not fresh.all(BeginVersion)


@pytest.mark.parametrize(
    "chunk", [Chunk(7, 0, version=version(1)), Chunk(0, CHUNKS, version=version(1)), Chunk(0, 0)]
)
def test_nonexistent_chunk_is_logged(fresh: Desk, chunk: Chunk) -> None:
    fresh.connects().is_welcomed(version(1))
    fresh.hears(chunk)
    assert fresh.all(Say)[0].trouble
    assert not fresh.all(StoreChunk)


def at_version(made: Desk, counter: int) -> Desk:
    """It has received this version and holds it."""
    made.happens(RequestVersion(0))
    made.receives(version(counter))
    made.holds(version(counter))
    return made


OFFER, RESTORED = Offer(gradient(base=6)), version(2, tag=99)


@pytest.mark.parametrize(
    ("held", "before", "theirs", "after", "pulls"),
    [
        (0, [], [version(6)], [], [-1]),
        (0, [], [version(6), version(6, tag=99)], [], [-1]),  # frozen parameters come once
        (6, [], [version(2)], [], []),  # it is behind, and may request the held one
        (6, [OFFER], [RESTORED], [], [2]),
        (6, [], [RESTORED], [OFFER], [2]),
        (6, [OFFER], [], [], [-1]),  # it has nothing at all
        (6, [], [RESTORED], [RequestVersion(0)], [-1]),  # its newest version is wanted
    ],
)
def test_missing_version_is_requested_after_a_reconnect(
    ready: Desk,
    held: int,
    before: list[Event],
    theirs: list[VersionId],
    after: list[Event],
    pulls: list[int],
) -> None:
    at_version(ready, held).happens(*before)
    ready.breaks().is_welcomed(*theirs)
    if after:
        ready.happens(*after)
    assert [(pull.fragment, pull.after) for pull in ready.sent(Pull)] == [(0, at) for at in pulls]
    ready.hears(Chunk(0, 0, version=version(9)))
    assert len(ready.all(StoreChunk)) == len(pulls), "an unrequested chunk is dropped"


def test_push_at_a_restored_broker_waits_for_a_version_with_it(ready: Desk) -> None:
    at_version(ready, 6).happens(OFFER)
    ready.breaks().is_welcomed(RESTORED)
    ready.receives(version(3, tag=98), whole(76))
    assert [pull.after for pull in ready.sent(Pull)] == [3], "it lacks the push"
    ready.receives(version(4, tag=97), whole(77))
    assert ready.all(Deliver)[0].counted == 77
    ready.happens(Offer(gradient(78, base=4)))
    assert [pull.after for pull in ready.sent(Pull)] == [4]


def test_version_that_counted_the_push_while_disconnected_is_requested(ready: Desk) -> None:
    at_version(ready, 6)
    ready.breaks().is_welcomed(version(2, tag=99))
    ready.happens(Offer(gradient(base=6)))
    ready.breaks().is_welcomed(version(3, tag=98))
    assert [pull.after for pull in ready.sent(Pull)] == [2]
    ready.receives(version(3, tag=98), whole(77))
    assert ready.all(Deliver)[0].counted == 77


def test_requesting_the_newest_version_costs_no_chunk_when_it_is_held(ready: Desk) -> None:
    ready.happens(RequestVersion(0))
    (pull,) = ready.sent(Pull)
    assert (pull.after, pull.held_version) == (-1, version(0))
    assert pull.held == Bitmap.full(CHUNKS).to_bytes()
    ready.hears(Released(0, version(0), Ledger()))
    (delivered,) = ready.all(Deliver)
    assert delivered.unchanged
    ready.happens(RequestVersion(0))
    ready.receives(version(1))
    (newer,) = ready.all(Deliver)
    assert (newer.unchanged, newer.released.version) == (False, version(1))


def test_newest_is_delivered_even_if_chunks_of_the_next_are_in_flight(offered: Desk) -> None:
    offered.happens(RequestVersion(0))
    offered.hears(Chunk(0, 0, version=version(1)))  # sent before our request
    offered.hears(Released(0, version(0), Ledger()))
    assert [deliver.unchanged for deliver in offered.all(Deliver)] == [True]
    assert [pull.after for pull in offered.sent(Pull)] == [0], "the push is still pending"


def test_requested_version_is_delivered_although_it_lacks_the_push(offered: Desk) -> None:
    offered.happens(RequestVersion(0))
    offered.receives(version(1))
    assert [deliver.counted for deliver in offered.all(Deliver)] == [None]
    offered.receives(version(2), whole(77))
    assert [deliver.counted for deliver in offered.all(Deliver)] == [77]


def test_refused_pull_is_retried_after_a_second(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(0))
    fresh.hears(Error("no_model", "Nobody has provided parameters yet.", retry=True, about="pull"))
    fresh.passes(1.1)
    assert {pull.fragment for pull in fresh.sent(Pull)} == {0, FROZEN}


@pytest.mark.parametrize("is_good", [True, False])
def test_version_of_differences_needs_matching_checksums(ready: Desk, is_good: bool) -> None:
    ready.session.downloads.set_reply("int8")
    ready.happens(Offer(gradient()))
    ready.hears(Released(0, version(1), Ledger({"me": (Counted(77),)})))
    for index in range(CHUNKS):
        assert not ready.all(Deliver)
        ready.hears(Chunk(0, index, version=version(1), delta_of=version(0), parts=(4,)))
        ready.happens(Followed(0) if is_good or index < CHUNKS - 1 else Spoilt(0))
    assert bool(ready.all(Deliver)) == is_good
    assert not is_good or not ready.sent(Pull)
    assert is_good or [pull.delta_of for pull in ready.sent(Pull)] == [None]


def test_mismatched_copy_is_fetched_complete_once(ready: Desk) -> None:
    """A worker of several processes hears of each chunk that was in flight to them."""
    ready.session.downloads.set_reply("int8")
    ready.happens(Offer(gradient()))
    ready.happens(Spoilt(0))
    (pull,) = ready.sent(Pull)
    assert pull.delta_of is None and pull.held is None
    ready.hears(Chunk(0, 0, version=version(1)))
    assert ready.all(StoreChunk)
    ready.happens(Spoilt(0), Spoilt(0))
    assert not ready.sent(Pull) and not ready.all(Say)
    ready.hears(*[Chunk(0, index, version=version(1)) for index in range(1, CHUNKS)])
    ready.hears(Released(0, version(1), Ledger({"me": (Counted(77),)})))
    assert ready.all(Deliver), "chunks of the complete version are kept"
    ready.happens(Spoilt(0))
    assert ready.all(Say), "a complete version is trusted, and may be doubted again"
