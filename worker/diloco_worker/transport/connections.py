"""The DEALER connections of a process to its broker, opened and closed together."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from diloco_protocol.clients.handshake import EXPLAINED, Handshakes
from diloco_protocol.clients.keys import Keys
from diloco_protocol.frames import KEEPALIVE_IDLE_S, MAX_FRAME_BYTES
from diloco_worker.transport.forks import monitored

# Milliseconds between ZeroMQ's attempts to connect: doubled from the first to the second.
RECONNECT_MS = 100
RECONNECT_MAX_MS = 2000
# Milliseconds until it gives up an unanswered attempt. The system itself would retry at intervals that
# grow up to a minute.
CONNECT_WITHIN_MS = 3000
# Messages queued on a connection, ZeroMQ's default; a relay queues those of many workers.
UNSENT = 1000

# Plain numbers: adding enum members costs more than sending.
NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)

_WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED | EXPLAINED


def prepared(socket: zmq.Socket[bytes], longest: int) -> zmq.Socket[bytes]:
    """Set options: reconnect soon, accept no message longer than this."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, longest)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    return socket


@dataclass
class Changes:
    """What happened to the connections."""

    connected: bool = False  # control came up
    broken: str | None = None  # which connection broke, a sentence
    is_of_bulk_alone: bool = False
    unreached: bool = False  # an attempt to connect control failed
    refused: str | None = None  # why the handshake failed, a sentence
    is_final: bool = False  # the broker said so; otherwise it may have been killed at that moment


@dataclass
class _Connection:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    handshakes: Handshakes


class Connections:
    """Named connections to one address, each with a monitor. Belongs to one thread.

    A session has control and bulk, a follower bulk alone. ZeroMQ retries until the broker listens.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: Keys | None = None,
        *,
        names: Sequence[str] = ("control", "bulk"),
        unsent: int = UNSENT,
    ) -> None:
        self._keys, self._unsent = keys, unsent
        self._context = context
        self.is_shortened = False  # bulk goes through a Unix socket
        self._by_name = {name: self._connect(address) for name in names}

    def _connect(self, address: str) -> _Connection:
        socket = prepared(self._context.socket(zmq.DEALER), MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, self._unsent)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_WITHIN_MS)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        if self._keys is not None:
            self._keys.lock(socket)
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_WATCHED)
        monitor.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        return _Connection(socket, monitor, Handshakes(address, self._keys))

    def shorten(self, address: str) -> None:
        """Reconnect bulk, on which nothing was sent yet, to another address of the same broker."""
        self._close(self._by_name["bulk"])
        self._by_name["bulk"] = self._connect(address)
        self.is_shortened = True

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets for messages, control first."""
        return [each.socket for each in self._by_name.values()]

    @property
    def pollable(self) -> list[zmq.Socket[bytes]]:
        return [*self.sockets, *(each.monitor for each in self._by_name.values())]

    def send(self, frames: Sequence[Any], *, bulk: bool) -> bool:
        """Send a message; False where the connection accepts nothing, and nothing is sent.

        The last frame is sent without a copy and must not change any more.
        """
        target = self._by_name["bulk" if bulk else "control"].socket
        try:
            for frame in frames[:-1]:
                target.send(frame, _MORE)
            target.send(frames[-1], NOW, copy=len(frames) == 1)
        except zmq.Again:
            return False
        return True

    def may_have_changed(self, ready: Container[object]) -> bool:
        """Whether a monitor is readable."""
        return any(each.monitor in ready for each in self._by_name.values())

    def changes(self) -> Changes:
        """What the monitors have seen since the last call."""
        changes = Changes()
        for name, each in self._by_name.items():
            for event in monitored(each.monitor):
                if not changes.is_final:  # a final reason wins
                    failed = each.handshakes.failure(event["event"])
                    if failed is not None:
                        changes.refused, changes.is_final = failed.text, failed.is_final
                if event["event"] == zmq.EVENT_CONNECT_RETRIED:
                    # Over TCP ZeroMQ retries. A Unix socket is gone for good, and a broker that goes on
                    # sends its new one.
                    changes.unreached |= name == "control"
                    if name == "bulk" and self.is_shortened and changes.broken is None:
                        changes.is_of_bulk_alone = True
                        changes.broken = "The Unix socket of the broker is gone."
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    changes.is_of_bulk_alone = name == "bulk" and changes.broken is None
                    changes.broken = f"The {name} connection to the broker broke."
                elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    changes.connected |= name == "control"
        return changes

    def close(self, linger_ms: int = 0) -> None:
        """Close all; messages queued on control have this long to leave in the background."""
        for name, each in self._by_name.items():
            self._close(each, linger_ms if name == "control" else 0)

    def _close(self, each: _Connection, linger_ms: int = 0) -> None:
        each.socket.disable_monitor()
        each.socket.close(linger=linger_ms)
        each.monitor.close(linger=0)
