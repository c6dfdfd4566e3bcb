"""The connection of a client that asks a broker and waits for the answer. Not for several threads."""

from __future__ import annotations

import math
import time
from typing import Any

import zmq

from diloco_protocol.addresses import can_be_reached
from diloco_protocol.frames import MAX_FRAME_BYTES, pack, unpack
from diloco_protocol.messages import Message


class Dealer:
    """See the head of this module. Raises zmq.ZMQError where the address is none."""

    def __init__(self, address: str) -> None:
        # A context of its own: `close` then never waits for what others have queued.
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            if not can_be_reached(address):
                raise zmq.ZMQError(zmq.EINVAL)
            self._socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def send(self, message: Message) -> None:
        """Raises TypeError or ValueError for what cannot be sent."""
        self._socket.send_multipart(pack(message))

    def receive(self, until: float) -> tuple[Message, Any] | None:
        """The next message and its payload; None when `time.monotonic()` has reached `until`.

        Raises ProtocolError where something came that is no message.
        """
        left = until - time.monotonic()
        if left <= 0 or not self._socket.poll(math.ceil(1000 * left)):
            return None
        return unpack([frame.buffer for frame in self._socket.recv_multipart(copy=False)])

    def close(self) -> None:
        """Close the socket; what has not been sent is dropped. Again does no harm."""
        self._socket.close(linger=0)
        self._context.term()
