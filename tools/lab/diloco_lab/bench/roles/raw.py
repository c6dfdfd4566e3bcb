"""The role "raw": plain TCP between processes of the benchmark, and the round trips of a line."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from diloco_tools.tcp_proxy import HOST

CALL_BYTES = 1 << 20  # 1 MiB: the size of a chunk in bf16
PATIENCE_S = 10.0  # for a connection over a line


class RawEnd:
    """One end of a plain TCP connection."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self._is_asked = is_asked
        self._buffer = bytearray(CALL_BYTES)
        self._listener = socket.create_server((HOST, 0))
        self._socket: socket.socket

    def port(self) -> dict[str, int]:
        return {"port": self._listener.getsockname()[1]}

    def connect(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))

    def accept(self) -> None:
        self._socket, _ = self._listener.accept()

    def give(self, count: int) -> dict[str, float]:
        """Send `count` buffers."""
        began, cpu = time.monotonic(), time.process_time()
        for _ in range(count):
            self._socket.sendall(self._buffer)
        return {"began": began, "cpu": time.process_time() - cpu}

    def take(self, count: int) -> dict[str, float]:
        """Receive the bytes of `count` buffers."""
        cpu, view = time.process_time(), memoryview(self._buffer)
        for _ in range(count):
            filled = 0
            while filled < CALL_BYTES:
                filled += self._socket.recv_into(view[filled:])
        return {"ended": time.monotonic(), "cpu": time.process_time() - cpu}

    def echo(self) -> None:
        """Send back single bytes until one is 0."""
        while self._socket.recv_into(self._buffer, 1) and self._buffer[0]:
            self._socket.sendall(b"1")

    def ping(self, interval_s: float) -> dict[str, Any]:
        """Send a byte on a fixed schedule until the next request comes, as `Hearts.beat` does."""
        due: list[float] = []
        found: list[float] = []
        next_at = time.monotonic()
        while not self._is_asked():
            time.sleep(max(0.0, next_at - time.monotonic()))
            self._socket.sendall(b"1")
            self._socket.recv_into(self._buffer, 1)
            due.append(next_at)
            found.append(time.monotonic() - next_at)
            next_at += interval_s
        self._socket.sendall(b"\0")
        return {"sent": len(found), "due": due, "seconds": found}

    def round_trips(self, address: str, count: int) -> dict[str, list[float]]:
        """Seconds that each of `count` connections to tcp://HOST:PORT took: one round trip each."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        found = []
        for _ in range(count):
            began = time.monotonic()
            socket.create_connection((host, int(port)), PATIENCE_S).close()
            found.append(time.monotonic() - began)
        return {"seconds": found}
