"""The session of a worker of several processes: the chunks that the others send and receive."""

import pytest

from diloco_protocol import Bitmap, Ledger
from diloco_protocol.messages import (
    Ack,
    Chunk,
    Commit,
    Credit,
    Grant,
    Join,
    Lane,
    Notice,
    Push,
    Released,
    Standing,
)
from diloco_worker.session.downloads import DOWNLOAD_WINDOW
from diloco_worker.session.effects import (
    BeginVersion,
    Deliver,
    OpenLanes,
    PrepareSeeding,
    Say,
    SendChunk,
    StoreChunk,
)
from diloco_worker.session.events import (
    ArrivedElsewhere,
    Offer,
    Prepared,
    Received,
    ShareOut,
    Start,
)
from diloco_worker.session.session import Session
from kit.session_harness import CHUNKS, FROZEN, MANIFEST, Desk, gradient, version, whole

# Process 1 owns the odd chunks, and the frozen one.
OWNERS = (tuple(index % 2 for index in range(CHUNKS)), (1,))


def of_two() -> Desk:
    """A worker of two processes on its first connection, not welcomed yet."""
    draws = iter(range(1, 100))
    made = Desk(Session(Join("me", MANIFEST, processes=2), lambda: next(draws)))
    made.happens(Start())
    return made.connects()


@pytest.fixture
def ready() -> Desk:
    """It holds version 0, and the chunks are shared out."""
    made = of_two().is_welcomed(version(0))
    made.happens(ShareOut(OWNERS))
    for index in range(CHUNKS):
        arrives(made, index, 0)
    made.hears(Released(0, version(0), Ledger()))
    made.happens(ArrivedElsewhere(Chunk(FROZEN, 0, version=version(0, 9))))
    made.hears(Released(FROZEN, version(0, 9), Ledger()))
    return made


def arrives(made: Desk, index: int, counter: int) -> None:
    """A chunk of a version, at the process that owns it."""
    chunk = Chunk(0, index, version=version(counter))
    made.happens(ArrivedElsewhere(chunk) if index % 2 else Received(chunk))


def test_lanes_open_once_the_owners_are_known() -> None:
    made = of_two().is_welcomed(version(0))
    assert not made.sent(Credit)
    assert not made.sent(Lane)
    made.happens(ShareOut(OWNERS))
    (own,) = made.sent(Lane)
    (others,) = made.all(OpenLanes)
    assert [lane.index for lane in (own, *others.bindings)] == [0, 1]
    shares = [Bitmap.from_bytes(lane.shares[0], CHUNKS) for lane in (own, *others.bindings)]
    assert [list(share) for share in shares] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert {lane.credit for lane in (own, *others.bindings)} == {DOWNLOAD_WINDOW}


def test_version_is_complete_when_every_process_has_its_chunks(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    for index in range(CHUNKS - 1):
        arrives(ready, index, 1)
        assert [e.index for e in ready.all(StoreChunk)] == ([] if index % 2 else [index])
    ready.hears(Released(0, version(1), whole(77)))
    assert not ready.all(Deliver)
    ready.happens(ArrivedElsewhere(Chunk(0, CHUNKS - 1, version=version(1))))
    (delivered,) = ready.all(Deliver)
    assert delivered.counted == 77


def test_chunks_of_an_older_version_after_a_newer_one_are_dropped(ready: Desk) -> None:
    """Each lane is in order; one may lag behind the others."""
    ready.happens(Offer(gradient()))
    ready.hears(Chunk(0, 0, version=version(2)))
    assert ready.all(BeginVersion)
    ready.happens(ArrivedElsewhere(Chunk(0, 1, version=version(1))))
    assert not ready.all(BeginVersion)
    for index in range(1, CHUNKS):
        arrives(ready, index, 2)
        assert not ready.all(BeginVersion)
    ready.hears(Released(0, version(2), whole(77)))
    assert ready.all(Deliver)


def test_restored_broker_is_believed_on_a_new_connection(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Chunk(0, 0, version=version(5)))
    ready.breaks().is_welcomed(version(1))
    ready.hears(Chunk(0, 0, version=version(2)))
    assert ready.all(BeginVersion), "versions only rise on one connection; this is another"


def test_each_lane_has_its_own_credit(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.NEW, None, 2))
    assert [(e.index, e.lane) for e in ready.all(SendChunk)] == [(0, 0), (2, 0), (1, 1), (3, 1)]
    ready.hears(Ack(77, 0, (1,)))
    assert [(e.index, e.lane) for e in ready.all(SendChunk)] == [(5, 1)]
    ready.hears(Ack(77, 0, (0,), credit=1, lane=1))
    assert [(e.index, e.lane) for e in ready.all(SendChunk)] == [(4, 0), (7, 1)]
    ready.hears(Ack(77, 0, (2, 3, 4, 5, 7)))
    assert ready.sent(Commit), "the last chunk of every lane was sent"


def test_push_that_is_offered_again_asks_each_lane_for_what_is_missing(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.NEW, None, 9))
    ready.breaks().is_welcomed(version(0))
    assert [lane.index for lane in ready.all(OpenLanes)[0].bindings] == [1]
    assert ready.sent(Push)
    held = Bitmap(CHUNKS, 0b1111111)
    ready.hears(Grant(77, 0, Standing.RESUME, held.to_bytes(), 9))
    assert [(e.index, e.lane) for e in ready.all(SendChunk)] == [(8, 0), (7, 1), (9, 1)]


def test_early_seeding_request_waits_until_the_owners_are_known() -> None:
    made = of_two().is_welcomed()
    made.hears(Notice("seed", fragment=0))
    assert not made.sent(Push)
    made.happens(ShareOut(OWNERS))
    (offer,) = made.sent(Push)
    assert made.all(PrepareSeeding)
    made.hears(Grant(offer.push_id, 0, Standing.NEW, None, 1))
    made.happens(Prepared(offer.push_id))
    assert [(e.index, e.lane) for e in made.all(SendChunk)] == [(0, 0), (1, 1)]


def test_chunk_of_another_process_is_dropped_and_shares_are_final(ready: Desk) -> None:
    ready.happens(Offer(gradient()))
    ready.hears(Chunk(0, 1, version=version(1)))
    assert "does not own" in ready.all(Say)[0].text
    assert not ready.all(StoreChunk)
    with pytest.raises(ValueError, match="shared out once"):
        ready.happens(ShareOut(OWNERS))
