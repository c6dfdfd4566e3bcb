"""The role "transport": either end of our frames, headers and credits, without work on the chunks.

Up is a worker's push (bulk DEALER to ROUTER, an `ack` for each chunk on control), down a broker's
reply (ROUTER to bulk DEALER, credit given back in halves of the window).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import zmq

from diloco_protocol import VersionId, pack, unpack
from diloco_protocol.frames import MAX_BUFFER_BYTES, MAX_FRAME_BYTES
from diloco_protocol.messages import Ack, Chunk, Credit, Message

SESSION = bytes(16)
VERSION = VersionId("0" * 16, 1, 1)


class Role:
    """Either end."""

    def __init__(self, _: object) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._buffer = memoryview(bytearray(MAX_BUFFER_BYTES))
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._control: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._bulk: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for each in (self._router, self._control, self._bulk):
            each.linger = 0
            each.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._routes: dict[str, bytes] = {}

    def bind(self) -> dict[str, Any]:
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.bind("tcp://127.0.0.1:*")
        return {"address": self._router.get_string(zmq.LAST_ENDPOINT)}

    def connect(self, address: str) -> None:
        for socket, name in ((self._control, b"control"), (self._bulk, b"bulk")):
            socket.connect(address)
            socket.send(name)

    def meet(self) -> None:
        """Learn the routes of both connections."""
        while len(self._routes) < 2:
            route, name = self._router.recv_multipart()
            self._routes[name.decode()] = route

    def push(self, chunks: int, size: int, window: int) -> dict[str, Any]:
        """The worker's end, up."""
        began, cpu = time.monotonic(), time.process_time()
        credit, payload = window, self._buffer[:size]
        sent = acknowledged = 0
        while acknowledged < chunks:
            while credit and sent < chunks:
                chunk = Chunk(0, sent, session=SESSION, push_id=1)
                self._bulk.send_multipart(pack(chunk, payload), copy=False)
                credit, sent = credit - 1, sent + 1
            message = _read(self._control.recv_multipart(copy=False))
            assert isinstance(message, Ack)
            credit += len(message.chunks)
            acknowledged += len(message.chunks)
        return {"began": began, "ended": time.monotonic(), "cpu": time.process_time() - cpu}

    def collect(self, chunks: int) -> dict[str, Any]:
        """The broker's end, up."""
        cpu = time.process_time()
        for _ in range(chunks):
            _, *frames = self._router.recv_multipart(copy=False)
            message = _read(frames)
            assert isinstance(message, Chunk)
            self._router.send(self._routes["control"], zmq.SNDMORE)
            self._router.send_multipart(pack(Ack(1, 0, (message.index,))), copy=False)
        return {"cpu": time.process_time() - cpu}

    def reply(self, chunks: int, size: int, window: int) -> dict[str, Any]:
        """The broker's end, down."""
        began, cpu = time.monotonic(), time.process_time()
        credit, payload = window, self._buffer[:size]
        for index in range(chunks):
            while not credit:
                message = _read(self._router.recv_multipart(copy=False)[1:])
                assert isinstance(message, Credit)
                credit += message.chunks
            self._router.send(self._routes["bulk"], zmq.SNDMORE)
            chunk = Chunk(0, index, version=VERSION)
            self._router.send_multipart(pack(chunk, payload), copy=False)
            credit -= 1
        used = time.process_time() - cpu
        while credit < window:  # what is given back after the last chunk
            message = _read(self._router.recv_multipart(copy=False)[1:])
            assert isinstance(message, Credit)
            credit += message.chunks
        return {"began": began, "cpu": used}

    def pull(self, chunks: int, window: int) -> dict[str, Any]:
        """The worker's end, down."""
        cpu, owed = time.process_time(), 0
        batch = max(1, window // 2)
        for index in range(chunks):
            message = _read(self._bulk.recv_multipart(copy=False))
            assert isinstance(message, Chunk)
            owed += 1
            if owed == batch or index == chunks - 1:
                self._control.send_multipart(pack(Credit(owed, SESSION)), copy=False)
                owed = 0
        return {"ended": time.monotonic(), "cpu": time.process_time() - cpu}


def _read(frames: Sequence[zmq.Frame]) -> Message:
    message, _ = unpack([frame.buffer for frame in frames])
    return message
