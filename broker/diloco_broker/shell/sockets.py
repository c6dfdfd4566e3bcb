"""The broker's sockets: the ROUTER, the PUB, their monitors, and a socket pair that wakes the loop."""

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
from diloco_broker.shell.connection_watch import (
    CURVE_ADDS,
    MOST_UNAUTHENTICATED,
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
from diloco_protocol.relays import Piece
from diloco_protocol.roles import Peer

# Milliseconds to send the last messages when closing.
LINGER_MS = 1000
SNAPSHOTS_KEPT = 10
# Messages of one connection that ZeroMQ queues before we receive them (default 1000). Each may have a
# buffer of 4 MiB. A smaller queue slows down the receipt of many small messages.
UNREAD_KEPT = 128
# Outgoing messages that ZeroMQ queues for one connection: 64 chunks by credit, and control messages. A
# peer with more is unresponsive, and is disconnected; `ConnectionWatch` limits the bytes.
ANSWERS_KEPT = 1000
# The same for relays, whose connections serve hundreds of workers.
ANSWERS_KEPT_FOR_RELAYS = 100_000
# Bytes of a message of a subscriber: a subscription, or a part of a handshake.
LONGEST_SUBSCRIPTION = 1024
# Milliseconds for a handshake: a few packets in each direction, and one reply of ours.
HANDSHAKE_WITHIN_MS = 10_000
# Opened and closed connections that are handled in one turn of the loop: takes 10 ms.
CHANGES_A_TURN = 512
# Surplus frames of an oversized message that are dropped in one call: takes 0.5 ms.
SURPLUS_A_CALL = 512
# Plain numbers: adding enum members costs more than sending.
MORE = int(zmq.SNDMORE)
ROUTE_FLAGS = int(zmq.SNDMORE | zmq.NOBLOCK)
NOW = int(zmq.NOBLOCK)
CHANGES = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED


@dataclass(frozen=True)
class Incoming:
    """A received message; without frames and route if it stands for dropped surplus frames.

    Attributes:
        frames: bytes-like; at most one more than a message may have.
        peer: owner of the connection's key, if keys are required.
        is_unauthenticated: its peer had not joined at the last poll.
        is_left_behind: we have closed its connection, so it cannot be answered.
    """

    route: bytes
    frames: list[Any]
    peer: Peer | None = None
    is_unauthenticated: bool = True
    is_left_behind: bool = False


class Sockets:
    """The bound sockets: the ROUTER at `bind`, the PUB at `feed`; port 0 or * picks a free one.

    `address` and `feed_address` are the bound addresses. `keys` has the keys that may connect; None: no
    keys are required. `workers` is the number that may connect at once. With `same_host`, workers of
    this machine and this user can also connect to `own_address`, a Unix socket, on Linux. `relays`:
    whether relays may connect. Only `wake` may be called from another thread. Raises UsageError for an
    address that cannot be bound.
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
        self._most_unauthenticated = MOST_UNAUTHENTICATED + 2 * workers
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
            # The system does not count bytes of Unix sockets as it does those of TCP, so ZeroMQ accepts
            # only connections of our user, as reported by the kernel.
            self._router.set(zmq.IPC_FILTER_UID, os.geteuid())
            self._router.bind(self.own_address)
        self._watch = ConnectionWatch(
            poll=self._poll, most_unauthenticated=self._most_unauthenticated
        )
        self._readers = ConnectionWatch(READERS_MAY_OWE)
        # The closed connection of a killed worker is seen long before its heartbeats are missed.
        self._monitors = [
            (self._router.get_monitor_socket(CHANGES), self._watch),
            (self._pub.get_monitor_socket(CHANGES), self._readers),
        ]
        self._has_lost = False
        # The connection whose surplus frames are being dropped.
        self._surplus_of: Connection | None = None
        self._wake_recv, self._wake_send = socket.socketpair()
        self._wake_recv.setblocking(False)
        self._wake_send.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_recv, zmq.POLLIN)
        for monitor, _ in self._monitors:
            self._poller.register(monitor, zmq.POLLIN)
        # The wake-up, and connections of peers that have not joined. An empty poller would not wait.
        self._at_rest = zmq.Poller()
        self._at_rest.register(self._wake_recv, zmq.POLLIN)
        if self._doorkeeper is not None:
            self._poller.register(self._doorkeeper.socket, zmq.POLLIN)

    def _poll(self, number: int, flags: int) -> None:
        """Poll a descriptor of a connection; with no flags, stop polling it."""
        for poller in (self._poller, self._at_rest):
            poller.register(number, flags)

    def wait(self, seconds: float) -> bool:
        """Wait for a message, for `wake`, or for bytes of a peer that has not joined.

        Returns within `seconds`, with whether a message is pending.
        """
        found = dict(self._poller.poll(int(seconds * 1000) + 1 if seconds > 0 else 0))
        has_message = self._router in found
        if len(found) > has_message:
            self._see_others(found)
        if not has_message:
            self._watch.has_received_all()
        return has_message

    def _see_others(self, found: Mapping[object, int]) -> None:
        """Handle events other than messages."""
        if self._wake_recv.fileno() in found:
            with contextlib.suppress(BlockingIOError):
                self._wake_recv.recv(4096)
        if self._doorkeeper is not None and self._doorkeeper.socket in found:
            self._doorkeeper.answer()
        if any(monitor in found for monitor, _ in self._monitors):
            self._see_changes()
        self._watch.stirred(found.keys())

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Make `wait` return when this socket is readable; the caller reads it."""
        self._poller.register(socket, zmq.POLLIN)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        self._poller.unregister(socket)

    def rest(self, seconds: float) -> bool:
        """Wait `seconds`; returns True as soon as `wake` or bytes of a peer that has not joined come."""
        return bool(self._at_rest.poll(int(seconds * 1000)))

    def wake(self) -> None:
        """Make `wait` return; from any thread."""
        with contextlib.suppress(OSError):  # full: a wake-up is pending; closed: no thread waits
            self._wake_send.send(b"!")

    def receive(self) -> Incoming | None:
        """Receive the next message; None if none is pending.

        A message with too many frames is returned with one frame more than allowed. Its other frames are
        dropped by the next calls, which return an empty message: ZeroMQ delivers all frames of a message
        before the next one.
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
        is_unauthenticated = not connection.is_member
        return Incoming(route, buffers, connection.peer, is_unauthenticated, connection.is_ended)

    def _drop_surplus(self, connection: Connection) -> None:
        for _ in range(SURPLUS_A_CALL):
            if not self._router.recv(NOW, copy=False).more:
                self._surplus_of = None
                return
        self._watch.end(connection.route or b"")  # this many are not an accident

    def _named(self, route: bytes, frame: zmq.Frame) -> Connection:
        """Find the connection of this frame if its name is not certain. This is the slow path."""
        self._see_changes()  # it may be new
        peer = None
        if self._doorkeeper is not None:
            peer = peer_of(frame)
            if not self._doorkeeper.knows_key_of(frame):  # its key was replaced while it was queued
                return Connection(None, route, peer, is_ended=True)
        try:
            number = frame.get(zmq.SRCFD)
        except zmq.ZMQError:
            # A ZMTP 1 peer (ZeroMQ takes an HTTP request for one) has no descriptor.
            number = -1
        return self._watch.name(route, number, peer)

    def send(self, route: bytes, frames: list[Any], chunk: Piece | None = None) -> bool:
        """Send a message; returns False if the connection no longer exists.

        The buffer of a chunk is never modified, so it is sent without a copy.
        """
        try:
            self._router.send(route, ROUTE_FLAGS)
            for frame in frames[:-1]:
                self._router.send(frame, MORE)
            self._router.send(frames[-1], copy=chunk is None)
        except zmq.Again:  # the peer does not read
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
        """Send a message to all subscribers of the feed."""
        self._pub.send(message)

    # Connections.

    def lost_a_connection(self) -> bool:
        """Whether a connection of the ROUTER was closed since the last call."""
        lost, self._has_lost = self._has_lost, False
        return lost

    @property
    def next_look(self) -> float:
        """When to call `look` next, on its clock."""
        return min(self._watch.next_look, self._readers.next_look)

    def look(self, members: Container[bytes], now: float) -> list[str]:
        """Close the connections that exceed a limit; returns a sentence for each.

        `members` has the routes of all peers that have joined.
        """
        self._readers.has_received_all()  # ZeroMQ itself reads subscriptions
        return [*self._watch.look(members, now), *self._readers.look((), now)]

    def _see_changes(self) -> None:
        for monitor, watch in self._monitors:
            for _ in range(CHANGES_A_TURN):
                if not monitor.poll(0):
                    break
                event: Any = parse_monitor_message(monitor.recv_multipart())
                if event["event"] == zmq.EVENT_ACCEPTED:
                    with contextlib.suppress(OSError):  # closed again
                        watch.opened(event["value"], Descriptor(event["value"]))
                else:
                    watch.closed(event["value"])
                    self._has_lost |= watch is self._watch

    def shut(self, route: bytes) -> None:
        """Close a connection of the ROUTER."""
        self._watch.end(route)

    def lets_in(self, peer: Peer | None) -> bool:
        """Whether a sender is still allowed: its key may have been revoked while its message waited."""
        return self._doorkeeper is None or (peer is not None and self._doorkeeper.lets_in(peer))

    def changed_keys(self, now: float) -> Changes | None:
        """Changes of the key folder; None if nothing changed or no keys are required.

        Connections of revoked keys are closed when this returns.
        """
        changes = None if self._doorkeeper is None else self._doorkeeper.look(now)
        if changes is not None and changes.revoked:
            self._see_changes()
            self._watch.shut_those_of(changes.revoked)
            self._readers.shut_those_of(changes.revoked)
        return changes

    def close(self) -> None:
        """Send queued messages for at most a second, and close."""
        self._router.disable_monitor()
        self._pub.disable_monitor()
        self._wake_recv.close()
        self._wake_send.close()
        self._context.destroy(linger=LINGER_MS)

    def _bound(self, kind: int, address: str, option: str) -> zmq.Socket[Any]:
        """Create a socket of this kind and bind it to this address."""
        made: zmq.Socket[Any] = self._context.socket(kind)
        made.linger = LINGER_MS
        made.set(zmq.TCP_KEEPALIVE, 1)
        made.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        made.set(zmq.HANDSHAKE_IVL, HANDSHAKE_WITHIN_MS)
        # Connections that the kernel queues until ZeroMQ accepts them.
        made.set(zmq.BACKLOG, 2 * self._most_unauthenticated)
        made.set(zmq.RCVHWM, UNREAD_KEPT)
        if self._doorkeeper is not None:
            self._doorkeeper.guard(made)
        if kind == zmq.PUB:
            # Snapshots queued for a slow subscriber: 150 kB each with 500 workers.
            made.set(zmq.SNDHWM, SNAPSHOTS_KEPT)
            made.set(zmq.MAXMSGSIZE, LONGEST_SUBSCRIPTION)
        if kind == zmq.ROUTER:
            # Without it a message to a disconnected or unresponsive peer is dropped silently.
            made.set(zmq.ROUTER_MANDATORY, 1)
            made.set(zmq.SNDHWM, self._answers_kept)
            # ZeroMQ checks the size on the wire.
            made.set(
                zmq.MAXMSGSIZE,
                MAX_BUFFER_BYTES + (CURVE_ADDS if self._doorkeeper is not None else 0),
            )
        scheme, _, rest = address.partition("://")
        if scheme == "ipc" and _is_served(rest):
            # ZeroMQ would silently replace the socket file of the other process.
            made.close(linger=0)
            raise UsageError(
                f"--{option} {address} cannot be bound: another process listens there; stop it or "
                "choose another path."
            )
        try:
            host, _, port = rest.rpartition(":")
            # ZeroMQ resolves no names to bind to.
            host = "127.0.0.1" if host == "localhost" else host
            made.ipv6 = host.startswith("[")
            is_file = scheme == "ipc"
            made.bind(address if is_file else f"{scheme}://{host}:{'*' if port == '0' else port}")
        except zmq.ZMQError as error:
            made.close(linger=0)
            if error.errno == zmq.EADDRINUSE:
                why = "another process listens there; stop it or choose another port (* picks one)"
            else:
                why = str(error)
            raise UsageError(f"--{option} {address} cannot be bound: {why}.") from None
        return made


def _is_served(path: str) -> bool:
    """Whether a process listens at this socket file; a killed process leaves its file behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(f"\0{path[1:]}" if path.startswith("@") else path)
        except (BlockingIOError, TimeoutError):  # its backlog is full
            return True
        except OSError:
            return False
    return True
