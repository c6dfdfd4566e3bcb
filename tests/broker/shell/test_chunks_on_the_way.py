"""Readers that keep old versions in the broker's memory: who is ended, and who may take their time."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_broker.core.versions.fragment import OLD_VERSIONS_KEPT
from diloco_broker.core.versions.readers import MAX_OBSERVER_CREDIT
from diloco_broker.shell.chunks_on_the_way import (
    STRANGERS_MAY_KEEP,
    ChunksOnTheWay,
    Piece,
    end_keepers_of_old,
)

CHUNK = 2 << 20
NEWEST = 10
OLD = NEWEST - OLD_VERSIONS_KEPT - 1


@dataclass
class Reader:
    chunks: ChunksOnTheWay = field(default_factory=ChunksOnTheWay)
    is_shut: bool = False

    def shut(self) -> None:
        self.is_shut = True


def a_reader(*counters: int, chunks: int = MAX_OBSERVER_CREDIT, since: float = 1.0) -> Reader:
    """A connection that was sent this number of chunks of each version, and has read none."""
    reader, sent = Reader(), 0
    for counter in counters:
        for index in range(chunks):
            reader.chunks.add(sent, sent + CHUNK, Piece(0, index, counter))
            sent += CHUNK
    reader.chunks.see(0, since)
    return reader


def ended(*readers: Reader) -> list[bool]:
    end_keepers_of_old(readers, {0: NEWEST})
    return [each.is_shut for each in readers]


def test_versions_that_the_broker_keeps_itself_cost_nothing() -> None:
    assert not any(
        ended(*(a_reader(each) for each in (NEWEST, NEWEST - 1, OLD + 1) for _ in "123"))
    )


def test_readers_of_one_old_version_keep_it_once() -> None:
    assert not any(ended(*(a_reader(OLD) for _ in range(30))))


def test_who_waits_longest_is_ended_first_and_no_more_than_must_be() -> None:
    third = STRANGERS_MAY_KEEP // CHUNK // 3
    waits = (9.0, 7.0, 8.0, 6.0, 10.0)
    readers = [a_reader(OLD - n, chunks=third, since=since) for n, since in enumerate(waits)]
    assert ended(*readers) == [False, True, False, True, False]


def test_what_another_keeps_too_is_not_won_by_ending_one() -> None:
    chunks = STRANGERS_MAY_KEEP // CHUNK
    readers = [a_reader(OLD, since=1.0), a_reader(OLD, OLD - 1, chunks=chunks, since=2.0)]
    readers += [a_reader(OLD - 2, chunks=1, since=3.0)]
    assert ended(*readers) == [True, True, False]


def test_one_reader_alone_may_take_its_time() -> None:
    assert ended(a_reader(OLD, OLD - 1)) == [False]


def test_what_was_read_is_kept_no_more() -> None:
    reader = a_reader(OLD, since=1.0)
    reader.chunks.see(CHUNK // 2, 2.0)
    assert sum(reader.chunks.old({0: NEWEST}).values()) == MAX_OBSERVER_CREDIT * CHUNK
    assert reader.chunks.left == MAX_OBSERVER_CREDIT * CHUNK - CHUNK // 2
    reader.chunks.see(CHUNK, 3.0)
    assert sum(reader.chunks.old({0: NEWEST}).values()) == (MAX_OBSERVER_CREDIT - 1) * CHUNK
    assert reader.chunks.waits_since == 1.0
    reader.chunks.see(MAX_OBSERVER_CREDIT * CHUNK, 4.0)
    assert not reader.chunks.old({0: NEWEST}) and reader.chunks.left == 0
