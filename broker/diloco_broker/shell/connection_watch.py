"""What each connection costs the broker inside ZeroMQ, and which ones cost too much.

ZeroMQ limits the size of a frame and the number of messages, and nothing else: a message that never
ends grows in its memory, and answers that nobody reads pile up there, where we see neither. The system
counts the bytes of every connection (`tcp_figures`). What ZeroMQ has read and we have not seen is part
of a message that has not ended; what we have sent and the other side has not acknowledged waits in
ZeroMQ or in the system.

An empty frame of two bytes takes 64 in ZeroMQ, so memory may be 32 times what is counted here.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

from diloco_broker.shell.tcp_figures import TcpFigures
from diloco_protocol.roles import Peer

# Of somebody who has not joined, bytes: their longest message (a header of 64 kB and a piece of a
# manifest) and what may have come of the next one. All of it in empty frames are 65,000 of them, which
# take 40 ms to read and 4 MiB.
STRANGERS_MAY_OWE = 128 << 10
# Of a member, who sends chunks: one of them whole (8 bytes an element at most), and its header.
MEMBERS_MAY_OWE = (4 << 20) + STRANGERS_MAY_OWE
# Answers that are on their way to somebody who has not joined.
STRANGERS_MAY_LEAVE = 8 << 20
# After which somebody who reads nothing of what waits for them is given up, seconds.
READS_WITHIN_S = 10.0
# Connections of those who have not joined; of more than that the oldest is closed.
MOST_STRANGERS = 256
# Seconds between two looks at strangers, who are few, and at members, whom credits bind.
STRANGERS_EVERY_S = 0.01
MEMBERS_EVERY_S = 0.1


def on_the_wire(size: int, *, encrypted: bool) -> int:
    """Bytes that a frame of this size is sent in.

    The header has a length of 1 byte, or of 8 (ZMTP 3, RFC 23). CURVE puts the frame into a command with
    a name, a nonce, a code against changes and flags (RFC 26).
    """
    body = size + 33 if encrypted else size
    return body + (2 if body <= 255 else 9)


class Transport(Protocol):
    """A connection of the system; `Descriptor` is one."""

    def figures(self) -> TcpFigures | None: ...

    def shut(self) -> None: ...


@dataclass
class Connection:
    """One connection.

    Attributes:
        route: what the ROUTER calls it; None until a message of it has come.
        peer: whose key it is; None where that is not known.
        sent: bytes that we handed to ZeroMQ for it (`on_the_wire`).
        heard: bytes of the messages that have come of it since the last look.
    """

    transport: Transport | None  # None where it ended before its last message was received
    moved_at: float  # when the other side has last read something, or had nothing to read
    route: bytes | None = None
    peer: Peer | None = None
    sent: int = 0
    heard: int = 0
    _taken: int = 0  # as of the last look
    _owed: int = 0  # as of the last look
    _delivered: int = 0  # as of the last look
    _offset: int = 0  # of what is delivered to what was sent, when nothing was on its way

    def shut(self) -> None:
        if self.transport is not None:
            self.transport.shut()

    def too_much(self, is_member: bool, now: float) -> str | None:
        """Why this connection costs too much; None while it does not."""
        figures = None if self.transport is None else self.transport.figures()
        if figures is None:
            return None
        owed, left = self._owes(figures), self._left(figures, now)
        if owed > (MEMBERS_MAY_OWE if is_member else STRANGERS_MAY_OWE):
            return f"{owed >> 10} KiB of a message that has not ended"
        if is_member:
            return None
        if left > STRANGERS_MAY_LEAVE:
            return f"{left >> 20} MiB of answers that were not read"
        if left and now - self.moved_at > READS_WITHIN_S:
            return f"answers that were not read for {READS_WITHIN_S:g} s"
        return None

    def _owes(self, figures: TcpFigures) -> int:
        """Bytes of a message that has not ended."""
        came = figures.taken - self._taken
        self._owed += came - self.heard
        if self.heard:  # so what has not ended began after the last look
            self._owed = max(0, min(self._owed, came))
        self.heard = 0
        self._taken = figures.taken
        return self._owed

    def _left(self, figures: TcpFigures, now: float) -> int:
        """Bytes that wait for the other side to read them."""
        has_moved = figures.delivered != self._delivered
        if has_moved or not figures.unsent:
            self.moved_at = now
        self._delivered = figures.delivered
        if not has_moved and not figures.unsent:
            # Nothing is on its way. What differs was there before the first message: the handshake.
            self._offset = figures.delivered - self.sent
        return max(0, self.sent - (figures.delivered - self._offset))


class ConnectionWatch:
    """The connections of one socket.

    Attributes:
        next_look: when `look` wants to be called again.
    """

    def __init__(self) -> None:
        self.next_look = 0.0
        self._next_members = 0.0
        self._by_number: dict[int, Connection] = {}
        self._by_route: dict[bytes, Connection] = {}

    def opened(self, number: int, transport: Transport, now: float) -> None:
        """A connection was made, with this file descriptor."""
        self.closed(number)
        self._by_number[number] = Connection(transport, moved_at=now)

    def closed(self, number: int) -> None:
        """The connection with this file descriptor has ended."""
        connection = self._by_number.pop(number, None)
        if connection is not None and connection.route is not None:
            self._by_route.pop(connection.route, None)

    def of(self, route: bytes) -> Connection | None:
        return self._by_route.get(route)

    def name(self, route: bytes, number: int, peer: Peer | None) -> Connection:
        """The connection with this descriptor is called so, and belongs to this key."""
        connection = self._by_number.get(number)
        if connection is None or connection.route is not None:  # it has ended already
            return Connection(None, 0.0, route, peer)
        connection.route, connection.peer = route, peer
        self._by_route[route] = connection
        return connection

    def shut_those_of(self, peers: Container[Peer]) -> None:
        """End the connections of these keys, and those of which nobody knows whose they are.

        Who had not been meant connects again.
        """
        for connection in self._by_number.values():
            if connection.peer is None or connection.peer in peers:
                connection.shut()

    def look(self, members: Container[bytes], now: float) -> list[str]:
        """End the connections that cost too much; returns a sentence for each."""
        if now < self.next_look:
            return []
        look_at_members = now >= self._next_members
        if look_at_members:
            self._next_members = now + MEMBERS_EVERY_S
        ended = []
        strangers = []
        for connection in self._by_number.values():
            is_member = connection.route in members
            if not is_member:
                strangers.append(connection)
            if look_at_members or not is_member:
                why = connection.too_much(is_member, now)
                if why is not None:
                    connection.shut()
                    ended.append(why)
        for connection in strangers[: max(0, len(strangers) - MOST_STRANGERS)]:  # the oldest
            connection.shut()
            ended.append(
                f"there were more than {MOST_STRANGERS} connections of nobody who had joined"
            )
        self.next_look = now + STRANGERS_EVERY_S if strangers else self._next_members
        return ended
