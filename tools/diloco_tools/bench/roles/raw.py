"""The role "raw": one end of a plain TCP connection between two processes of the benchmark."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from diloco_tools.tcp_proxy import HOST

CALL_BYTES = 1 << 20  # 1 MiB: what a chunk has in bf16


class Role:
    """One end of the connection."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self._is_asked = is_asked
        self._buffer = bytearray(CALL_BYTES)
        self._listener = socket.create_server((HOST, 0))
        self._socket: socket.socket | None = None

    def port(self) -> dict[str, Any]:
        return {"port": self._listener.getsockname()[1]}

    def connect(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))

    def accept(self) -> None:
        self._socket, _ = self._listener.accept()

    def give(self, count: int) -> dict[str, Any]:
        """Send `count` buffers."""
        assert self._socket is not None
        began, cpu = time.monotonic(), time.process_time()
        for _ in range(count):
            self._socket.sendall(self._buffer)
        return {"began": began, "cpu": time.process_time() - cpu}

    def take(self, count: int) -> dict[str, Any]:
        """Receive what `count` buffers hold."""
        assert self._socket is not None
        view, cpu = memoryview(self._buffer), time.process_time()
        for _ in range(count):
            filled = 0
            while filled < CALL_BYTES:
                filled += self._socket.recv_into(view[filled:])
        return {"ended": time.monotonic(), "cpu": time.process_time() - cpu}

    def echo(self) -> dict[str, Any]:
        """Send back single bytes until one is 0."""
        assert self._socket is not None
        count = 0
        while self._socket.recv_into(self._buffer, 1) and self._buffer[0]:
            self._socket.sendall(b"1")
            count += 1
        return {"count": count}

    def ping(self, interval_s: float) -> dict[str, Any]:
        """Send a byte on a fixed schedule until the next request comes; how long each took, in s.

        Counted from when it was due, so that those behind a slow one are not left out.
        """
        assert self._socket is not None
        found, next_at = [], time.monotonic()
        while not self._is_asked():
            time.sleep(max(0.0, next_at - time.monotonic()))
            self._socket.sendall(b"1")
            self._socket.recv_into(self._buffer, 1)
            found.append(time.monotonic() - next_at)
            next_at += interval_s
        self._socket.sendall(b"\0")
        return {"seconds": found}

    def rest(self) -> None:
        """Do nothing: being asked for it ends the pings."""
