"""The connection of a client that sends requests to a broker and waits for replies. Not thread-safe."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

import zmq

from diloco_protocol.clients.address_file import wrong_address
from diloco_protocol.clients.handshake import HandshakeMonitor
from diloco_protocol.clients.keys import Keys
from diloco_protocol.errors import UsageError
from diloco_protocol.frames import MAX_FRAME_BYTES, pack, unpack
from diloco_protocol.messages import Message


class Dealer:
    """A DEALER socket with its handshake monitor. Raises UsageError for an invalid address."""

    OPTIONS: ClassVar[Mapping[int, int]] = {
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    }  # of the socket

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        # A separate context: `close` then never waits for messages of other sockets.
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option, value in self.OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        if keys is not None:
            keys.lock(self._socket)
        self._monitor = HandshakeMonitor(self._socket, address, keys)
        try:
            self._socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise wrong_address("The address", address) from None

    def send(self, message: Message, payload: Any = None) -> None:
        """Send a message; raises TypeError or ValueError for values that cannot be sent."""
        # Once a handshake has failed for good there is no connection to wait for: `receive` says why.
        with suppress(zmq.Again):
            self._socket.send_multipart(pack(message, payload), zmq.NOBLOCK)

    def receive(self, until: float) -> tuple[Message, Any] | None:
        """The next message and its payload; None when `time.monotonic()` has reached `until`.

        Raises ProtocolError for bytes that are not a message, and UsageError if the broker requires a
        key or rejects this one, or the address is that of its feed.
        """
        while (left := until - time.monotonic()) > 0:
            ready = zmq.select([self._socket, self._monitor.socket], [], [], left)[0]
            if self._socket in ready:
                break
            if self._monitor.socket in ready and self._monitor.look():
                raise UsageError(str(self._monitor.failure))
        else:
            return None
        return unpack([frame.buffer for frame in self._socket.recv_multipart(copy=False)])

    @property
    def failure(self) -> str | None:
        """Why the last handshake failed, a sentence; None if it did not fail."""
        return self._monitor.failure

    def close(self) -> None:
        """Close the socket; unsent messages are dropped. May be called more than once."""
        self._monitor.close()
        self._socket.close(linger=0)
        self._context.term()
