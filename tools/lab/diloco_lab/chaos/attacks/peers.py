"""Connections of attackers to a broker: raw bytes, or through ZeroMQ with a key.

Raw bytes are only possible without keys (ZMTP 3, RFC 23, mechanism NULL): CURVE would have to be
implemented again. With a key ZeroMQ itself sends, and only complete messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq
from zmq.utils.monitor import parse_monitor_message

from diloco_protocol import messages
from diloco_protocol.clients import Keys, find_keys
from diloco_protocol.clients.handshake import FAILURES
from diloco_protocol.frames import MAX_FRAME_BYTES
from diloco_protocol.roles import Peer as Owner

ANSWERS_WITHIN_S = 2.0  # an attacker waits no longer for an answer
SIGNATURE = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
GONE = zmq.EVENT_DISCONNECTED | FAILURES

Header = dict[str, Any]


def greeting(mechanism: bytes) -> bytes:
    """The first 64 bytes of a ZMTP connection."""
    return SIGNATURE + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def _command(name: bytes, **properties: bytes) -> bytes:
    body = bytes([len(name)]) + name
    for key, value in properties.items():
        called = key.replace("_", "-").encode()
        body += bytes([len(called)]) + called + struct.pack(">I", len(value)) + value
    return b"\x04" + bytes([len(body)]) + body


READY = _command(b"READY", Socket_Type=b"DEALER", Identity=b"")


def frame(body: bytes, *, more: bool) -> bytes:
    """A frame of a message as ZMTP sends it."""
    if len(body) <= 255:
        return bytes([more, len(body)]) + body
    return bytes([2 | more]) + struct.pack(">Q", len(body)) + body


@dataclass
class Tally:
    """The attempts of an attacker, and their results.

    Attributes:
        ended: connections that the broker has ended.
        refused: requests that it has refused.
        through: a sentence for each attempt that should have failed.
        began_at, ended_at: of the monotonic clock.
    """

    messages: int = 0
    connections: int = 0
    bytes: int = 0
    ended: int = 0
    refused: int = 0
    through: list[str] = field(default_factory=list)
    began_at: float = 0.0
    ended_at: float = 0.0

    def got_through(self, sentence: str) -> None:
        if sentence not in self.through:
            self.through.append(sentence)


class RawPeer:
    """A TCP connection for any bytes. Raises OSError once the broker has ended it."""

    def __init__(self, address: str, tally: Tally, *, mechanism: bytes = b"NULL") -> None:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self._tally = tally
        self.socket = socket.create_connection((host, int(port)), ANSWERS_WITHIN_S)
        tally.connections += 1
        try:
            self.write(greeting(mechanism))
            self._read(64)
        except OSError:
            self.close()
            raise

    def greet(self) -> None:
        """Finish the handshake without keys."""
        self.write(READY)
        flags, size = self._read(2)
        self._read(size)
        if flags & 4 == 0:
            raise ConnectionError("the handshake did not end with a command")

    def write(self, data: bytes) -> None:
        self.socket.sendall(data)
        self._tally.bytes += len(data)

    def is_ended(self, within_s: float) -> bool:
        """Whether the broker ends the connection in time; its messages are dropped."""
        until = time.monotonic() + within_s
        while (left := until - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                if not self.socket.recv(1 << 16):
                    return True
            except TimeoutError:
                return False
            except OSError:
                return True
        return False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Leave no state in the kernel: thousands of these are opened.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            came = self.socket.recv(size - len(found))
            if not came:
                raise ConnectionError("the broker has ended the connection")
            found += came
        return found


class Peer:
    """A DEALER with or without a key, which never reconnects."""

    def __init__(
        self, address: str, context: zmq.Context[Any], tally: Tally, keys: Keys | None = None
    ) -> None:
        self._tally = tally
        self.socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.set(zmq.RECONNECT_IVL, -1)
        self.socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.set(zmq.SNDTIMEO, 1000)
        if keys is not None:
            keys.lock(self.socket)
        self._address = address
        self._monitor: zmq.Socket[Any]
        self._connection: int | None = None  # a descriptor of it, of a peer that does not read

    def connect(self, *, reads: bool = True) -> Peer:
        """Connect; without `reads` only the system's buffers take in data."""
        if not reads:
            self.socket.set(zmq.RCVHWM, 1)
            self.socket.set(zmq.RCVBUF, 4096)
        events = GONE if reads else GONE | zmq.EVENT_CONNECTED
        self._monitor = self.socket.get_monitor_socket(events)
        self.socket.connect(self._address)
        if not reads and self._monitor.poll(int(1000 * ANSWERS_WITHIN_S)):
            event: Any = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_CONNECTED:
                self._connection = os.dup(event["value"])
        self._tally.connections += 1
        return self

    def send(self, *frames: bytes) -> bool:
        """Whether it was sent: not on an ended connection."""
        try:
            self.socket.send_multipart(frames)
        except zmq.ZMQError:
            return False
        self._tally.messages += 1
        self._tally.bytes += sum(map(len, frames))
        return True

    def say(self, message: messages.Message) -> bool:
        return self.send(messages.encode(message))

    def hear(self, *kinds: str, within_s: float | None = None) -> Header | None:
        """The next message of one of these kinds, or of any; None without one in time, or at the end."""
        until = time.monotonic() + (ANSWERS_WITHIN_S if within_s is None else within_s)
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (left := until - time.monotonic()) > 0:
            ready = dict(poller.poll(int(1000 * left) + 1))
            if self.socket in ready:
                header: Header = msgpack.unpackb(self.socket.recv_multipart()[0])
                if not kinds or header["kind"] in kinds:
                    return header
            elif self._monitor in ready:
                return None
        return None

    def asks(self, action: str, **arguments: Any) -> Header | None:
        """The answer to a control request: a `result`, an `error`, or None."""
        self.say(messages.Control(action, 1, arguments))
        return self.hear("result", "error")

    def is_ended(self, within_s: float) -> bool:
        """Whether the broker has ended the connection, or ends it in time.

        ZeroMQ does not notice the end of a connection that it does not read; the system does.
        """
        if self._connection is None:
            return bool(self._monitor.poll(int(1000 * within_s)))
        poll = select.poll()
        poll.register(self._connection, select.POLLHUP | select.POLLERR | select.POLLRDHUP)
        return bool(poll.poll(int(1000 * within_s)))

    def close(self) -> None:
        if self._connection is not None:
            os.close(self._connection)
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)


@dataclass
class Scene:
    """The target, the identity and the time of an attacker.

    Attributes:
        keys: its key, if any.
        folder: the broker's keys, if it has keys: some attacks take others from it.
        description: the packed manifest of the run's model.
    """

    address: str
    seconds: float
    keys: Keys | None = None
    folder: str = ""
    description: bytes = b""
    feed: str = ""

    def __post_init__(self) -> None:
        self.tally = Tally()
        self.context: zmq.Context[Any] = zmq.Context()
        self._until = time.monotonic() + self.seconds

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self._until

    @property
    def digest(self) -> bytes:
        """The digest of the description in a join."""
        return hashlib.sha256(self.description).digest()

    @property
    def worker_id(self) -> str:
        """The name under which it may join."""
        return "stranger" if self.keys is None else self.keys.peer.name

    def key_of(self, owner: Owner) -> Keys:
        """A key of the drill, from the broker's folder."""
        found = find_keys(f"{self.folder}/clients/{owner.role.value}-{owner.name}.key")
        assert found is not None
        return found

    def peer(self, *, reads: bool = True) -> contextlib.AbstractContextManager[Peer]:
        """A connection through ZeroMQ with our key."""
        return self.peer_with(self.keys, reads=reads)

    @contextlib.contextmanager
    def peer_with(self, keys: Keys | None, *, reads: bool = True) -> Iterator[Peer]:
        peer = Peer(self.address, self.context, self.tally, keys)
        try:
            yield peer.connect(reads=reads)
        finally:
            peer.close()

    @contextlib.contextmanager
    def raw(self) -> Iterator[RawPeer]:
        """A connection without a key, ready for messages."""
        peer = RawPeer(self.address, self.tally)
        try:
            peer.greet()
            yield peer
        finally:
            peer.close()

    def repeat(self, attempt: Callable[[], None]) -> None:
        """Repeat until the time is over, at least once; the broker may end each attempt."""
        while True:
            try:
                attempt()
            except (OSError, zmq.ZMQError):
                self.tally.ended += 1
            if not self.goes_on:
                return

    def close(self) -> None:
        self.context.destroy(linger=0)
