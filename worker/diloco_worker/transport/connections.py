"""The two DEALER connections of a worker as one thing that is opened and closed as a whole."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from diloco_protocol.clients.handshake import EXPLAINED, Handshakes
from diloco_protocol.clients.keys import Keys
from diloco_protocol.frames import KEEPALIVE_IDLE_S, MAX_FRAME_BYTES
from diloco_worker.transport.forks import inode_of

# Milliseconds between ZeroMQ's own attempts to connect: it doubles them from the first to the second.
RECONNECT_MS = 100
RECONNECT_MAX_MS = 2000
# And until it gives up one that nothing answers: a machine that was asleep or off is found again soon,
# where the system itself would ask at ever longer intervals, up to a minute.
CONNECT_WITHIN_MS = 3000

# As plain numbers: the sums of enum members cost more than the sends.
NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)

_WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED | EXPLAINED


def dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None = None
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A DEALER that connects to a broker, and its monitor."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_WITHIN_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    if keys is not None:
        keys.lock(socket)
    monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_WATCHED)
    monitor.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return socket, monitor


@dataclass
class Changes:
    """What has become of the connections."""

    connected: bool = False  # control came up
    broken: str | None = None  # which connection broke, a sentence
    is_of_bulk_alone: bool = False
    unreached: bool = False  # an attempt to bring control up has failed
    refused: str | None = None  # why the broker and this worker do not come together, a sentence
    # The broker has said so itself. Otherwise it may have been killed in that moment.
    is_final: bool = False


class Connections:
    """Control and bulk to one address, with a monitor for each. Belongs to one thread.

    Connecting to a broker that is not there yet is no error: ZeroMQ goes on trying.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None = None
    ) -> None:
        self._keys = keys
        self._context = context
        self.is_shortened = False  # bulk goes through a Unix socket
        self._sockets: list[zmq.Socket[bytes]] = []
        # Of the connections that are up, by name: ZeroMQ's own descriptor, for a forked child to close,
        # and its inode.
        self.descriptors: dict[str, tuple[int, int | None]] = {}
        self.control, self._control_monitor = self._dealer(context, address)
        self.bulk, self._bulk_monitor = self._dealer(context, address)
        self._handshakes = {name: Handshakes(address, keys) for name in ("control", "bulk")}

    def _dealer(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str
    ) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        made = dealer(context, address, self._keys)
        self._sockets += made
        return made

    def shorten(self, address: str) -> None:
        """Take another way to the same broker for bulk, over which nothing has gone yet."""
        for each in (self.bulk, self._bulk_monitor):
            self._sockets.remove(each)
        self.bulk.disable_monitor()
        self.bulk.close(linger=0)
        self._bulk_monitor.close(linger=0)
        self.descriptors.pop("bulk", None)
        self.bulk, self._bulk_monitor = self._dealer(self._context, address)
        self._handshakes["bulk"] = Handshakes(address, self._keys)
        self.is_shortened = True

    @property
    def pollable(self) -> Sequence[zmq.Socket[bytes]]:
        return self._sockets

    def send(self, frames: Sequence[Any], *, bulk: bool) -> bool:
        """Send a message. False when the connection takes nothing, and then nothing is sent.

        The last frame is sent from where it lies; it must not change any more.
        """
        target = self.bulk if bulk else self.control
        try:
            for frame in frames[:-1]:
                target.send(frame, _MORE)
            target.send(frames[-1], NOW, copy=len(frames) == 1)
        except zmq.Again:
            return False
        return True

    def may_have_changed(self, ready: Container[object]) -> bool:
        """Whether a monitor is among the sockets with something to read."""
        return self._control_monitor in ready or self._bulk_monitor in ready

    def changes(self) -> Changes:
        """What the monitors have seen since the last call."""
        changes = Changes()
        for name, monitor in (("control", self._control_monitor), ("bulk", self._bulk_monitor)):
            while monitor.poll(0):
                event: Any = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
                if not changes.is_final:  # of several reasons the final one
                    failed = self._handshakes[name].failure(event["event"])
                    if failed is not None:
                        changes.refused, changes.is_final = failed.text, failed.is_final
                if event["event"] == zmq.EVENT_CONNECTED:
                    self.descriptors[name] = (event["value"], inode_of(event["value"]))
                elif event["event"] == zmq.EVENT_CONNECT_RETRIED:
                    # Over TCP that is what ZeroMQ is for. A Unix socket was there a moment ago, and a
                    # broker that goes on says where it is now.
                    changes.unreached |= name == "control"
                    if name == "bulk" and self.is_shortened and changes.broken is None:
                        changes.is_of_bulk_alone = True
                        changes.broken = "The Unix socket of the broker is gone."
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    self.descriptors.pop(name, None)
                    changes.is_of_bulk_alone = name == "bulk" and changes.broken is None
                    changes.broken = f"The {name} connection to the broker broke."
                elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    changes.connected |= name == "control"
        return changes

    def close(self, linger_ms: int = 0) -> None:
        """Close everything. What is queued on control gets so long to leave in the background."""
        for socket in (self.control, self.bulk):
            socket.disable_monitor()
        for socket in self._sockets:
            socket.close(linger=linger_ms if socket is self.control else 0)
