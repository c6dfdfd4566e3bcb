"""The sockets of a process to its broker: the `Network` of its executor."""

from __future__ import annotations

import logging
import time
from collections.abc import Container
from typing import Any

import zmq

from diloco_protocol import ProtocolError, pack, unpack
from diloco_protocol.clients.keys import Keys
from diloco_protocol.clients.same_host import can_be_entered, leads_to
from diloco_protocol.messages import Message, Welcome
from diloco_worker.session import events
from diloco_worker.session.connection import Phase
from diloco_worker.session.session import Session
from diloco_worker.transport.broker_address import BrokerAddress, Given
from diloco_worker.transport.connections import NOW, Changes, Connections
from diloco_worker.transport.executor import Executor
from diloco_worker.transport.follower import Follower
from diloco_worker.transport.fragment_buffers import check_length

logger = logging.getLogger("diloco.worker")

# After this many consecutive breaks of the Unix socket alone the next session uses TCP. One break may
# be that of a killed broker.
BREAKS_OF_SHORTCUT = 2
# Messages received from one socket before the next is polled.
BATCH = 64
# Milliseconds for the last message, `leave`, to be sent.
LEAVE_LINGER_MS = 1000
# A log line is not repeated within this time, for at most this many lines.
REPEAT_S = 30.0
SENTENCES = 100


class RepeatedLines(dict[str, float]):
    """When each sentence was last logged, to suppress repetitions."""

    def is_due(self, text: str, now: float) -> bool:
        """Whether to log this sentence now."""
        if now - self.get(text, -REPEAT_S) < REPEAT_S:
            return False
        self.pop(text, None)  # the latest comes last
        self[text] = now
        while len(self) > SENTENCES:
            del self[next(iter(self))]
        return True


class BrokerConnection:
    """Belongs to one thread, apart from its public attributes.

    `poller` has the sockets of the thread. A subclass sets `executor` and `session` before any call.
    """

    executor: Executor | Follower
    session: Session | Follower

    def __init__(self, address: Given, keys: Keys | None) -> None:
        # As given, or where the broker was found.
        self.address = address if isinstance(address, str) else "the address that server() returns"
        self.refused_key: str | None = None  # why the broker rejected our key
        self.shortcut = ""
        self.bytes_up = 0
        self.bytes_down = 0
        self.last_error: str | None = None  # the last thing that went wrong, a sentence
        self.said = RepeatedLines()  # recent log lines
        self._where = BrokerAddress(address)
        self._keys = keys
        self.poller = zmq.Poller()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._connections: Connections | None = None
        self._breaks_of_shortcut = 0  # consecutive, of it alone

    def now(self) -> float:
        return time.monotonic()

    # What the thread does.

    def receive(self, ready: Container[object] | None = None) -> None:
        """Handle the messages received. `ready`: the readable sockets, if known."""
        connections = self._connections
        if connections is None:
            return
        for each in connections.sockets:
            if (ready is None or each in ready) and not each.closed:
                self._receive(each)
        has_changed = ready is None or connections.may_have_changed(ready)
        if self._connections is connections and has_changed:
            self._follow(connections, connections.changes())

    def look_for_the_broker(self) -> float | None:
        """Follow a broker that has moved while its address does not answer. Returns the wake-up time."""
        wakes_at, next_look = self.session.wakes_at(), self._where.next_look()
        if next_look is None or self.session.phase is not Phase.CONNECTING:
            return wakes_at
        if self.now() >= next_look and self._where.look(self.now()):
            self.disconnect()
            self.connect()
        next_look = self._where.next_look()
        return min((at for at in (wakes_at, next_look) if at is not None), default=None)

    def _receive(self, source: zmq.Socket[bytes]) -> None:
        connections = self._connections
        for _ in range(BATCH):
            if self._connections is not connections:
                return
            try:
                frames = source.recv_multipart(NOW, copy=False)
            except zmq.Again:
                return
            buffers = [frame.buffer for frame in frames]
            self.bytes_down += sum(buffer.nbytes for buffer in buffers)
            try:
                message, payload = unpack(buffers)
                if payload is not None:
                    check_length(message, payload, self.session.layout, self.session.config)
            except ProtocolError as error:
                text = f"The broker sent a message that cannot be read: {error}"
                if isinstance(self.session, Session):
                    self.say(text, trouble=True)
                else:
                    self.executor.feed(events.Disconnected(text))
                continue
            self._take(message, payload)

    def _take(self, message: Message, payload: memoryview | None) -> None:
        if isinstance(message, Welcome):
            self._shorten(message)
        self.executor.payload = payload
        self.executor.feed(events.Received(message))
        self.executor.payload = None

    def _follow(self, connections: Connections, changes: Changes) -> None:
        """Report what the monitors of these connections have seen."""
        self.refused_key = None if changes.connected else changes.refused
        if changes.connected:
            self.executor.feed(events.Connected())
        if changes.refused is not None and changes.is_final:
            self.executor.feed(events.LockedOut(changes.refused))
        elif changes.broken is not None:
            # Handle messages from before the break first: the poll checks messages before monitors, so
            # it may have missed them.
            for each in connections.sockets:
                if self._connections is connections:
                    self._receive(each)
            if self._connections is not connections:
                return
            is_alone = connections.is_shortened and changes.is_of_bulk_alone
            self._breaks_of_shortcut = self._breaks_of_shortcut + 1 if is_alone else 0
            self.executor.feed(events.Disconnected(changes.broken))
        elif changes.unreached and not changes.connected:
            self.executor.feed(events.Unreached())

    def _shorten(self, welcome: Welcome) -> None:
        """Send chunks through the Unix socket of a broker on this machine.

        Not where it was reached at another address than its own, since then there is a proxy or a
        tunnel.
        """
        connections, address = self._connections, welcome.ipc
        self.shortcut = ""
        if connections is None or address is None or connections.is_shortened:
            return
        if self._breaks_of_shortcut >= BREAKS_OF_SHORTCUT:
            self._breaks_of_shortcut = 0
            return
        if leads_to(self.address, welcome.bound or "") and can_be_entered(address):
            self._unwatch(connections)
            connections.shorten(address)
            self._watch(connections)
            self.shortcut = address

    # What the session asks for.

    def connect(self, place: int = 0) -> None:
        self.refused_key = None  # the next connection may be accepted
        self._where.turn_to(place)
        self._where.look(self.now())
        if (address := self._where.address) is None:
            return  # the file or function has none yet
        if address != self.address:
            self.address = address
            if self._where.count == 1:
                self.say(f"The broker is at {address} now.")
        assert self._context is not None and self._connections is None
        self._adopt(Connections(self._context, address, self._keys))

    def connect_bulk(self, address: str, shortcut: str) -> None:
        """Open a follower's data connection, through this Unix socket where possible."""
        assert self._context is not None
        connections = Connections(self._context, address, self._keys, names=("bulk",))
        if shortcut and can_be_entered(shortcut):
            connections.shorten(shortcut)
        self._adopt(connections)

    def _adopt(self, connections: Connections) -> None:
        self._connections = connections
        self._watch(connections)

    def _watch(self, connections: Connections) -> None:
        for each in connections.pollable:
            self.poller.register(each, zmq.POLLIN)

    def _unwatch(self, connections: Connections) -> None:
        for each in connections.pollable:
            self.poller.unregister(each)

    def disconnect(self, linger_ms: int = 0) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            self._unwatch(connections)
            connections.close(linger_ms)

    def send(self, message: Message, payload: Any = None, *, bulk: bool = False) -> None:
        connections = self._connections
        if connections is None:
            return
        frames = pack(message, payload)
        if not connections.send(frames, bulk=bulk):
            # Credit is far below this limit, so the connection is stuck.
            self.say("The connection to the broker accepts no more data.", trouble=True)
            return
        self.bytes_up += sum(memoryview(frame).nbytes for frame in frames)

    def say(self, text: str, *, trouble: bool = False) -> None:
        if trouble:
            self.last_error = text
        if self.said.is_due(text, self.now()):
            logger.log(logging.WARNING if trouble else logging.INFO, "%s", text)
