"""The proxy between one worker of the drill and the broker: it also cuts within a message."""

from __future__ import annotations

import contextlib
import socket

from diloco_tools.tcp_proxy import Gate, TcpProxy


class DrillProxy(TcpProxy):
    """Breaks all of its connections when it is told to, or behind a byte that is still to come."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._left: int | None = None  # bytes that still pass before a cut; None: no cut is to come

    def cut_within(self, count: int) -> None:
        """Break every connection once `count` more bytes have passed, both ways together."""
        with self._lock:
            self._left = count

    @property
    def is_armed(self) -> bool:
        """Whether such a cut is still to come."""
        with self._lock:
            return bool(self._left)

    def cut(self) -> None:
        with self._lock:
            self._left = None
            super().cut()

    def gate(self, connection: int, up: bool) -> Gate:
        return self._passing

    def forward(self, source: socket.socket, sink: socket.socket, gate: Gate, *, up: bool) -> None:
        with contextlib.suppress(OSError):
            super().forward(source, sink, gate, up=up)
        with self._lock:
            if self._left == 0:
                self.cut()

    def _passing(self, data: bytes) -> tuple[bytes, bool]:
        """What of this still passes, and whether the cut comes behind it."""
        if self._left is None:
            return data, False
        passing = data[: self._left]
        self._left -= len(passing)
        return passing, self._left == 0
