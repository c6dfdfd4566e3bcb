"""Connections that cost more than they may are ended; those that work are left alone."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from diloco_broker.core.versions.fragment import OLD_VERSIONS_KEPT
from diloco_broker.core.versions.readers import MAX_OBSERVER_CREDIT
from diloco_broker.shell import connection_watch as limits
from diloco_broker.shell.chunks_on_the_way import (
    UNAUTHENTICATED_MAY_KEEP,
    ChunksOnTheWay,
    end_keepers_of_old,
)
from diloco_broker.shell.connection_watch import Connection, ConnectionWatch
from diloco_broker.shell.tcp_figures import Descriptor, TcpFigures
from diloco_protocol.relays import Piece
from diloco_protocol.roles import Peer, Role
from diloco_protocol.version import VersionId

A = b"route of a"


def a_piece(index: int, counter: int) -> Piece:
    return Piece(0, index, VersionId("0" * 16, counter, 0), None)


@dataclass
class Wire(Descriptor):
    """A connection of the system whose counters a test sets."""

    taken: int = 0
    delivered: int = 1  # Linux counts the first packet of a connection
    unsent: int = 0
    is_shut: bool = False

    def figures(self) -> TcpFigures:
        return TcpFigures(self.taken, self.delivered, self.unsent)

    def shut(self) -> None:
        self.is_shut = True


@dataclass
class Watching:
    """A watch on one connection, with a clock."""

    wire: Wire = field(default_factory=Wire)
    now: float = 100.0
    watch: ConnectionWatch = field(default_factory=ConnectionWatch)

    def __post_init__(self) -> None:
        self.watch.opened(7, self.wire)

    def named(self) -> Connection:
        return self.watch.by_route.get(A) or self.watch.name(A, 7, None)

    def sends_chunk(self, size: int) -> None:
        self.watch.sent_chunk(self.named(), size, a_piece(0, 0))

    def looks(self, *members: bytes) -> list[str]:
        """Two looks; between them each connection has its turn, so the second sees all bytes."""
        return [*self.look(*members), *self.look(*members)]

    def look(self, *members: bytes, turns: int = limits.EVERYBODY) -> list[str]:
        self.now += limits.EVERYBODY_EVERY_S
        self.watch.turns += turns
        return self.watch.look(members, self.now)


@pytest.fixture
def on() -> Watching:
    return Watching()


@pytest.fixture
def looks_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks have a share of the time, and how long one takes here depends on the machine."""
    monkeypatch.setattr("time.thread_time", lambda: 0.0)


@pytest.mark.parametrize(
    ("watch", "members", "may_owe"),
    [
        pytest.param(ConnectionWatch, (), limits.UNAUTHENTICATED_MAY_OWE, id="peer"),
        pytest.param(
            ConnectionWatch, (A,), limits.MEMBERS_MAY_OWE, id="member, which sends chunks"
        ),
        pytest.param(
            lambda: ConnectionWatch(limits.READERS_MAY_OWE), (), limits.READERS_MAY_OWE, id="feed"
        ),
    ],
)
def test_message_that_does_not_end_is_cut_off(
    watch: Callable[[], ConnectionWatch], members: tuple[bytes, ...], may_owe: int
) -> None:
    on = Watching(watch=watch())
    if members:
        on.named().heard = on.wire.taken = 1000
        assert on.looks(*members) == []
    on.wire.taken += may_owe
    assert on.looks(*members) == []
    on.wire.taken += 1
    (why,) = on.looks(*members)
    assert on.wire.is_shut
    assert "65 KiB" in why or may_owe != limits.UNAUTHENTICATED_MAY_OWE


def test_complete_messages_are_not_limited(on: Watching) -> None:
    for _ in range(2_000):
        on.wire.taken += 10 * limits.UNAUTHENTICATED_MAY_OWE
        on.named().heard += 10 * limits.UNAUTHENTICATED_MAY_OWE
        assert on.looks() == []


def test_message_that_does_not_end_counts_from_where_it_can_have_begun(on: Watching) -> None:
    on.wire.taken = on.named().heard = limits.UNAUTHENTICATED_MAY_OWE
    assert on.looks() == []
    for _ in range(2):  # behind a message that was whole
        on.wire.taken += limits.UNAUTHENTICATED_MAY_OWE // 2
        assert on.looks() == []
    on.wire.taken += 1
    assert len(on.looks()) == 1


def test_reader_that_does_not_read_is_cut_off(on: Watching) -> None:
    on.named()
    on.looks()
    on.named().sent += 100
    on.wire.unsent = 100
    on.looks()
    on.now += limits.READS_WITHIN_S
    (why,) = on.looks()
    assert "10 s" in why


CHUNK = 2 << 20


def test_chunks_in_flight_to_a_slow_observer_are_limited_apart_from_answers(on: Watching) -> None:
    on.named()
    on.looks()
    on.named().sent += 50
    for _ in range(MAX_OBSERVER_CREDIT):
        on.sends_chunk(CHUNK)
    on.wire.unsent = 4000
    for _ in range(100):
        on.wire.delivered += CHUNK // 10
        on.sends_chunk(CHUNK // 10)
        assert on.looks() == []
    assert on.named().chunks.left > limits.UNAUTHENTICATED_MAY_LEAVE > on.named().left
    on.named().sent += limits.UNAUTHENTICATED_MAY_LEAVE + 60
    on.wire.delivered += 10
    (why,) = on.looks()
    assert "8 MiB" in why


def test_chunks_past_all_credit_end_a_connection(on: Watching) -> None:
    on.named()
    on.looks()
    on.wire.unsent = 4000
    for _ in range(limits.UNAUTHENTICATED_MAY_LEAVE_OF_CHUNKS // CHUNK):
        on.sends_chunk(CHUNK)
    assert on.looks() == []
    on.sends_chunk(CHUNK)
    (why,) = on.looks()
    assert "70 MiB" in why


def test_member_that_never_reads_is_given_up_and_one_that_reads_is_not(on: Watching) -> None:
    on.sends_chunk(CHUNK)
    on.wire.unsent = 4000
    for _ in range(50):
        on.now += limits.MEMBERS_READ_WITHIN_S - 1
        on.wire.delivered += 1
        assert on.looks(A) == []
    on.now += limits.MEMBERS_READ_WITHIN_S
    (why,) = on.looks(A)
    assert "300 s" in why


def test_protocol_overhead_of_zeromq_does_not_add_up(on: Watching) -> None:
    on.named()
    for _ in range(10_000):
        on.named().sent += 1000
        on.wire.delivered += 1009
        on.looks()
        on.looks()
    assert not on.wire.is_shut
    on.named().sent += 1000
    on.wire.unsent = 1009
    on.looks()
    on.now += limits.READS_WITHIN_S
    assert len(on.looks()) == 1


def test_members_may_leave_more_and_take_their_time(on: Watching) -> None:
    on.named().sent += limits.MEMBERS_MAY_LEAVE
    on.wire.unsent = 4000
    on.now += 1000
    assert on.looks(A) == on.looks(A) == []
    on.named().sent += 4000
    assert len(on.looks(A)) == 1


def test_waiting_complete_messages_are_not_an_endless_one(on: Watching) -> None:
    """A turn takes one of each connection: of one that sends many at once the others wait."""
    size, number = limits.UNAUTHENTICATED_MAY_OWE // 2, 20
    on.named()
    on.wire.taken = number * size
    for _ in range(number):
        on.named().heard += size
        assert on.look(turns=6) == []
    assert on.look(turns=6) == on.look(turns=6) == []
    on.wire.taken += limits.UNAUTHENTICATED_MAY_OWE + 1  # what does not end is seen behind them
    assert len(on.look(turns=6) + on.look(turns=6)) == 1


def test_message_that_does_not_end_is_seen_while_others_send_without_a_pause(on: Watching) -> None:
    on.named()
    on.wire.taken += limits.UNAUTHENTICATED_MAY_OWE + 1
    found = [why for _ in range(10) for why in on.look(turns=1)]
    assert len(found) == 1


@pytest.mark.usefixtures("looks_cost_nothing")
def test_peer_that_sends_bytes_is_inspected_within_a_millisecond(on: Watching) -> None:
    on.looks()
    assert on.watch.next_look > on.now + 10 * limits.UNAUTHENTICATED_EVERY_S
    found: list[str] = []
    while not found:
        on.watch.stirred([7])
        on.wire.taken += limits.UNAUTHENTICATED_MAY_OWE // 2
        on.now = on.watch.next_look
        on.watch.turns += limits.EVERYBODY
        found = on.watch.look((), on.now)
    assert on.now < 100.3 + 5 * limits.UNAUTHENTICATED_EVERY_S


def test_descriptors_of_unauthenticated_peers_are_polled() -> None:
    polled: set[int] = set()

    def poll(number: int, flags: int) -> None:
        (polled.add if flags else polled.discard)(number)

    watch = ConnectionWatch(poll=poll)
    for number in (7, 8):
        watch.opened(number, Wire())
    assert polled == {7, 8}
    watch.name(A, 7, None)
    watch.look({A}, 1.0)
    assert polled == {8}
    watch.closed(8)
    assert polled == set()
    watch.look(set(), 2.0)
    assert polled == {7}, "it has left the run"


@dataclass
class Crowd:
    """Connections of peers that have not joined; `shut`: the numbers of those that were ended."""

    wires: list[Wire]
    watch: ConnectionWatch = field(default_factory=ConnectionWatch)

    def __post_init__(self) -> None:
        for number, wire in enumerate(self.wires):
            self.watch.opened(number, wire)

    def looks(self) -> list[int]:
        for second in (1.0, 2.0):
            self.watch.turns += limits.EVERYBODY
            self.watch.look((), second)
        return self.shut

    @property
    def shut(self) -> list[int]:
        return [number for number, wire in enumerate(self.wires) if wire.is_shut]


OWES, LEAVES = limits.UNAUTHENTICATED_MAY_OWE, limits.UNAUTHENTICATED_MAY_LEAVE


@pytest.mark.parametrize(
    ("wire", "most"),
    [
        (Wire(taken=OWES), limits.ALL_UNAUTHENTICATED_MAY_OWE // OWES),
        (Wire(unsent=LEAVES), limits.ALL_UNAUTHENTICATED_MAY_LEAVE // LEAVES),
    ],
)
def test_oldest_peers_go_where_all_cost_too_much(wire: Wire, most: int) -> None:
    crowd = Crowd([replace(wire) for _ in range(most + 3)])
    assert crowd.looks() == [0, 1, 2]


def test_of_too_many_unauthenticated_peers_the_oldest_goes() -> None:
    crowd = Crowd([Wire() for _ in range(limits.MOST_UNAUTHENTICATED + 2)])
    crowd.watch.name(A, 0, None)
    assert len(crowd.watch.look({A}, 1.0)) == 1
    assert crowd.shut == [1]


def test_of_too_many_unauthenticated_peers_those_go_first_that_were_not_let_in() -> None:
    crowd = Crowd([Wire() for _ in range(limits.MOST_UNAUTHENTICATED + 2)])
    # Greeting, CURVE's welcome, its end: whose key is let in.
    crowd.wires[0].delivered = 64 + 170 + 100
    crowd.wires[1].delivered = 64 + 170  # who knows the broker's public key, and has none itself
    assert len(crowd.watch.look((), 1.0)) == 2
    assert crowd.shut == [1, 2]


def test_revoked_key_ends_its_connections_and_unnamed_ones() -> None:
    crowd = Crowd([Wire() for _ in range(3)])
    w0, w1 = Peer(Role.WORKER, "w0"), Peer(Role.WORKER, "w1")
    crowd.watch.name(b"0", 0, w0)
    crowd.watch.name(b"1", 1, w1)
    crowd.watch.shut_those_of({w0})
    assert crowd.shut == [0, 2]


def test_message_left_by_a_connection_that_is_gone_belongs_to_no_other(on: Watching) -> None:
    on.named()
    assert on.watch.name(b"older", 7, None).transport is None  # the number is in use again
    on.watch.closed(7)
    assert on.watch.by_route.get(A) is None
    late = on.watch.name(A, 7, None)
    late.see(on.now, limits.EVERYBODY, 2)
    assert late.too_much(is_member=False, may_owe=0, now=on.now) is None


def test_name_given_by_what_came_late_of_another_is_corrected(on: Watching) -> None:
    late = on.watch.name(b"gone", 7, None)  # had the same number, and its message waited
    late.heard += limits.UNAUTHENTICATED_MAY_OWE
    on.wire.taken = 1000
    assert on.watch.name(A, 7, None).transport is None, "it may be this one that waited"
    on.watch.turns += limits.EVERYBODY
    mine = on.watch.name(A, 7, None)
    assert on.watch.by_route.get(A) is mine
    assert mine.transport is on.wire
    assert on.watch.by_route.get(b"gone") is None
    assert on.watch.name(b"other", 7, None).transport is None, "now it is sure"
    on.wire.taken += limits.UNAUTHENTICATED_MAY_OWE + 1
    assert len(on.looks()) == 1


def test_end_that_was_meant_for_a_connection_that_is_gone_ends_no_other(on: Watching) -> None:
    """Twenty messages of noise wait, and their connection's number is in use again."""
    on.watch.name(b"gone", 7, None)
    on.watch.end(b"gone")
    assert not on.wire.is_shut
    on.watch.turns += limits.EVERYBODY
    mine = on.watch.name(A, 7, None)
    assert on.watch.by_route.get(A) is mine
    assert not on.wire.is_shut
    on.watch.end(b"gone")
    assert not on.wire.is_shut


def test_end_comes_with_the_next_message_where_the_name_was_not_sure(on: Watching) -> None:
    connection = on.named()
    on.watch.end(A)
    on.watch.turns += limits.EVERYBODY
    too_early = on.wire.is_shut
    assert on.watch.name(A, 7, None) is connection
    assert (too_early, on.wire.is_shut) == (False, True)


def test_late_message_of_an_ended_connection_names_no_other(on: Watching) -> None:
    drawn, again = b"\0drawn", Wire()
    on.watch.turns += limits.EVERYBODY
    on.watch.name(drawn, 7, None)
    on.watch.end(drawn)
    assert on.wire.is_shut
    on.watch.closed(7)
    on.watch.opened(7, again)
    late = on.watch.name(drawn, 7, None)
    assert (late.transport, late.is_ended) == (None, True)
    on.watch.has_received_all()
    on.watch.end(drawn)
    assert not again.is_shut


def test_name_that_was_of_another_number_is_taken_back(on: Watching) -> None:
    other = Wire()
    wrong = on.watch.name(b"b", 7, None)
    on.watch.opened(8, other)
    on.watch.turns += limits.EVERYBODY
    right = on.watch.name(b"b", 8, None)
    assert on.watch.by_route.get(b"b") is right
    assert wrong.route is None
    on.watch.end(b"b")
    assert (other.is_shut, on.wire.is_shut) == (True, False)


def test_flood_of_connections_gets_no_more_looks_than_their_share() -> None:
    watch = ConnectionWatch(most_unauthenticated=1)
    for number in range(3):
        watch.opened(number, Wire())
    assert len(watch.look((), 1.0)) == 2
    watch.opened(3, Wire())
    assert watch.look((), 1.0) == []
    assert watch.next_look <= 1.0 + limits.EVERYBODY_EVERY_S


@pytest.mark.usefixtures("looks_cost_nothing")
def test_readers_that_keep_old_versions_in_memory_are_ended_but_for_the_last() -> None:
    watch, now, wires = ConnectionWatch(), 0.0, [Wire(unsent=4000) for _ in range(30)]
    for number, wire in enumerate(wires):
        watch.opened(number, wire)
        watch.sent_chunk(watch.name(b"%d" % number, number, None), 4 << 20, a_piece(0, number))
        now += limits.EVERYBODY_EVERY_S
        for each in wires:  # a trickle
            each.delivered += 1
        watch.look((), now)
    kept = [number for number, wire in enumerate(wires) if not wire.is_shut]
    in_broker = OLD_VERSIONS_KEPT + 1
    assert kept == list(range(30 - in_broker - UNAUTHENTICATED_MAY_KEEP // (4 << 20), 30))


# Readers that keep old versions in the broker's memory: who is ended, and who may take their time.

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
            reader.chunks.add(sent, sent + CHUNK, a_piece(index, counter))
            sent += CHUNK
    reader.chunks.see(0, since)
    return reader


MOST = UNAUTHENTICATED_MAY_KEEP // CHUNK  # chunks


@pytest.mark.parametrize(
    ("readers", "ended"),
    [
        pytest.param(
            [a_reader(each) for each in (NEWEST, NEWEST - 1, OLD + 1) for _ in "123"],
            [],
            id="versions that the broker keeps itself cost nothing",
        ),
        pytest.param([a_reader(OLD) for _ in range(30)], [], id="of one version they keep it once"),
        pytest.param([a_reader(OLD, OLD - 1)], [], id="one alone may take its time"),
        pytest.param(
            [
                a_reader(OLD - n, chunks=MOST // 3, since=since)
                for n, since in enumerate((9.0, 7.0, 8.0, 6.0, 10.0))
            ],
            [1, 3],
            id="who waits longest is ended first, and no more than must be",
        ),
        pytest.param(
            [
                a_reader(OLD, since=1.0),
                a_reader(OLD, OLD - 1, chunks=MOST, since=2.0),
                a_reader(OLD - 2, chunks=1, since=3.0),
            ],
            [0, 1],
            id="what another keeps too is not won by ending one",
        ),
    ],
)
def test_keepers_of_old_versions_are_ended(readers: list[Reader], ended: list[int]) -> None:
    end_keepers_of_old(readers, {0: NEWEST})
    assert [number for number, each in enumerate(readers) if each.is_shut] == ended


def test_chunks_that_were_read_are_forgotten() -> None:
    reader = a_reader(OLD, since=1.0)
    reader.chunks.see(CHUNK // 2, 2.0)
    assert sum(reader.chunks.old({0: NEWEST}).values()) == MAX_OBSERVER_CREDIT * CHUNK
    assert reader.chunks.left == MAX_OBSERVER_CREDIT * CHUNK - CHUNK // 2
    reader.chunks.see(CHUNK, 3.0)
    assert sum(reader.chunks.old({0: NEWEST}).values()) == (MAX_OBSERVER_CREDIT - 1) * CHUNK
    assert reader.chunks.waits_since == 1.0
    reader.chunks.see(MAX_OBSERVER_CREDIT * CHUNK, 4.0)
    assert not reader.chunks.old({0: NEWEST}) and reader.chunks.left == 0
