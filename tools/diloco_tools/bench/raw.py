"""The limit that all is held against on the wire: one TCP connection between two Python processes.

1 MiB `sendall` on one side, `recv_into` on the other, with buffers that are made once. Nothing is
done with the bytes. A program in Python that has to hand them over cannot be faster.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_tools.bench.actor import Action
    from diloco_tools.bench.stage import Actor

HOST = "127.0.0.1"
CALL_BYTES = 1 << 20  # 1 MiB: what a chunk has in bf16


class End:
    """One end of the connection; the actions of the role "raw"."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self._is_asked = is_asked
        self._buffer = bytearray(CALL_BYTES)
        self._listener = socket.create_server((HOST, 0))
        self._socket: socket.socket | None = None

    @property
    def actions(self) -> Mapping[str, Action]:
        return {
            "port": self.port,
            "connect": self.connect,
            "accept": self.accept,
            "give": self.give,
            "take": self.take,
            "echo": self.echo,
            "ping": self.ping,
            "rest": self.rest,
        }

    def port(self) -> dict[str, Any]:
        return {"port": self._listener.getsockname()[1]}

    def connect(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))

    def accept(self) -> None:
        self._socket, _ = self._listener.accept()

    def give(self, count: int) -> dict[str, Any]:
        """Send so many buffers."""
        assert self._socket is not None
        began, cpu = time.monotonic(), time.process_time()
        for _ in range(count):
            self._socket.sendall(self._buffer)
        return {"began": began, "cpu": time.process_time() - cpu}

    def take(self, count: int) -> dict[str, Any]:
        """Receive as much as so many buffers hold."""
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


@dataclass(frozen=True)
class RawSample:
    """One measurement: speed in GB/s, CPU seconds per GB of either end."""

    speed: float
    send_cpu: float
    receive_cpu: float


@dataclass(frozen=True)
class Ends:
    """Two actors with a connection from one to the other.

    Args:
        through: a port that leads to the receiver's; None: directly.
    """

    sender: Actor
    receiver: Actor

    def connect(self, through: int | None = None) -> None:
        port = self.receiver.ask("port")["port"] if through is None else through
        self.receiver.tell("accept")
        self.sender.ask("connect", port=port)
        self.receiver.hear()

    def move(self, count: int) -> RawSample:
        """Move so many MiB."""
        self.receiver.tell("take", count=count)
        self.sender.tell("give", count=count)
        given, taken = self.sender.hear(), self.receiver.hear()
        gigabytes = count * CALL_BYTES / 1e9
        return RawSample(
            gigabytes / (taken["ended"] - given["began"]),
            given["cpu"] / gigabytes,
            taken["cpu"] / gigabytes,
        )


class RawTcp:
    """Measures the limit again whenever it is asked.

    Args:
        amount: bytes of each measurement.
        samples: gets all of them.
    """

    def __init__(self, ends: Ends, amount: int, samples: list[RawSample]) -> None:
        self._ends = ends
        self._count = max(1, amount // CALL_BYTES)
        self._samples = samples
        ends.connect()
        ends.move(self._count)  # the first one lets the kernel's buffers grow

    def measure(self) -> RawSample:
        sample = self._ends.move(self._count)
        self._samples.append(sample)
        return sample
