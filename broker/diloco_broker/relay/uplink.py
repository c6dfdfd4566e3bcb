"""The connections of a relay to its parent, which are a worker's, in the thread of its loop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from diloco_broker.relay.tensors import RelayTensors
from diloco_broker.shell.sockets import Sockets
from diloco_protocol.clients.keys import Keys
from diloco_protocol.errors import ProtocolError
from diloco_protocol.frames import pack, unpack
from diloco_protocol.messages import Heartbeat, Message
from diloco_worker.session import effects, events
from diloco_worker.session.session import Session
from diloco_worker.transport.connections import NOW, Connections
from diloco_worker.transport.executor import Executor
from diloco_worker.transport.fragment_buffers import check_length
from diloco_worker.transport.whereabouts import Given, Whereabouts

logger = logging.getLogger("diloco.relay")

# Messages taken from one socket in a turn, so that the site is not kept waiting.
BATCH = 64
LEAVE_LINGER_MS = 1000


class Uplink:
    """See the head of this module: the `Network` of a session and its inbox.

    `sockets` are the loop's, which wakes up for what comes; `progress_of` tells how the site does.
    """

    def __init__(
        self,
        address: Given,
        sockets: Sockets,
        tensors: RelayTensors,
        clock: Callable[[], float],
        *,
        progress_of: Callable[[], Heartbeat],
        keys: Keys | None = None,
    ) -> None:
        self.address = address if isinstance(address, str) else "the address that is given"
        self.shortcut = ""
        self.now = clock
        # What the session has to tell, with the chunks of a version that is delivered.
        self.news: deque[tuple[effects.Effect, Any]] = deque()
        self._whereabouts = Whereabouts(address)
        self._sockets, self._tensors, self._keys = sockets, tensors, keys
        self._progress_of = progress_of
        self._context = zmq.Context()
        self._connections: Connections | None = None
        self._executor: Executor | None = None
        self._said: dict[str, float] = {}

    @property
    def progress(self) -> Heartbeat:
        return self._progress_of()

    def begin(self, session: Session) -> None:
        """This session speaks from now on; the last word of the one before goes out."""
        self.disconnect(LEAVE_LINGER_MS)
        self._executor = Executor(session, self, self, self._tensors)

    def tell(self, event: events.Event) -> None:
        if isinstance(event, events.Start):
            event = events.Start(self._whereabouts.count)
        if self._executor is not None:
            self._executor.feed(event)

    def turn(self) -> None:
        """Take in what has come, and let time pass for the session."""
        if self._executor is None:
            return
        connections = self._connections
        if connections is not None:
            for each in connections.sockets:
                if self._connections is connections and not each.closed:
                    self._receive(self._executor, connections, each)
            if self._connections is connections:
                self._see_changes(connections)
        if self._connections is None and self._whereabouts.next_look() is not None:
            self._look_again()
        self.tell(events.Tick())

    def _look_again(self) -> None:
        next_look = self._whereabouts.next_look()
        if next_look is not None and self.now() >= next_look and self._whereabouts.look(self.now()):
            self.connect()

    def _see_changes(self, connections: Connections) -> None:
        changes = connections.changes()
        if changes.connected:
            self.tell(events.Connected())
        if changes.refused is not None and changes.is_final:
            self.tell(events.LockedOut(changes.refused))
        elif changes.broken is not None:
            self.tell(events.Disconnected(changes.broken))
        elif changes.unreached and not changes.connected:
            if changes.refused is None:
                where = self._whereabouts.names(self.address)
                self.say(f"No broker answers at {where}; retrying.", trouble=True)
            self.tell(events.Unreached())
        if changes.refused is not None and not changes.is_final and not changes.connected:
            self.say(changes.refused, trouble=True)

    def _receive(
        self, executor: Executor, connections: Connections, source: zmq.Socket[bytes]
    ) -> None:
        session = executor.session
        for _ in range(BATCH):
            try:
                frames = source.recv_multipart(NOW, copy=False)
            except zmq.Again:
                return
            try:
                message, payload = unpack([frame.buffer for frame in frames])
                if payload is not None:
                    check_length(message, payload, session.layout, session.config)
            except ProtocolError as error:
                self.say(f"The parent sent a message that cannot be read: {error}", trouble=True)
                continue
            executor.payload = payload
            try:
                executor.feed(events.Received(message))
            except Exception:
                logger.exception("A message of the parent could not be handled; the relay goes on.")
            executor.payload = None
            if self._connections is not connections:
                return

    def close(self, reason: str) -> None:
        """Tell the parent, and close everything."""
        self.tell(events.Depart(reason))
        self.disconnect(LEAVE_LINGER_MS)
        self._context.term()

    # What the session asks for.

    def connect(self, place: int = 0) -> None:
        self._whereabouts.turn_to(place)
        self._whereabouts.look(self.now())
        if (address := self._whereabouts.address) is None:
            return
        self.address = address
        self._connections = Connections(self._context, address, self._keys)
        for each in self._connections.pollable:
            self._sockets.watch(each)

    def disconnect(self, linger_ms: int = 0) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            for each in connections.pollable:
                self._sockets.unwatch(each)
            connections.close(linger_ms)

    def send(self, message: Message, payload: Any = None, *, bulk: bool = False) -> None:
        connections = self._connections
        if connections is None:
            return
        if not connections.send(pack(message, payload), bulk=bulk):
            self.say("The connection to the parent accepts no more data.", trouble=True)

    def welcomed(self, epoch: str) -> None:
        self._said.clear()

    def say(self, text: str, *, trouble: bool = False) -> None:
        # The same is said once a minute.
        if self.now() - self._said.get(text, -60.0) >= 60.0:
            self._said = {each: at for each, at in self._said.items() if self.now() - at < 60.0}
            self._said[text] = self.now()
            logger.log(logging.WARNING if trouble else logging.INFO, "Parent: %s", text)

    def take_in(self, effect: effects.Effect, values: Any = None) -> None:
        """The session has something to tell."""
        self.news.append((effect, values))
