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
from diloco_protocol.messages import Heartbeat, Message
from diloco_worker.session import effects, events
from diloco_worker.session.session import Session
from diloco_worker.transport.broker_address import Given
from diloco_worker.transport.broker_connection import LEAVE_LINGER_MS, BrokerConnection
from diloco_worker.transport.connections import Changes, Connections
from diloco_worker.transport.executor import Executor

logger = logging.getLogger("diloco.relay")


class Uplink(BrokerConnection):
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
        super().__init__(
            address,
            keys,
            clock,
            watch=sockets.watch,
            unwatch=sockets.unwatch,
            logger=logger,
            peer="parent",
        )
        # What the session has to tell, with the chunks of a version that is delivered.
        self.news: deque[tuple[effects.Effect, Any]] = deque()
        self._tensors, self._progress_of = tensors, progress_of
        self._context = zmq.Context()
        self._has_begun = False

    @property
    def progress(self) -> Heartbeat:
        return self._progress_of()

    def begin(self, session: Session) -> None:
        """This session speaks from now on; the last word of the one before goes out."""
        self.disconnect(LEAVE_LINGER_MS)
        self.session = session
        self.executor = Executor(session, self, self, self._tensors)
        self._has_begun = True

    def tell(self, event: events.Event) -> None:
        if isinstance(event, events.Start):
            event = events.Start(self._where.count)
        if self._has_begun:
            self.executor.feed(event)

    def turn(self) -> None:
        """Take in what has come, and let time pass for the session."""
        if self._has_begun:
            self.receive()
            self.look_for_the_broker()
            self.tell(events.Tick())

    def _take(self, message: Message, payload: memoryview | None) -> None:
        try:
            super()._take(message, payload)
        except Exception:
            logger.exception("A message of the parent could not be handled; the relay goes on.")

    def _follow(self, connections: Connections, changes: Changes) -> None:
        super()._follow(connections, changes)
        if changes.refused is not None and not changes.is_final and not changes.connected:
            self.say(changes.refused, trouble=True)
        elif changes.unreached and changes.refused is None and not changes.connected:
            where = self._where.names(self.address)
            self.say(f"No broker answers at {where}; retrying.", trouble=True)

    def close(self, reason: str) -> None:
        """Tell the parent, and close everything."""
        self.tell(events.Depart(reason))
        self.disconnect(LEAVE_LINGER_MS)
        if self._context is not None:
            self._context.term()

    # What the session asks for.

    def welcomed(self, epoch: str) -> None:
        self.said.clear()

    def say(self, text: str, *, trouble: bool = False) -> None:
        super().say(f"Parent: {text}", trouble=trouble)

    def take_in(self, effect: effects.Effect, values: Any = None) -> None:
        """The session has something to tell."""
        self.news.append((effect, values))
