"""Transport alone: DEALER and ROUTER with our frames, headers and credits, and nothing done with chunks.

Up is a worker's push (bulk DEALER to ROUTER, an `ack` for each chunk on control), down a broker's
reply (ROUTER to bulk DEALER, credit given back in halves of the window).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from diloco_protocol import CHUNK_ELEMENTS, VersionId, pack, unpack
from diloco_protocol.frames import MAX_BUFFER_BYTES, MAX_FRAME_BYTES
from diloco_protocol.messages import Ack, Chunk, Credit, Message
from diloco_tools.bench.figures import Figure, figure
from diloco_tools.bench.raw import RawSample
from diloco_tools.bench.spread import against, around, in_turn

if TYPE_CHECKING:
    from diloco_tools.bench.actor import Action
    from diloco_tools.bench.stage import Actor, Stage

PART = "transport"
DEFAULT_CHUNK = 2 * CHUNK_ELEMENTS  # bytes in bf16
DEFAULT_WINDOW = 8  # chunks under way: what the broker grants a single push
SESSION = bytes(16)
VERSION = VersionId("0" * 16, 1, 1)


class Peer:
    """Either end; the actions of the role "transport"."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._buffer = memoryview(bytearray(MAX_BUFFER_BYTES))
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._control: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._bulk: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for each in (self._router, self._control, self._bulk):
            each.linger = 0
            each.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._routes: dict[str, bytes] = {}

    @property
    def actions(self) -> Mapping[str, Action]:
        return {
            "bind": self.bind,
            "connect": self.connect,
            "meet": self.meet,
            "push": self.push,
            "collect": self.collect,
            "reply": self.reply,
            "pull": self.pull,
        }

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


def measure(
    stage: Stage,
    *,
    repeats: int,
    total: int,
    chunk_sizes: Sequence[int] = (DEFAULT_CHUNK,),
    windows: Sequence[int] = (DEFAULT_WINDOW,),
) -> list[Figure]:
    """Both ways, for each size of chunks (bytes) and each window; `total` bytes a measurement."""
    worker, broker = stage.actor("transport", "dealer"), stage.actor("transport", "router")
    worker.ask("connect", address=broker.ask("bind")["address"])
    broker.ask("meet")
    figures = []
    for size in chunk_sizes:
        for window in windows:
            figures += _one(stage, worker, broker, repeats, total, size, window)
    stage.dismiss("dealer", "router")
    return figures


def _one(
    stage: Stage, worker: Actor, broker: Actor, repeats: int, total: int, size: int, window: int
) -> list[Figure]:
    chunks = max(1, total // size)
    gigabytes = chunks * size / 1e9

    def both_ways() -> tuple[dict[str, float], dict[str, float]]:
        broker.tell("collect", chunks=chunks)
        sent, got = worker.ask("push", chunks=chunks, size=size, window=window), broker.hear()
        up = {"speed": gigabytes / (sent["ended"] - sent["began"]), "cpu": got["cpu"] / gigabytes}
        worker.tell("pull", chunks=chunks, window=window)
        replied = broker.ask("reply", chunks=chunks, size=size, window=window)
        seconds = worker.hear()["ended"] - replied["began"]
        return up, {"speed": gigabytes / seconds, "cpu": replied["cpu"] / gigabytes}

    limits, found = in_turn(stage.raw.measure, both_ways, repeats)
    speeds = [each.speed for each in limits]
    cpu = around([_both(each) for each in limits])
    row = f"chunks of {size // 1024} KiB, window {window}"
    figures = []
    for i, way in enumerate(("up", "down")):
        mine = [pair[i]["speed"] for pair in found]
        figures.append(figure(PART, row, way, mine, "GB/s"))
        figures.append(figure(PART, row, f"{way} / raw", against(mine, speeds), "x"))
    used = [up["cpu"] + down["cpu"] for up, down in found]
    asked = "cpu transport" if (size, window) == (DEFAULT_CHUNK, DEFAULT_WINDOW) else None
    shares = [mine / raw for mine, raw in zip(used, cpu, strict=True)]
    figures.append(figure(PART, row, "CPU of the ROUTER / raw", shares, "x", asked))
    return figures


def _both(raw: RawSample) -> float:
    """CPU seconds to receive a GB and to send it."""
    return raw.send_cpu + raw.receive_cpu
