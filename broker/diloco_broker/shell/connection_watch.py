"""What each connection costs the broker inside ZeroMQ, and which ones cost too much.

ZeroMQ limits the size of a frame and the number of messages, and nothing else: a message that never ends
grows in its memory, and answers that the peer does not read pile up there, where we see neither. The
system counts the bytes of every connection (`tcp_figures`). What we have sent and the other side has not
acknowledged waits in ZeroMQ or in the system. What ZeroMQ had read at a look is part of a message that
has not ended, if by the next one every connection had its turn and nothing came of this one, or nothing
was left to receive: a turn takes one message of each, and more may wait. So a peer that sends whole
messages is never ended for their number, however busy the loop is.

An empty frame of two bytes takes 64 in ZeroMQ, so memory may be 32 times what is counted here. ZeroMQ
reads 17,000 of them in a millisecond, and we drop 1,100. So while a peer that has not joined
sends bytes there is a look each millisecond: a message of 30,000 empty frames takes the loop 27 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from diloco_broker.core.versions.readers import (
    MAX_OBSERVER_CREDIT,
    MAX_READER_CREDIT,
    WORKER_GOES_ON_WITHIN_S,
)
from diloco_broker.shell.chunks_on_the_way import ChunksOnTheWay, end_keepers_of_old
from diloco_broker.shell.tcp_figures import Descriptor, TcpFigures
from diloco_protocol.frames import LONGEST_OF_A_MEMBER, LONGEST_UNAUTHENTICATED, MAX_BUFFER_BYTES
from diloco_protocol.relays import Piece
from diloco_protocol.roles import Peer

# Bytes reserved for the handshake of ZeroMQ.
HANDSHAKE_BYTES = 1 << 10
# Bytes that CURVE adds to a frame: command name, nonce, authentication code, flags (RFC 26).
CURVE_ADDS = 33
# Of a message that has not ended, bytes: of a peer that has not joined, and of a member.
UNAUTHENTICATED_MAY_OWE = LONGEST_UNAUTHENTICATED + HANDSHAKE_BYTES
MEMBERS_MAY_OWE = MAX_BUFFER_BYTES + LONGEST_OF_A_MEMBER
# Limit for all peers together that have not joined, bytes. As empty frames they take 64 MiB of memory.
ALL_UNAUTHENTICATED_MAY_OWE = 2 << 20
# Bytes: a subscriber of the feed sends only subscriptions, and ZeroMQ stores each of them.
READERS_MAY_OWE = 4 << 10
# Answers that are on their way: to a peer that has not joined, to all of them, and to a member.
UNAUTHENTICATED_MAY_LEAVE = 8 << 20
ALL_UNAUTHENTICATED_MAY_LEAVE = 48 << 20
MEMBERS_MAY_LEAVE = 32 << 20
# Chunks in flight, bytes: as many as credit allows. All readers of a version share one copy.
UNAUTHENTICATED_MAY_LEAVE_OF_CHUNKS = (MAX_OBSERVER_CREDIT + 1) * MAX_BUFFER_BYTES
MEMBERS_MAY_LEAVE_OF_CHUNKS = (MAX_READER_CREDIT + 1) * MAX_BUFFER_BYTES
# Seconds after which a peer that reads none of its pending bytes is given up. Heartbeats tell of
# members, but come on another connection than chunks.
READS_WITHIN_S = 10.0
MEMBERS_READ_WITHIN_S = WORKER_GOES_ON_WITHIN_S
# Connections of peers that have not joined, besides two for each worker that may reconnect after a
# restart. Above that the oldest is closed, unauthenticated ones first: otherwise a peer without a key
# could close the displays of peers with one.
MOST_UNAUTHENTICATED = 256
# What ZeroMQ sends before it accepts a peer: its greeting, and that of CURVE to peers that know our
# public key (RFC 26). A connection that was sent more has a peer of ours behind it.
SAID_TO_ANYBODY = 256
# Seconds between two looks: at connections that have not joined while they send bytes, and at all. A
# look at many takes long, so looks may take this share of the time, and looks at all of them this one:
# with 500 members, who may owe much more than others, there is one each half second.
UNAUTHENTICATED_EVERY_S = 0.001
EVERYBODY_EVERY_S = 0.1
SHARE_OF_LOOKS = 0.1
SHARE_OF_LOOKS_AT_ALL = 0.01
# How a route begins that ZeroMQ has drawn: no other connection ever has it. Others are given by peers.
DRAWN = b"\0"
# Routes of closed connections that are remembered: more than can have messages pending.
GONE_REMEMBERED = 4096
# More turns than there are connections.
EVERYBODY = 1 << 30


def on_the_wire(frames: Sequence[Any], *, encrypted: bool) -> int:
    """Bytes that these frames (bytes-like) take on the wire.

    The header of a frame has a length field of 1 or 8 bytes (ZMTP 3, RFC 23).
    """
    added, total = CURVE_ADDS if encrypted else 0, 0
    for each in frames:
        body = memoryview(each).nbytes + added
        total += body + (2 if body <= 255 else 9)
    return total


@dataclass
class Connection:
    """The byte counts and the identity of one connection.

    Attributes:
        route: what the ROUTER calls it; None until it has sent a message.
        peer: whose key it is; None where that is not known.
        opened_at: turns that others had had when it was made.
        sent: bytes that we handed to ZeroMQ for it (`on_the_wire`).
        heard: bytes of the messages that have come of it since `owed` was reckoned.
        owed: bytes of a message that had not ended at the last look but one.
        left: bytes that wait for the other side to read them, but for those of chunks.
        chunks: those of the parameters that do.
        is_member: its peer had joined at the last look.
        is_surely_named: `route` is not that of an earlier connection with the same descriptor.
        is_to_end: close it as soon as it is surely named.
    """

    transport: Descriptor | None  # None if it was closed before its last message was received
    route: bytes | None = None
    peer: Peer | None = None
    opened_at: int = 0
    sent: int = 0
    heard: int = 0
    owed: int = 0
    left: int = 0
    chunks: ChunksOnTheWay = field(default_factory=ChunksOnTheWay)
    is_member: bool = False
    is_ended: bool = False
    is_surely_named: bool = False
    is_to_end: bool = False
    _taken: int = 0  # as of the last look
    _came: int = 0  # between the last two looks
    _seen_at: int = -EVERYBODY  # turns that others had had then
    _delivered: int = 0  # as of the last look
    _offset: int = 0  # of the delivered bytes to the sent ones, when none was in flight
    _moved_at: float | None = None  # when the other side has last read something, or had nothing to

    def shut(self) -> None:
        self.is_ended = True
        if self.transport is not None:
            self.transport.shut()

    @property
    def was_let_in(self) -> bool:
        """Whether it was sent more than the handshake, as of the last poll."""
        return self._delivered > SAID_TO_ANYBODY

    def begin_again(self) -> None:
        """Reset the counts: they belong to another connection."""
        figures = None if self.transport is None else self.transport.figures()
        self._taken = figures.taken if figures is not None else self._taken
        self.heard = self.owed = self._came = self.sent = 0
        self.is_to_end = False
        self.chunks.clear()

    def see(self, now: float, turns: int, all_turns: int) -> None:
        """Look at what the system has counted; within `all_turns` turns each had its own."""
        figures = None if self.transport is None or self.is_ended else self.transport.figures()
        if figures is None:
            self.owed, self.left = 0, 0
            self.chunks.clear()
            return
        self._see_sent(figures, now)
        if turns - self._seen_at < all_turns:
            return
        # More complete messages may be pending.
        if self.heard and turns - self._seen_at < EVERYBODY:
            self._came += self.owed + figures.taken - self._taken - self.heard
            self._taken, self.owed, self.heard, self._seen_at = figures.taken, 0, 0, turns
            return
        self.owed += self._came - self.heard
        if self.heard:  # so the incomplete message began after the previous poll
            self.owed = min(self.owed, self._came)
        self.heard = 0
        self._came, self._taken = figures.taken - self._taken, figures.taken
        self._seen_at = turns

    def _see_sent(self, figures: TcpFigures, now: float) -> None:
        has_moved = figures.delivered != self._delivered
        if has_moved or not figures.unsent or self._moved_at is None:
            self._moved_at = now
        self._delivered = figures.delivered
        if not has_moved and not figures.unsent:
            # Nothing is in flight. The difference is the handshake.
            self._offset = figures.delivered - self.sent
        had = figures.delivered - self._offset
        self.chunks.see(had, now)
        self.left = max(0, max(self.sent - had, figures.unsent) - self.chunks.left)

    def too_much(self, *, is_member: bool, may_owe: int, now: float) -> str | None:
        """The limit that this connection exceeds, as of the last poll; None if it exceeds none."""
        if self.owed > may_owe:
            return f"{self.owed >> 10} KiB of an incomplete message"
        if self.left > (MEMBERS_MAY_LEAVE if is_member else UNAUTHENTICATED_MAY_LEAVE):
            return f"{self.left >> 20} MiB of unread replies"
        of_chunks = (
            MEMBERS_MAY_LEAVE_OF_CHUNKS if is_member else UNAUTHENTICATED_MAY_LEAVE_OF_CHUNKS
        )
        if self.chunks.left > of_chunks:
            return f"{self.chunks.left >> 20} MiB of unread parameters"
        within = MEMBERS_READ_WITHIN_S if is_member else READS_WITHIN_S
        waits = self.left or self.chunks.left
        if waits and self._moved_at is not None and now - self._moved_at > within:
            return f"replies unread for {within:g} s"
        return None


class ConnectionWatch:
    """Watches the connections of one socket, and closes those that exceed a limit.

    `poll` is called with the descriptor of a connection and the poll flags: connections of peers that
    have not joined are polled, and looked at more often while they send (`stirred`).

    Attributes:
        next_look: when to call `look` again.
        by_route: connections by ROUTER identity; see `name`.
        turns: messages received, plus `EVERYBODY` each time the receive queue was empty.
    """

    def __init__(
        self,
        unauthenticated_may_owe: int = UNAUTHENTICATED_MAY_OWE,
        poll: Callable[[int, int], object] = lambda number, flags: None,
        most_unauthenticated: int = MOST_UNAUTHENTICATED,
    ) -> None:
        self._most_unauthenticated = most_unauthenticated
        self._unauthenticated_may_owe = unauthenticated_may_owe
        self._poll = poll
        self.next_look = 0.0
        self.turns = 0
        self._next_at_all = self._rests_until = 0.0
        self._by_number: dict[int, Connection] = {}
        # Those of `_by_number` that had not joined at the last poll.
        self._unauthenticated: dict[int, Connection] = {}
        self.by_route: dict[bytes, Connection] = {}
        # Routes of connections that have ended, and whether we have ended them: what of theirs still
        # waits is of no other one. Nothing waits once nothing was left to receive.
        self._gone: dict[bytes, bool] = {}
        self._newest: dict[int, int] = {}  # newest version counter sent, by fragment

    def opened(self, number: int, transport: Descriptor) -> None:
        """A connection with this file descriptor was accepted."""
        self.closed(number)
        connection = self._by_number[number] = Connection(transport, opened_at=self.turns)
        self._mark(number, connection, is_member=False)
        if len(self._unauthenticated) > self._most_unauthenticated:
            self.next_look = min(self.next_look, self._rests_until)

    def _mark(self, number: int, connection: Connection, *, is_member: bool) -> None:
        connection.is_member = is_member
        if is_member:
            del self._unauthenticated[number]
        else:
            self._unauthenticated[number] = connection
        self._poll(number, 0 if is_member else zmq.POLLIN)

    def closed(self, number: int) -> None:
        """The connection with this file descriptor was closed."""
        connection = self._by_number.pop(number, None)
        if connection is None:
            return
        if self._unauthenticated.pop(number, None) is not None:
            self._poll(number, 0)
        if connection.route is not None:
            self.by_route.pop(connection.route, None)
            if connection.route.startswith(DRAWN):
                self._gone[connection.route] = connection.is_ended
                if len(self._gone) > GONE_REMEMBERED:
                    del self._gone[next(iter(self._gone))]

    def has_received_all(self) -> None:
        """The receive queue is empty."""
        self.turns += EVERYBODY
        self._gone.clear()

    def sent_chunk(self, connection: Connection, size: int, piece: Piece) -> None:
        """A chunk was handed to ZeroMQ: `size` bytes with its header."""
        newest = max(self._newest.get(piece.fragment, 0), piece.version.counter)
        self._newest[piece.fragment] = newest
        connection.chunks.add(connection.sent, connection.sent + size, piece)
        connection.sent += size

    def name(self, route: bytes, number: int, peer: Peer | None) -> Connection:
        """Assign a route and a key to the connection with this descriptor.

        A late message may come from a closed connection that had the same descriptor. Until every
        message that was pending when this one was opened is received, its name may be wrong; a later
        call corrects it.
        """
        if route in self._gone:
            return Connection(None, route, peer, is_ended=self._gone[route])
        connection = self._by_number.get(number)
        former = self.by_route.get(route)
        if former is not None and former is not connection:  # it was misnamed
            del self.by_route[route]
            former.route = None
            former.begin_again()
        if connection is None:  # closed meanwhile
            return Connection(None, route, peer)
        is_sure = self.turns - connection.opened_at >= EVERYBODY
        if connection.route == route:
            connection.is_surely_named |= is_sure
            if connection.is_to_end:
                self.end(route)
            return connection
        if connection.route is not None:
            if connection.is_surely_named or not is_sure:
                return Connection(None, route, peer)
            self.by_route.pop(connection.route, None)
            connection.begin_again()
        connection.route, connection.peer, connection.is_surely_named = route, peer, is_sure
        self.by_route[route] = connection
        return connection

    def end(self, route: bytes) -> None:
        """Close the connection with this route, once its name is certain.

        Otherwise a late message of a flooding connection could close another one, and lose its request.
        """
        connection = self.by_route.get(route)
        if connection is not None:
            connection.is_to_end = True
            if connection.is_surely_named:
                connection.shut()

    def stirred(self, ready: Collection[object]) -> None:
        """Schedule a poll if one of these readable descriptors belongs to a peer that has not joined."""
        if not self._unauthenticated.keys().isdisjoint(ready):
            self.next_look = min(self.next_look, self._rests_until)

    def shut_those_of(self, peers: Container[Peer]) -> None:
        """End the connections of these keys, and those whose key is not known.

        A peer with a valid key reconnects.
        """
        for connection in self._by_number.values():
            if connection.peer is None or connection.peer in peers:
                connection.shut()

    def look(self, members: Container[bytes], now: float) -> list[str]:
        """Close the connections that exceed a limit; returns a sentence for each."""
        if now < self.next_look:
            return []
        began = time.thread_time()
        is_at_all = now >= self._next_at_all
        ended: list[str] = []
        all_turns = 2 * len(self._by_number) + 2  # ZeroMQ takes one of each in turn
        for number, connection in list(
            (self._by_number if is_at_all else self._unauthenticated).items()
        ):
            is_member = connection.route in members
            if is_member is not connection.is_member:
                self._mark(number, connection, is_member=is_member)
            connection.see(now, self.turns, all_turns)
            may_owe = MEMBERS_MAY_OWE if is_member else self._unauthenticated_may_owe
            why = connection.too_much(is_member=is_member, may_owe=may_owe, now=now)
            if why is not None and not connection.is_ended:
                connection.shut()
                ended.append(why)
        unauthenticated = [each for each in self._unauthenticated.values() if not each.is_ended]
        unauthenticated.sort(key=lambda each: each.was_let_in)
        ended += _bound_together(unauthenticated, self._most_unauthenticated)
        if is_at_all:
            ended += end_keepers_of_old(
                (c for c in unauthenticated if not c.is_ended), self._newest
            )
        took = time.thread_time() - began
        if is_at_all:
            self._next_at_all = now + max(EVERYBODY_EVERY_S, took / SHARE_OF_LOOKS_AT_ALL)
        pause = max(UNAUTHENTICATED_EVERY_S, took / SHARE_OF_LOOKS)
        self._rests_until = now + pause
        self.next_look = max(self._next_at_all, self._rests_until)
        return ended


def _bound_together(unauthenticated: list[Connection], most: int) -> list[str]:
    """Close the first of these connections until the rest are within the common limits."""
    ended = []
    owed, left = sum(max(0, c.owed) for c in unauthenticated), sum(c.left for c in unauthenticated)
    for number, connection in enumerate(unauthenticated):
        why = None
        if number < len(unauthenticated) - most:
            why = f"there were more than {most} connections of peers that had not joined"
        elif owed > ALL_UNAUTHENTICATED_MAY_OWE and connection.owed > HANDSHAKE_BYTES:
            why = f"{owed >> 10} KiB of incomplete messages of peers that have not joined"
        elif left > ALL_UNAUTHENTICATED_MAY_LEAVE and connection.left:
            why = f"{left >> 20} MiB of unread replies to peers that have not joined"
        if why is not None and not connection.is_ended:
            owed, left = owed - max(0, connection.owed), left - connection.left
            connection.shut()
            ended.append(why)
    return ended
