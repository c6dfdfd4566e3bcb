"""The broker's sockets: the ROUTER, the PUB, and what wakes the loop."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import zmq

from diloco_protocol.errors import UsageError
from diloco_protocol.frames import KEEPALIVE_IDLE_S, MAX_FRAME_BYTES

# How long the last messages may take to get out.
LINGER_MS = 1000
SNAPSHOTS_KEPT = 10
# As plain numbers: the sums of enum members cost more than the sends.
MORE = int(zmq.SNDMORE)
ROUTE_FLAGS = int(zmq.SNDMORE | zmq.NOBLOCK)
NOW = int(zmq.NOBLOCK)


class Sockets:
    """All of them, bound: the ROUTER to `bind`, the PUB to `feed`; port 0 or * picks a free one.

    `address` and `feed_address` say where they are. Only `wake` may be called from another thread.
    Raises UsageError for an address that cannot be bound.
    """

    def __init__(self, bind: str, feed: str) -> None:
        self._context = zmq.Context()
        try:
            self._router = _bind(self._context, zmq.ROUTER, bind, "bind")
            self._pub = _bind(self._context, zmq.PUB, feed, "feed")
        except UsageError:
            self._context.destroy(linger=0)
            raise
        self.address = self._router.get_string(zmq.LAST_ENDPOINT)
        self.feed_address = self._pub.get_string(zmq.LAST_ENDPOINT)
        # A worker that was killed shows as a closed connection long before its heartbeats are missed.
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self._bell.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._alarm, zmq.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait for a message or for `wake`, at most so long. Returns whether there is a message."""
        found = dict(self._poller.poll(max(0, int(seconds * 1000)) + (seconds > 0)))
        if self._alarm.fileno() in found:
            with contextlib.suppress(BlockingIOError):
                self._alarm.recv(4096)
        return self._router in found

    def wake(self) -> None:
        """Make `wait` return; from any thread."""
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nobody waits
            self._bell.send(b"!")

    def receive(self) -> list[zmq.Frame] | None:
        """The route and the frames of the next message; None when there is none."""
        try:
            return self._router.recv_multipart(NOW, copy=False)
        except zmq.Again:
            return None

    def send(self, route: bytes, frames: list[Any], *, copy: bool) -> bool:
        """False when the connection does not exist any more."""
        try:
            self._router.send(route, ROUTE_FLAGS)
            for frame in frames[:-1]:
                self._router.send(frame, MORE)
            self._router.send(frames[-1], copy=copy)
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def publish(self, message: bytes) -> None:
        """To all subscribers."""
        self._pub.send(message)

    def lost_a_connection(self) -> bool:
        """Has a connection of the ROUTER been closed since this was asked last?"""
        lost = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            lost = True
        return lost

    def close(self) -> None:
        """Send what is left, for at most a second, and close."""
        self._router.disable_monitor()
        self._alarm.close()
        self._bell.close()
        self._context.destroy(linger=LINGER_MS)


def _bind(context: zmq.Context[Any], kind: int, address: str, option: str) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.linger = LINGER_MS
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    if kind == zmq.PUB:
        # What is kept for a subscriber that does not read: whole snapshots, of 150 kB with 500 workers.
        socket.set(zmq.SNDHWM, SNAPSHOTS_KEPT)
    if kind == zmq.ROUTER:
        # Without it a message to a peer that is gone or full is dropped in silence.
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    try:
        scheme, _, rest = address.partition("://")
        host, _, port = rest.rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host  # ZeroMQ resolves no names to bind to
        socket.ipv6 = host.startswith("[")
        socket.bind(f"{scheme}://{host}:{'*' if port == '0' else port}")
    except zmq.ZMQError as error:
        socket.close(linger=0)
        if error.errno == zmq.EADDRINUSE:
            why = "something else listens there; stop it or choose another port (* picks one)"
        else:
            why = str(error)
        raise UsageError(f"--{option} {address} cannot be bound: {why}.") from None
    return socket
