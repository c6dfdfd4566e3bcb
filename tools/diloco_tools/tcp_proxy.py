"""A TCP proxy for the drill, the benchmark and tests: it can break, reject and delay connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

HOST = "127.0.0.1"
CONNECT_WITHIN_S = 5.0
END_WITHIN_S = 10.0
PIECE = 1 << 16  # bytes read at a time
# One direction of a connection: maps received bytes to those that pass, and whether it breaks there.
Gate = Callable[[bytes], tuple[bytes, bool]]


@dataclass(frozen=True)
class Connection:
    """Both ends of a connection through the proxy; connections are numbered 0, 1, ..."""

    number: int
    near: socket.socket
    far: socket.socket
    ended: threading.Barrier

    def shut(self) -> None:
        _shut(self.near)
        _shut(self.far)


P = TypeVar("P", bound="TcpProxy")


class TcpProxy:
    """Forwards bytes both ways to `target`, each direction in a thread. A context manager.

    The address of the proxy stays the same while its target goes and comes back.
    Subclasses filter the bytes in `gate`.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.address = f"tcp://{HOST}:{self.port}"  # where it listens
        self._lock = threading.RLock()
        self._connections = 0
        self._open: set[Connection] = set()
        self._threads: list[threading.Thread] = []
        self._is_shut = False
        self.in_background(self._accept)

    def __enter__(self: P) -> P:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def gate(self, connection: int, up: bool) -> Gate:
        """The gate of one direction of this connection. Called with the lock held."""
        return lambda data: (data, False)

    def forward(self, source: socket.socket, sink: socket.socket, gate: Gate, *, up: bool) -> None:
        """One direction of a connection, until either end is gone or the gate breaks it."""
        breaks = False
        while not breaks and (data := source.recv(PIECE)):
            with self._lock:
                passing, breaks = gate(data)
            sink.sendall(passing)

    def cut(self) -> None:
        with self._lock:
            for each in self._open:
                each.shut()

    def shut(self) -> None:
        """Break every connection and reject new ones until `open`."""
        with self._lock:
            self._is_shut = True
            self.cut()

    def open(self) -> None:
        """Let connections through again."""
        with self._lock:
            self._is_shut = False

    def close(self) -> None:
        """Break every connection and accept no more."""
        self.shut()
        _shut(self._listener)
        self._listener.close()
        for thread in self._threads:
            thread.join(END_WITHIN_S)

    def in_background(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        """Start a thread of the proxy; it ends when its connection does."""
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                far = socket.create_connection(self._target, CONNECT_WITHIN_S)
            except OSError:  # the target is down
                near.close()
                continue
            far.settimeout(None)
            for end in (
                near,
                far,
            ):  # do not delay a small message until the last one is acknowledged
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                connection = Connection(self._connections, near, far, threading.Barrier(2))
                up, down = (self.gate(connection.number, way) for way in (True, False))
                self._connections += 1
                self._open.add(connection)
                if self._is_shut:
                    connection.shut()
            self.in_background(self._pump, connection, up, True)
            self.in_background(self._pump, connection, down, False)

    def _pump(self, connection: Connection, gate: Gate, up: bool) -> None:
        source, sink = connection.near, connection.far
        if not up:
            source, sink = sink, source
        with contextlib.suppress(OSError):  # the other direction has shut both
            self.forward(source, sink, gate, up=up)
        connection.shut()
        connection.ended.wait(END_WITHIN_S)  # neither closes what the other still reads from
        with self._lock:
            self._open.discard(connection)
        source.close()


def _shut(end: socket.socket) -> None:
    """Break a connection, also for a thread that is blocked on it."""
    with contextlib.suppress(OSError):  # shut already
        end.shutdown(socket.SHUT_RDWR)
