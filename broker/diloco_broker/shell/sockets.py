"""The broker's sockets: the ROUTER, the PUB, and what wakes the loop."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from diloco_broker.shell.authentication import Changes, Doorkeeper, peer_of
from diloco_broker.shell.chunks_on_the_way import Piece
from diloco_broker.shell.connection_watch import (
    CURVE_ADDS,
    MOST_STRANGERS,
    READERS_MAY_OWE,
    Connection,
    ConnectionWatch,
    on_the_wire,
)
from diloco_broker.shell.tcp_figures import Descriptor
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients.same_host import OWN_SOCKET
from diloco_protocol.errors import UsageError
from diloco_protocol.frames import KEEPALIVE_IDLE_S, MAX_BUFFER_BYTES, MAX_FRAMES
from diloco_protocol.roles import Peer

# How long the last messages may take to get out.
LINGER_MS = 1000
SNAPSHOTS_KEPT = 10
# Messages of a connection that ZeroMQ takes before we do; it would take 1000. Each may have a buffer
# of 4 MiB. With less than this many small ones would be taken in little by little.
UNREAD_KEPT = 128
# Answers of a connection that wait in ZeroMQ: 64 chunks by credit, and what is said meanwhile. Whoever
# has more is as good as gone, and is ended; of their bytes `ConnectionWatch` keeps account.
ANSWERS_KEPT = 1000
# The same of relays, through whose connections hundreds of workers hear.
ANSWERS_KEPT_FOR_RELAYS = 100_000
# Of what a subscriber of the feed says, which is a subscription or part of a handshake, bytes.
LONGEST_SUBSCRIPTION = 1024
# For a handshake: a few packets each way, and one answer of ours.
HANDSHAKE_WITHIN_MS = 10_000
# Connections that came or went, of which one turn of the loop takes notice: 10 ms.
CHANGES_A_TURN = 512
# Frames of a message with too many that are dropped in one call: 0.5 ms.
SURPLUS_A_CALL = 512
# As plain numbers: the sums of enum members cost more than the sends.
MORE = int(zmq.SNDMORE)
ROUTE_FLAGS = int(zmq.SNDMORE | zmq.NOBLOCK)
NOW = int(zmq.NOBLOCK)
CHANGES = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED


@dataclass(frozen=True)
class Incoming:
    """A message, or some of the rest of one that has too many frames.

    Attributes:
        frames: bytes-like; at most one more than a message may have, and none of such a rest.
        peer: whose key it is, where keys are asked for.
        is_of_stranger: its sender had not joined at the last look.
        is_left_behind: of a connection that we have ended, so no answer can be sent.
    """

    route: bytes
    frames: list[Any]
    peer: Peer | None = None
    is_of_stranger: bool = True
    is_left_behind: bool = False


class Sockets:
    """All of them, bound: the ROUTER to `bind`, the PUB to `feed`; port 0 or * picks a free one.

    `address` and `feed_address` say where they are. `keys` says who may connect; None: any peer.
    Only `wake` may be called from another thread. Raises UsageError for an address that cannot be
    bound. `workers` is how many may come at once. With `same_host` workers of this machine and this user
    find another way in at `own_address`, a Unix socket, on Linux. `relays` may come, too.
    """

    def __init__(
        self,
        bind: str,
        feed: str,
        keys: KeyFolder | None = None,
        workers: int = 0,
        *,
        same_host: bool = False,
        relays: bool = False,
    ) -> None:
        self._answers_kept = ANSWERS_KEPT_FOR_RELAYS if relays else ANSWERS_KEPT
        self._most_strangers = MOST_STRANGERS + 2 * workers
        self._context = zmq.Context()
        try:
            self._doorkeeper = None if keys is None else Doorkeeper(self._context, keys)
            self._router = self._bound(zmq.ROUTER, bind, "bind")
            self._pub = self._bound(zmq.PUB, feed, "feed")
        except UsageError:
            self._context.destroy(linger=0)
            raise
        self.address = self._router.get_string(zmq.LAST_ENDPOINT)
        self.feed_address = self._pub.get_string(zmq.LAST_ENDPOINT)
        self.own_address: str | None = None
        if same_host and self.address.startswith("tcp://") and sys.platform == "linux":
            self.own_address = f"{OWN_SOCKET}{secrets.token_hex(16)}"
            # Connections through it are not counted as those of TCP are, so ZeroMQ closes those of
            # other users as it accepts them. The kernel says whose they are.
            self._router.set(zmq.IPC_FILTER_UID, os.geteuid())
            self._router.bind(self.own_address)
        self._watch = ConnectionWatch(poll=self._poll, most_strangers=self._most_strangers)
        self._readers = ConnectionWatch(READERS_MAY_OWE)
        # A worker that was killed shows as a closed connection long before its heartbeats are missed.
        self._monitors = [
            (self._router.get_monitor_socket(CHANGES), self._watch),
            (self._pub.get_monitor_socket(CHANGES), self._readers),
        ]
        self._has_lost = False
        # Of whose message frames are still to be dropped.
        self._surplus_of: Connection | None = None
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self._bell.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._alarm, zmq.POLLIN)
        for monitor, _ in self._monitors:
            self._poller.register(monitor, zmq.POLLIN)
        # Has those who have not joined, and `wake`: a poller without anything returns at once.
        self._at_rest = zmq.Poller()
        self._at_rest.register(self._alarm, zmq.POLLIN)
        if self._doorkeeper is not None:
            self._poller.register(self._doorkeeper.socket, zmq.POLLIN)

    def _poll(self, number: int, flags: int) -> None:
        """Poll a descriptor of a connection, or with no flags no longer."""
        for poller in (self._poller, self._at_rest):
            poller.register(number, flags)

    def wait(self, seconds: float) -> bool:
        """Wait for a message, for `wake`, or for bytes of a peer that has not joined.

        At most so long. Returns whether there is a message.
        """
        found = dict(self._poller.poll(int(seconds * 1000) + 1 if seconds > 0 else 0))
        has_message = self._router in found
        if len(found) > has_message:
            self._see_others(found)
        if not has_message:
            self._watch.has_received_all()
        return has_message

    def _see_others(self, found: Mapping[object, int]) -> None:
        """Something came besides messages."""
        if self._alarm.fileno() in found:
            with contextlib.suppress(BlockingIOError):
                self._alarm.recv(4096)
        if self._doorkeeper is not None and self._doorkeeper.socket in found:
            self._doorkeeper.answer()
        if any(monitor in found for monitor, _ in self._monitors):
            self._see_changes()
        self._watch.stirred(found.keys())

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Let `wait` return when something comes on this socket, which is another's to read."""
        self._poller.register(socket, zmq.POLLIN)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        self._poller.unregister(socket)

    def rest(self, seconds: float) -> bool:
        """Wait for bytes of a peer that has not joined, or for `wake`; returns whether there are any."""
        return bool(self._at_rest.poll(int(seconds * 1000)))

    def wake(self) -> None:
        """Make `wait` return; from any thread."""
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: no thread waits
            self._bell.send(b"!")

    def receive(self) -> Incoming | None:
        """The next message; None when there is none.

        Of one with too many frames the first too many come. The rest is dropped, some in each call,
        which then returns no frames: the frames of one message come before all other messages.
        """
        if self._surplus_of is not None:
            self._drop_surplus(self._surplus_of)
            return Incoming(b"", [])
        try:
            first = last = self._router.recv(NOW, copy=False)
        except zmq.Again:
            self._watch.has_received_all()
            return None
        self._watch.turns += 1
        frames: list[zmq.Frame] = []
        while last.more and len(frames) <= MAX_FRAMES:
            last = self._router.recv(NOW, copy=False)
            frames.append(last)
        route = first.bytes
        connection = self._watch.by_route.get(route)
        if connection is None or not connection.is_surely_named:
            connection = self._named(route, last)
        self._surplus_of = connection if last.more else None
        buffers = [each.buffer for each in frames]
        connection.heard += on_the_wire(buffers, encrypted=self._doorkeeper is not None)
        is_stranger = not connection.is_member
        return Incoming(route, buffers, connection.peer, is_stranger, connection.is_ended)

    def _drop_surplus(self, connection: Connection) -> None:
        for _ in range(SURPLUS_A_CALL):
            if not self._router.recv(NOW, copy=False).more:
                self._surplus_of = None
                return
        self._watch.end(connection.route or b"")  # not a mistake of its sender

    def _named(self, route: bytes, frame: zmq.Frame) -> Connection:
        """The connection of this frame, which is not surely known. This takes longer than the rest."""
        self._see_changes()  # it may be news that there is one
        peer = None
        if self._doorkeeper is not None:
            peer = peer_of(frame)
            if not self._doorkeeper.knows_key_of(frame):  # it waited while this was replaced
                return Connection(None, route, peer, is_ended=True)
        try:
            number = frame.get(zmq.SRCFD)
        except zmq.ZMQError:
            # A peer of ZMTP 1, as a request of HTTP looks to ZeroMQ: it does not say which connection.
            number = -1
        return self._watch.name(route, number, peer)

    def send(self, route: bytes, frames: list[Any], chunk: Piece | None = None) -> bool:
        """False when the connection does not exist any more.

        The buffer of a chunk is never written again, so it is sent from where it lies.
        """
        try:
            self._router.send(route, ROUTE_FLAGS)
            for frame in frames[:-1]:
                self._router.send(frame, MORE)
            self._router.send(frames[-1], copy=chunk is None)
        except zmq.Again:  # it reads nothing
            self.shut(route)
            return False
        except zmq.ZMQError:
            return False
        connection = self._watch.by_route.get(route)
        if connection is not None:
            size = on_the_wire(frames, encrypted=self._doorkeeper is not None)
            if chunk is not None:
                self._watch.sent_chunk(connection, size, chunk)
            else:
                connection.sent += size
        return True

    def publish(self, message: bytes) -> None:
        """To all subscribers."""
        self._pub.send(message)

    # Connections.

    def lost_a_connection(self) -> bool:
        """Has a connection of the ROUTER been closed since this was asked last?"""
        lost, self._has_lost = self._has_lost, False
        return lost

    @property
    def next_look(self) -> float:
        """When `look` wants to be called, on its clock."""
        return min(self._watch.next_look, self._readers.next_look)

    def look(self, members: Container[bytes], now: float) -> list[str]:
        """End the connections that cost too much; returns a sentence for each.

        `members` has the routes of all who have joined.
        """
        self._readers.has_received_all()  # ZeroMQ itself reads what they say
        return [*self._watch.look(members, now), *self._readers.look((), now)]

    def _see_changes(self) -> None:
        for monitor, watch in self._monitors:
            for _ in range(CHANGES_A_TURN):
                if not monitor.poll(0):
                    break
                event: Any = parse_monitor_message(monitor.recv_multipart())
                if event["event"] == zmq.EVENT_ACCEPTED:
                    with contextlib.suppress(OSError):  # it is gone again
                        watch.opened(event["value"], Descriptor(event["value"]))
                else:
                    watch.closed(event["value"])
                    self._has_lost |= watch is self._watch

    def shut(self, route: bytes) -> None:
        """End a connection of the ROUTER."""
        self._watch.end(route)

    def lets_in(self, peer: Peer | None) -> bool:
        """May the sender of a message still send? It may have waited while its key was taken back."""
        return self._doorkeeper is None or (peer is not None and self._doorkeeper.lets_in(peer))

    def changed_keys(self, now: float) -> Changes | None:
        """What became of the keys; None where none are asked for, or nothing has changed.

        Whose key is revoked is not connected any more when this returns.
        """
        changes = None if self._doorkeeper is None else self._doorkeeper.look(now)
        if changes is not None and changes.revoked:
            self._see_changes()
            self._watch.shut_those_of(changes.revoked)
            self._readers.shut_those_of(changes.revoked)
        return changes

    def close(self) -> None:
        """Send what is left, for at most a second, and close."""
        self._router.disable_monitor()
        self._pub.disable_monitor()
        self._alarm.close()
        self._bell.close()
        self._context.destroy(linger=LINGER_MS)

    def _bound(self, kind: int, address: str, option: str) -> zmq.Socket[Any]:
        """A new socket of this kind that listens there."""
        made: zmq.Socket[Any] = self._context.socket(kind)
        made.linger = LINGER_MS
        made.set(zmq.TCP_KEEPALIVE, 1)
        made.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        made.set(zmq.HANDSHAKE_IVL, HANDSHAKE_WITHIN_MS)
        # Connections that the system keeps until ZeroMQ takes them.
        made.set(zmq.BACKLOG, 2 * self._most_strangers)
        made.set(zmq.RCVHWM, UNREAD_KEPT)
        if self._doorkeeper is not None:
            self._doorkeeper.guard(made)
        if kind == zmq.PUB:
            # Kept for a subscriber that does not read: snapshots, of 150 kB with 500 workers.
            made.set(zmq.SNDHWM, SNAPSHOTS_KEPT)
            made.set(zmq.MAXMSGSIZE, LONGEST_SUBSCRIPTION)
        if kind == zmq.ROUTER:
            # Without it a message to a peer that is gone or full is dropped in silence.
            made.set(zmq.ROUTER_MANDATORY, 1)
            made.set(zmq.SNDHWM, self._answers_kept)
            # ZeroMQ compares the size on the wire.
            made.set(
                zmq.MAXMSGSIZE,
                MAX_BUFFER_BYTES + (CURVE_ADDS if self._doorkeeper is not None else 0),
            )
        scheme, _, rest = address.partition("://")
        if scheme == "ipc" and _is_served(rest):
            # ZeroMQ would put its own file in the place of this one, unnoticed.
            made.close(linger=0)
            raise UsageError(
                f"--{option} {address} cannot be bound: something answers there; stop it or choose "
                "another path."
            )
        try:
            host, _, port = rest.rpartition(":")
            host = (
                "127.0.0.1" if host == "localhost" else host
            )  # ZeroMQ resolves no names to bind to
            made.ipv6 = host.startswith("[")
            is_file = scheme == "ipc"
            made.bind(address if is_file else f"{scheme}://{host}:{'*' if port == '0' else port}")
        except zmq.ZMQError as error:
            made.close(linger=0)
            if error.errno == zmq.EADDRINUSE:
                why = "something else listens there; stop it or choose another port (* picks one)"
            else:
                why = str(error)
            raise UsageError(f"--{option} {address} cannot be bound: {why}.") from None
        return made


def _is_served(path: str) -> bool:
    """Whether a process listens at this socket file. One of a killed process is stale."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(f"\0{path[1:]}" if path.startswith("@") else path)
        except (BlockingIOError, TimeoutError):  # its backlog is full
            return True
        except OSError:
            return False
    return True
