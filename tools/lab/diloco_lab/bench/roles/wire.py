"""Either end of what bytes travel over: a plain TCP connection, and our frames over ZeroMQ."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import zmq

from diloco_protocol import VersionId, messages, pack, unpack
from diloco_protocol.frames import MAX_BUFFER_BYTES, MAX_FRAME_BYTES
from diloco_tools.tcp_proxy import HOST

CALL_BYTES = 1 << 20  # 1 MiB: what a chunk has in bf16
PATIENCE_S = 10.0  # for a connection over a line
CONTROL, BULK = b"control", b"bulk"
SESSION = bytes(16)
VERSION = VersionId("0" * 16, 1, 1)
M = TypeVar("M", bound=messages.Message)


class RawEnd:
    """The role "raw": one end of a plain TCP connection between two processes of the benchmark."""

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

    def hold(self, calls: int) -> dict[str, int]:
        """From now on send from, and receive into, memory of `calls` buffers, one after the other."""
        self._buffer = bytearray(b"\1") * (
            calls * CALL_BYTES
        )  # not zeros: the pages are to be there
        return {"bytes": len(self._buffer)}

    def _buffers(self, count: int) -> Iterator[memoryview]:
        """So many of them, round and round through what it holds."""
        view = memoryview(self._buffer)
        for i in range(count):
            start = i * CALL_BYTES % len(view)
            yield view[start : start + CALL_BYTES]

    def give(self, count: int) -> dict[str, float]:
        """Send `count` buffers."""
        began, cpu = time.monotonic(), time.process_time()
        for each in self._buffers(count):
            self._socket.sendall(each)
        return {"began": began, "cpu": time.process_time() - cpu}

    def take(self, count: int) -> dict[str, float]:
        """Receive what `count` buffers hold."""
        cpu = time.process_time()
        for each in self._buffers(count):
            filled = 0
            while filled < CALL_BYTES:
                filled += self._socket.recv_into(each[filled:])
        return {"ended": time.monotonic(), "cpu": time.process_time() - cpu}

    def echo(self) -> None:
        """Send back single bytes until one is 0."""
        while self._socket.recv_into(self._buffer, 1) and self._buffer[0]:
            self._socket.sendall(b"1")

    def ping(self, interval_s: float) -> dict[str, Any]:
        """Send a byte on a fixed schedule until the next request comes; how long each took, in s.

        Counted from when it was due, so that those behind a slow one are not left out.
        """
        found: list[float] = []
        next_at = time.monotonic()
        while not self._is_asked():
            time.sleep(max(0.0, next_at - time.monotonic()))
            self._socket.sendall(b"1")
            self._socket.recv_into(self._buffer, 1)
            found.append(time.monotonic() - next_at)
            next_at += interval_s
        self._socket.sendall(b"\0")
        return {"sent": len(found), "answered": len(found), "seconds": found}


class LineProbe:
    """The role "line-probe": how long it is there and back over a line, by plain connections."""

    def __init__(self, _: object) -> None:
        pass

    def round_trips(self, address: str, count: int) -> dict[str, list[float]]:
        """Seconds that each of `count` connections to tcp://HOST:PORT took: one round trip each."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        found = []
        for _ in range(count):
            began = time.monotonic()
            socket.create_connection((host, int(port)), PATIENCE_S).close()
            found.append(time.monotonic() - began)
        return {"seconds": found}


class TransportEnd:
    """The role "transport": either end of our frames, headers and credits, without work on the chunks.

    Up is a worker's push (bulk DEALER to ROUTER, an `ack` for each chunk on control), down a broker's
    reply (ROUTER to bulk DEALER, credit given back in halves of the window).
    """

    def __init__(self, _: object) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._buffer = memoryview(bytearray(MAX_BUFFER_BYTES))
        self._router = context.socket(zmq.ROUTER)
        self._control, self._bulk = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for each, name in ((self._router, b"router"), (self._control, CONTROL), (self._bulk, BULK)):
            each.identity = name
            each.linger = 0
            each.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)

    def bind(self) -> dict[str, str]:
        self._router.set(zmq.ROUTER_MANDATORY, 1)  # or what goes to nobody is dropped in silence
        self._router.bind("tcp://127.0.0.1:*")
        return {"address": self._router.get_string(zmq.LAST_ENDPOINT)}

    def connect(self, address: str) -> None:
        for dealer in (self._control, self._bulk):
            dealer.connect(address)
            dealer.send(b"here")

    def meet(self) -> None:
        """Wait until both connections are there."""
        for _ in range(2):
            self._router.recv_multipart()

    def push(self, chunks: int, size: int, window: int) -> dict[str, float]:
        """The worker's end, up."""
        began = time.monotonic()
        credit, payload = window, self._buffer[:size]
        sent = acknowledged = 0
        while acknowledged < chunks:
            while credit and sent < chunks:
                chunk = messages.Chunk(0, sent, session=SESSION, push_id=1)
                self._bulk.send_multipart(pack(chunk, payload), copy=False)
                credit, sent = credit - 1, sent + 1
            taken = len(_read(self._control.recv_multipart(copy=False), messages.Ack).chunks)
            credit, acknowledged = credit + taken, acknowledged + taken
        return {"began": began, "ended": time.monotonic()}

    def collect(self, chunks: int) -> dict[str, float]:
        """The broker's end, up."""
        cpu = time.process_time()
        for _ in range(chunks):
            _, *frames = self._router.recv_multipart(copy=False)
            index = _read(frames, messages.Chunk).index
            self._router.send_multipart([CONTROL, *pack(messages.Ack(1, 0, (index,)))], copy=False)
        return {"cpu": time.process_time() - cpu}

    def reply(self, chunks: int, size: int, window: int) -> dict[str, float]:
        """The broker's end, down."""
        began, cpu = time.monotonic(), time.process_time()
        credit, payload = window, self._buffer[:size]
        for index in range(chunks):
            while not credit:
                credit += self._credit()
            chunk = messages.Chunk(0, index, version=VERSION)
            self._router.send_multipart([BULK, *pack(chunk, payload)], copy=False)
            credit -= 1
        used = time.process_time() - cpu
        while credit < window:  # what is given back after the last chunk
            credit += self._credit()
        return {"began": began, "cpu": used}

    def pull(self, chunks: int, window: int) -> dict[str, float]:
        """The worker's end, down."""
        owed, batch = 0, max(1, window // 2)
        for index in range(chunks):
            _read(self._bulk.recv_multipart(copy=False), messages.Chunk)
            owed += 1
            if owed == batch or index == chunks - 1:
                self._control.send_multipart(pack(messages.Credit(owed, SESSION)), copy=False)
                owed = 0
        return {"ended": time.monotonic()}

    def _credit(self) -> int:
        """What the worker's end gives back next."""
        _, *frames = self._router.recv_multipart(copy=False)
        return _read(frames, messages.Credit).chunks


def _read(frames: Sequence[zmq.Frame], kind: type[M]) -> M:
    message, _ = unpack([frame.buffer for frame in frames])
    assert isinstance(message, kind)
    return message
