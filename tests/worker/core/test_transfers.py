"""What the worker's session does with pushes, donations and pulls: a fake clock, no socket."""

from __future__ import annotations

import random

import pytest

from diloco_protocol import (
    Bitmap,
    Counted,
    Ledger,
)
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
from diloco_worker.core.downloads import CREDIT_BATCH
from diloco_worker.core.effects import (
    Beat,
    BeginVersion,
    Close,
    Deliver,
    PrepareDonation,
    PushOver,
    Say,
    Send,
    SendChunk,
    StoreChunk,
)
from diloco_worker.core.events import Disconnected, Event, Offer, Prepared, RequestVersion, Start
from diloco_worker.core.timeouts import LONGEST_BACKOFF_S
from kit.session_harness import CHUNKS, FROZEN, RUN, Desk, gradient, version, whole

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
    assert is_in(ready)


def is_in(made: Desk) -> bool:
    return made.session.uploads.by_id[77].is_in


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
    upload = ready.session.uploads.by_id[77]
    assert (upload.is_in, upload.is_put_off) == (False, True)
    ready.hears(Grant(77, 0, Standing.NEW, credit=2))
    assert ready.chunks_sent == [0, 1]
    assert (upload.is_in, upload.is_put_off) == (False, False)


def test_push_that_loses_its_place_forgets_what_was_sent_and_sends_all_of_it_again(
    ready: Desk,
) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.NEW, credit=3), Ack(77, 0, (0,)))
    assert ready.chunks_sent == [0, 1, 2, 3]
    ready.hears(Grant(77, 0, Standing.WAIT), Ack(77, 0, tuple(range(CHUNKS))))
    assert not ready.effects[1:], "an ack of what was sent before is void"
    ready.hears(Grant(77, 0, Standing.NEW, credit=CHUNKS))
    assert ready.chunks_sent == list(range(CHUNKS))
    assert ready.sent(Commit)
    ready.hears(Ack(77, 0, tuple(range(CHUNKS))))
    assert is_in(ready)


def test_push_that_loses_its_place_when_all_of_it_is_in_sends_it_again(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.NEW, credit=CHUNKS), Ack(77, 0, tuple(range(CHUNKS))))
    ready.hears(Grant(77, 0, Standing.WAIT), Grant(77, 0, Standing.NEW, credit=CHUNKS))
    assert ready.chunks_sent == list(range(CHUNKS))
    assert ready.sent(Commit)


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
    assert (ready.session.uploads.retries, ready.session.connection.reconnections) == (1, 1)


def test_push_that_was_in_is_not_so_at_a_broker_that_has_not_said_it(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.NEW, credit=CHUNKS), Ack(77, 0, tuple(range(CHUNKS))))
    assert is_in(ready)
    ready.breaks().is_welcomed(version(0))
    assert not is_in(ready)
    ready.hears(Grant(77, 0, Standing.RESUME, Bitmap.full(CHUNKS).to_bytes(), credit=8))
    assert is_in(ready)


def test_push_made_while_away_is_offered_at_the_next_welcome(ready: Desk) -> None:
    ready.happens(Disconnected("It broke."), Offer(gradient()))
    assert not ready.sent(Push)
    ready.passes(LONGEST_BACKOFF_S)
    ready.connects().is_welcomed(version(0))
    assert [push.push_id for push in ready.sent(Push)] == [77]
    assert ready.session.uploads.retries == 0


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
        RequestVersion(9),
        Start(),
    ],
)
def test_command_that_cannot_be_meant_raises_and_changes_nothing(ready: Desk, event: Event) -> None:
    before = (
        ready.session.phase,
        dict(ready.session.uploads.by_id),
        dict(ready.session.downloads.held),
    )
    with pytest.raises(ValueError, match=r"fragment|only|once"):
        ready.session.handle(event, ready.now)
    after = (ready.session.phase, ready.session.uploads.by_id, ready.session.downloads.held)
    assert after == before


# Donating.


def test_fresh_worker_donates_parameters_without_a_base(fresh: Desk) -> None:
    fresh.connects().is_welcomed()
    fresh.hears(Notice("donate", fragment=0))
    (prepare,) = fresh.all(PrepareDonation)
    (push,) = fresh.sent(Push)
    assert prepare == PrepareDonation(push.push_id, 0)
    assert (push.purpose, push.base, push.wire_dtype) == (Purpose.DONATION, None, "fp32")


def test_parameters_are_offered_first_and_copied_then(fresh: Desk) -> None:
    """To copy a large model takes longer than the broker waits for an offer."""
    fresh.connects().is_welcomed()
    fresh.hears(Notice("donate", fragment=0))
    (prepare,), (push,) = fresh.all(PrepareDonation), fresh.sent(Push)
    assert fresh.effects.index(Send(push)) < fresh.effects.index(prepare)
    fresh.hears(Grant(push.push_id, 0, Standing.NEW, credit=4))
    assert not fresh.chunks_sent
    fresh.passes(10.0)
    beats = fresh.all(Beat)
    assert [beat.uploading for beat in beats] == [True], "it is at it, and says so"
    fresh.happens(Prepared(push.push_id))
    assert fresh.chunks_sent == [0, 1, 2, 3]


def test_copy_that_is_ready_before_the_grant_waits_for_it(fresh: Desk) -> None:
    fresh.connects().is_welcomed()
    fresh.hears(Notice("donate", fragment=0))
    (push,) = fresh.sent(Push)
    fresh.happens(Prepared(push.push_id))
    assert not fresh.chunks_sent
    fresh.hears(Grant(push.push_id, 0, Standing.NEW, credit=4))
    assert fresh.chunks_sent == [0, 1, 2, 3]


def test_copy_that_nobody_wants_any_more_is_dropped(fresh: Desk) -> None:
    fresh.connects().is_welcomed()
    fresh.hears(Notice("donate", fragment=0))
    (push,) = fresh.sent(Push)
    fresh.hears(Error("not_allowed", "Another was asked.", push_id=push.push_id, about="push"))
    assert not fresh.happens(Prepared(push.push_id))


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
    fresh.happens(Prepared(push.push_id))
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


def test_donation_that_broke_off_goes_on_under_its_push_id(ready: Desk) -> None:
    ready.breaks().is_welcomed()
    ready.hears(Notice("donate", fragment=0))
    (push,) = ready.sent(Push)
    ready.breaks().is_welcomed()
    ready.hears(Notice("donate", fragment=0))
    (again,) = ready.sent(Push)
    assert (again.push_id, again.base) == (push.push_id, version(0))
    ready.holds(version(4))
    ready.breaks().is_welcomed()
    ready.hears(Notice("donate", fragment=0))
    (other,) = ready.sent(Push)
    assert other.base == version(4)
    assert other.push_id != push.push_id, "other values are another donation"


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
    ready.happens(Prepared(donation.push_id))
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
    assert fresh.all(StoreChunk) == [StoreChunk(0, 4)]


def test_chunks_of_another_version_begin_the_assembly_anew(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(3))
    fresh.hears(*(Chunk(0, index, version=version(3)) for index in range(CHUNKS - 1)))
    fresh.hears(Released(0, version(4), Ledger()))
    fresh.hears(Chunk(0, CHUNKS - 1, version=version(4)))
    assert fresh.effects[-2:] == [BeginVersion(0, version(4)), StoreChunk(0, CHUNKS - 1)]
    assert not fresh.all(Deliver), "nine chunks of version 3 and one of version 4 are no version"
    fresh.receives(version(4))
    assert fresh.all(Deliver)[0].released.version == version(4)


def test_released_survives_chunks_of_an_older_version_that_come_after_it(fresh: Desk) -> None:
    """They were under way on the other connection when this reader was moved to the newer version."""
    fresh.connects().is_welcomed(version(3))
    fresh.hears(Released(0, version(4), Ledger()), Chunk(0, 0, version=version(3)))
    fresh.hears(*(Chunk(0, index, version=version(4)) for index in range(CHUNKS)))
    assert [deliver.released.version for deliver in fresh.all(Deliver)] == [version(4)]


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
    assert not fresh.all(BeginVersion)


def test_chunk_that_nobody_waits_for_is_dropped(ready: Desk) -> None:
    ready.hears(Chunk(0, 0, version=version(9)))
    assert not ready.all(StoreChunk)


@pytest.mark.parametrize(
    "chunk", [Chunk(7, 0, version=version(1)), Chunk(0, CHUNKS, version=version(1)), Chunk(0, 0)]
)
def test_chunk_that_does_not_exist_is_said_aloud(fresh: Desk, chunk: Chunk) -> None:
    fresh.connects().is_welcomed(version(1))
    fresh.hears(chunk)
    assert fresh.all(Say)[0].trouble
    assert not fresh.all(StoreChunk)


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


def at_version(made: Desk, counter: int) -> Desk:
    """It has received this version and holds it."""
    made.happens(RequestVersion(0))
    made.receives(version(counter))
    made.holds(version(counter))
    return made


@pytest.mark.parametrize("first", ["push", "welcome"])
def test_push_at_a_broker_that_went_back_asks_for_what_comes_after_its_version(
    ready: Desk, first: str
) -> None:
    at_version(ready, 6)
    if first == "push":
        ready.happens(Offer(gradient(base=6)))
    ready.breaks().is_welcomed(version(2, tag=99))
    if first == "welcome":
        ready.happens(Offer(gradient(base=6)))
    assert [pull.after for pull in ready.sent(Pull)] == [2]
    ready.receives(version(3, tag=98), whole(76))
    assert [pull.after for pull in ready.sent(Pull)] == [3], "it lacks the push"
    ready.receives(version(4, tag=97), whole(77))
    assert ready.all(Deliver)[0].counted == 77
    ready.happens(Offer(gradient(78, base=4)))
    assert [pull.after for pull in ready.sent(Pull)] == [4]


def test_push_at_a_broker_that_came_back_with_nothing_asks_for_anything(ready: Desk) -> None:
    at_version(ready, 6).happens(Offer(gradient(base=6)))
    ready.breaks().is_welcomed()
    assert [pull.after for pull in ready.sent(Pull)] == [-1]


def test_version_that_counted_the_push_while_the_connection_was_broken_is_asked_for(
    ready: Desk,
) -> None:
    at_version(ready, 6)
    ready.breaks().is_welcomed(version(2, tag=99))
    ready.happens(Offer(gradient(base=6)))
    ready.breaks().is_welcomed(version(3, tag=98))
    assert [pull.after for pull in ready.sent(Pull)] == [2]
    ready.receives(version(3, tag=98), whole(77))
    assert ready.all(Deliver)[0].counted == 77


def test_newest_of_a_broker_that_went_back_is_not_waited_for(ready: Desk) -> None:
    at_version(ready, 6)
    ready.breaks().is_welcomed(version(2, tag=99))
    ready.happens(RequestVersion(0))
    assert [pull.after for pull in ready.sent(Pull)] == [-1]


def test_asking_for_the_newest_costs_no_chunk_when_it_is_held(ready: Desk) -> None:
    ready.happens(RequestVersion(0))
    (pull,) = ready.sent(Pull)
    assert (pull.after, pull.held_version) == (-1, version(0))
    assert pull.held == Bitmap.full(CHUNKS).to_bytes()
    ready.hears(Released(0, version(0), Ledger()))
    (delivered,) = ready.all(Deliver)
    assert delivered.unchanged


def test_asking_for_the_newest_takes_a_newer_one(ready: Desk) -> None:
    ready.happens(RequestVersion(0))
    ready.receives(version(1))
    (delivered,) = ready.all(Deliver)
    assert not delivered.unchanged
    assert delivered.released.version == version(1)


def test_newest_is_delivered_even_if_chunks_of_the_next_one_were_under_way(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.happens(RequestVersion(0))
    ready.hears(Chunk(0, 0, version=version(1)))  # was on its way when we asked
    ready.hears(Released(0, version(0), Ledger()))
    assert [deliver.unchanged for deliver in ready.all(Deliver)] == [True]
    assert [pull.after for pull in ready.sent(Pull)] == [0], "the push is still waited for"


def test_version_that_was_asked_for_is_delivered_although_it_lacks_the_push(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.happens(RequestVersion(0))
    ready.receives(version(1))
    assert [deliver.counted for deliver in ready.all(Deliver)] == [None]
    ready.receives(version(2), whole(77))
    assert [deliver.counted for deliver in ready.all(Deliver)] == [77]


def test_pull_that_was_refused_is_sent_again_after_a_second(fresh: Desk) -> None:
    fresh.connects().is_welcomed(version(0))
    fresh.hears(Error("no_model", "Nobody has provided parameters yet.", retry=True, about="pull"))
    fresh.passes(1.1)
    assert {pull.fragment for pull in fresh.sent(Pull)} == {0, FROZEN}
