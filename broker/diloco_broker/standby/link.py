"""The connection of a standby to its hub: messages go when there is a connection, and wait for none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from diloco_protocol.clients.handshake import EXPLAINED, Handshakes
from diloco_protocol.clients.keys import Keys
from diloco_protocol.errors import ProtocolError
from diloco_protocol.frames import KEEPALIVE_IDLE_S, MAX_FRAME_BYTES, pack, unpack
from diloco_protocol.messages import Message

logger = logging.getLogger("diloco.standby")

# Between ZeroMQ's attempts to connect. A hub that was started again waits for its standby.
RECONNECT_MS = 100
RECONNECT_MAX_MS = 500
# And until one is given up that nothing answers.
CONNECT_WITHIN_MS = 2000
# Messages that are taken in a turn: the hub sends a few a second.
BATCH = 64
NOW = int(zmq.NOBLOCK)


class HubLink:
    """See the head of this module. Belongs to one thread."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        self.address, self._handshakes = address, Handshakes(address, keys)
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_WITHIN_MS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.IPV6, int("[" in address))
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        # Nothing waits for a connection: what was said before one broke is worth nothing on the next.
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        if keys is not None:
            keys.lock(self.socket)
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(EXPLAINED)
        self.monitor.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._said = ""

    def send(self, message: Message) -> None:
        """Send it where there is a connection; else it is dropped."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(pack(message), NOW)

    def receive(self) -> Iterator[Message]:
        """What has come."""
        for _ in range(BATCH):
            try:
                frames = self.socket.recv_multipart(NOW, copy=False)
            except zmq.Again:
                return
            try:
                yield unpack([frame.buffer for frame in frames])[0]
            except ProtocolError as error:
                logger.warning("The hub sent a message that cannot be read: %s", error)

    def broke(self) -> bool:
        """Has the connection broken since this was asked last? What keeps it from coming up is said."""
        has_broken = False
        while self.monitor.poll(0):
            event: Any = parse_monitor_message(self.monitor.recv_multipart(NOW))["event"]
            has_broken |= event == zmq.EVENT_DISCONNECTED
            found = self._handshakes.failure(event)
            if found is not None and found.text != self._said:
                self._said = found.text
                logger.warning("The hub at %s: %s", self.address, found.text)
        return has_broken

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
        self._context.term()
