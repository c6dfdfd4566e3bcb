"""The connection of a standby to its hub: messages go when there is a connection, and wait for none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import ClassVar

import zmq

from diloco_protocol.clients.dealer import Dealer
from diloco_protocol.clients.keys import Keys
from diloco_protocol.errors import ProtocolError
from diloco_protocol.frames import KEEPALIVE_IDLE_S, pack, unpack
from diloco_protocol.messages import Message

logger = logging.getLogger("diloco.standby")

# Messages that are taken in a turn: the hub sends a few a second.
BATCH = 64
NOW = int(zmq.NOBLOCK)


class HubLink(Dealer):
    """See the head of this module. Belongs to one thread."""

    OPTIONS: ClassVar[Mapping[int, int]] = {
        **Dealer.OPTIONS,
        # Milliseconds between attempts to connect (a hub that was started again waits for its standby),
        # and until one is given up that nothing answers.
        zmq.RECONNECT_IVL: 100,
        zmq.RECONNECT_IVL_MAX: 500,
        zmq.CONNECT_TIMEOUT: 2000,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_IDLE_S,
        # Nothing waits for a connection: what was said before one broke is worth nothing on the next.
        zmq.IMMEDIATE: 1,
    }

    def __init__(self, address: str, keys: Keys | None) -> None:
        super().__init__(address, keys)
        self._address, self._said = address, ""
        self.sockets = self._socket, self._monitor.socket  # to be polled

    def say(self, message: Message) -> None:
        """Send it where there is a connection; else it is dropped."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(pack(message), NOW)

    def heard(self) -> Iterator[Message]:
        """What has come."""
        for _ in range(BATCH):
            try:
                frames = self._socket.recv_multipart(NOW, copy=False)
            except zmq.Again:
                return
            try:
                yield unpack([frame.buffer for frame in frames])[0]
            except ProtocolError as error:
                logger.warning("The hub sent a message that cannot be read: %s", error)

    def broke(self) -> bool:
        """Has the connection broken since this was asked last? What keeps it from coming up is said."""
        self._monitor.has_disconnected = False
        while self._monitor.look():  # the next attempt may find another hub there
            pass
        if self.failure is not None and self.failure != self._said:
            self._said = self.failure
            logger.warning("The hub at %s: %s", self._address, self.failure)
        return self._monitor.has_disconnected
