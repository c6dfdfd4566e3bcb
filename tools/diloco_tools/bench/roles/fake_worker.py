"""Fake workers: they speak the protocol, have no model, and send each chunk from one buffer.

So a machine can hold many workers, or the two of a model with a billion parameters, and what is
measured is the broker. What they receive is counted and dropped.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from diloco_protocol import (
    CHUNK_ELEMENTS,
    Kind,
    Manifest,
    RunConfig,
    TensorEntry,
    VersionId,
    lay_out,
    messages,
    pack,
    unpack,
)
from diloco_protocol.frames import MAX_FRAME_BYTES
from diloco_protocol.records import from_plain

PATIENCE_S = 100.0  # for anything that is waited for
TENSOR_ELEMENTS = 1 << 24  # of each tensor of the model that is pretended
WINDOW = 8  # chunks that the broker may have under way to us: what a real worker gives
CREDIT_BATCH = WINDOW // 2
IDLE_PARAMETERS = 1000  # of the model of idle workers
SOCKETS = 1 << 13  # of all idle workers
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
VALUE = 2.0**-6  # exact in every dtype; small enough to stay finite over any number of rounds
VALUE_BYTES = {"fp32": array("f", [VALUE]).tobytes(), "bf16": b"\x80\x3c", "fp16": b"\x00\x24"}


class Refusal(Exception):
    """The broker said `error` or `rejoin` to something that was meant well."""


def flat_manifest(parameters: int) -> Manifest:
    """A model with this number of trainable fp32 parameters, in tensors of 16M."""
    starts = range(0, parameters, TENSOR_ELEMENTS)
    return Manifest(
        tuple(
            TensorEntry(
                f"layer.{i}.weight",
                (min(TENSOR_ELEMENTS, parameters - start),),
                "float32",
                Kind.TRAINABLE,
            )
            for i, start in enumerate(starts)
        )
    )


@dataclass
class Upload:
    """A push under way. `began` is when its first chunk was sent, `ended` when the last was in."""

    push: messages.Push
    credit: int = 0
    sent: int = 0
    acknowledged: int = 0
    began: float = 0.0
    ended: float = 0.0


class FakeWorker:
    """See the head of this module. One thread, two connections.

    Args:
        manifest: of the model that is pretended; None takes what the run has.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        worker_id: str,
        manifest: Manifest | None,
    ) -> None:
        self.worker_id = worker_id
        self.control = _dealer(context, address)
        self.bulk = _dealer(context, address)
        self._poller = zmq.Poller()
        self._poller.register(self.control, zmq.POLLIN)
        self._poller.register(self.bulk, zmq.POLLIN)
        self._manifest = manifest
        self._buffers: dict[str, memoryview] = {}
        self.session = b""
        self.config: RunConfig | None = None
        self.version: VersionId | None = None
        self.answered: list[float] = []  # when each heartbeat was answered
        self._lengths: list[int] = []  # elements of each chunk
        self._upload: Upload | None = None
        self._got = 0  # chunks of the version that is arriving
        self._arriving: VersionId | None = None
        self._released: VersionId | None = None
        self._owed = 0
        self._pushes = 0

    # Taking part.

    def join(self) -> None:
        """Join, and provide the parameters if the broker asks for them."""
        if self._manifest is None:
            # By its own connection: a broker that sees one close sends an unasked "alive" to everybody.
            self._send(messages.Control("manifest", 1))
            self._await(lambda: self._manifest is not None, "the manifest")
        assert self._manifest is not None
        self._send(messages.Join(self.worker_id, self._manifest))
        self._await(lambda: self.session != b"", "a welcome")

    def leave(self) -> None:
        self._send(messages.Leave(self.session))
        for each in (self.control, self.bulk):
            each.close(linger=1000)

    def learn_version(self) -> None:
        """Wait until there are parameters, and learn what they are called, without the bytes of them."""
        self._pull(-1)
        self._await(lambda: self._is_here, "the first parameters")
        self.version = self._released

    def push(self, *, pull: bool) -> dict[str, float]:
        """Push once; with `pull` wait for the version that contains it, too.

        Returns:
            When the first chunk was sent, when the last was in at the broker, when all was over.
        """
        assert self.config is not None
        if pull:
            self._pull(-1 if self.version is None else self.version.counter)
        upload = self._offer(self.config.wire_dtype, base=self.version)
        self._await(lambda: upload.ended > 0 and (not pull or self._is_here), "the round")
        if pull:
            self.version = self._released
        self._upload = None
        return {"began": upload.began, "up": upload.ended, "ended": time.monotonic()}

    def beat(self) -> None:
        """Send a heartbeat; `answered` will have the time of the answer."""
        self._send(messages.Heartbeat(self.session, 0))

    def turn(self, timeout_ms: int) -> None:
        """Wait at most `timeout_ms` for messages and deal with them."""
        for each, _ in self._poller.poll(timeout_ms):
            self._receive(each)

    # Within.

    def _await(self, what: Callable[[], bool], doing: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.worker_id} waited {PATIENCE_S:g} s for {doing}")
            self.turn(1000)

    def _send(
        self, message: messages.Message, payload: memoryview | None = None, *, bulk: bool = False
    ) -> None:
        target = self.bulk if bulk else self.control
        target.send_multipart(pack(message, payload), copy=False)

    def _receive(self, source: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            message, _ = unpack([frame.buffer for frame in frames])
            self._take(message)

    def _take(self, message: messages.Message) -> None:
        match message:
            case messages.Welcome():
                self._welcomed(message)
            case messages.Chunk(version=version):
                if version != self._arriving:
                    self._arriving, self._got = version, 0
                self._got += 1
                self._owed += 1
                if self._owed >= CREDIT_BATCH:
                    self._send(messages.Credit(self._owed, self.session))
                    self._owed = 0
            case messages.Released():
                self._released = message.version
            case messages.Ack() | messages.Grant():
                self._credited(message)
            case messages.Notice(what="alive"):
                self.answered.append(time.monotonic())
            case messages.Notice(what="donate"):
                self._offer("fp32", purpose=messages.Purpose.DONATION)
            case messages.Result():
                self._manifest = from_plain(Manifest, message.data["manifest"], "manifest")
            case messages.Error() | messages.Rejoin():
                raise Refusal(f"{self.worker_id}: {message.text}")
            case _:
                pass

    def _welcomed(self, welcome: messages.Welcome) -> None:
        assert self._manifest is not None
        self.session, self.config = welcome.session, welcome.config
        self.version = welcome.versions[0] if welcome.versions else None
        layout = lay_out(self._manifest, chunk_elements=welcome.config.chunk_elements)
        self._lengths = [span.elements for span in layout.fragments[0].spans]
        self._send(messages.Credit(WINDOW, self.session), bulk=True)

    @property
    def _is_here(self) -> bool:
        """Whether a version is here, whole and released."""
        return (
            self._released is not None
            and self._released == self._arriving
            and self._got == len(self._lengths)
        )

    def _pull(self, after: int) -> None:
        self._released = self._arriving = None
        self._got = 0
        self._send(messages.Pull(0, after, self.session))

    def _offer(self, wire_dtype: str, **more: Any) -> Upload:
        self._pushes += 1
        chunks = len(self._lengths)
        push = messages.Push(self.session, self._pushes, 0, chunks, wire_dtype, **more)
        self._upload = Upload(push)
        self._send(push)
        return self._upload

    def _credited(self, message: messages.Ack | messages.Grant) -> None:
        """Send what there is credit for now."""
        upload = self._upload
        if upload is None or message.push_id != upload.push.push_id:
            return
        if isinstance(message, messages.Ack):
            upload.credit += len(message.chunks) + message.credit
            upload.acknowledged += len(message.chunks)
            if upload.acknowledged == len(self._lengths):
                upload.ended = time.monotonic()
        elif message.standing in (messages.Standing.NEW, messages.Standing.RESUME):
            upload.credit += message.credit
        push = upload.push
        while upload.credit > 0 and upload.sent < len(self._lengths):
            upload.began = upload.began or time.monotonic()
            chunk = messages.Chunk(0, upload.sent, session=self.session, push_id=push.push_id)
            self._send(chunk, self._chunk(push.wire_dtype, self._lengths[upload.sent]), bulk=True)
            upload.credit -= 1
            upload.sent += 1

    def _chunk(self, dtype: str, elements: int) -> memoryview:
        """The one small buffer, cut to a chunk's length. It never changes, so it is sent as it lies."""
        if dtype not in self._buffers:
            self._buffers[dtype] = memoryview(VALUE_BYTES[dtype] * CHUNK_ELEMENTS)
        return self._buffers[dtype][: elements * ELEMENT_BYTES[dtype]]


def _dealer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.connect(address)
    return socket


class OneWorker:
    """The role "fake_worker": one fake worker at a time."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self._is_asked = is_asked
        self._worker: FakeWorker

    def join(self, address: str, worker_id: str, parameters: int | None) -> None:
        """Join a run; without a number of parameters the model is the run's."""
        manifest = None if parameters is None else flat_manifest(parameters)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._worker = FakeWorker(self._context, address, worker_id, manifest)
        self._worker.join()

    def learn_version(self) -> None:
        self._worker.learn_version()

    def push(self, pull: bool) -> dict[str, float]:
        return self._worker.push(pull=pull)

    def beat(self, interval_s: float) -> dict[str, Any]:
        """Send heartbeats on a fixed schedule until the next request comes; how long each took, in s.

        Counted from when a heartbeat was due, so that those behind a slow one are not left out.
        """
        worker = self._worker
        due: list[float] = []
        worker.answered.clear()
        next_at = time.monotonic()
        while not self._is_asked():
            now = time.monotonic()
            if now >= next_at:
                due.append(next_at)
                worker.beat()
                next_at += interval_s
            worker.turn(max(0, int((next_at - time.monotonic()) * 1000)))
        deadline = time.monotonic() + PATIENCE_S
        while len(worker.answered) < len(due) and time.monotonic() < deadline:
            worker.turn(100)
        return {"seconds": [b - a for a, b in zip(due, worker.answered, strict=True)]}

    def rest(self) -> None:
        """Do nothing: being asked for it ends the heartbeats."""

    def leave(self) -> None:
        self._worker.leave()
        self._context.term()


class IdleWorkers:
    """The role "idle_workers": many fake workers that do nothing but send heartbeats, in one thread."""

    def __init__(self, _: object) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS)
        self._workers: list[FakeWorker] = []

    def join(self, address: str, count: int) -> None:
        """Let `count` workers join; the first one provides the parameters."""
        manifest = flat_manifest(IDLE_PARAMETERS)
        for i in range(count):
            worker = FakeWorker(self._context, address, f"idle-{i}", manifest)
            worker.join()
            if not self._workers:
                worker.learn_version()
            self._workers.append(worker)

    def live(self, seconds: float, interval_s: float) -> dict[str, Any]:
        """Each sends a heartbeat every `interval_s`, spread evenly; how many were answered."""
        began = time.monotonic()
        sent = 0
        while (now := time.monotonic()) < began + seconds:
            due = int((now - began) / interval_s * len(self._workers))
            while sent < due:
                self._workers[sent % len(self._workers)].beat()
                sent += 1
            self._workers[sent % len(self._workers)].turn(0)
            time.sleep(interval_s / len(self._workers))
        deadline = time.monotonic() + 5
        while self._answered < sent and time.monotonic() < deadline:
            for worker in self._workers:
                worker.turn(0)
        return {"sent": sent, "answered": self._answered}

    @property
    def _answered(self) -> int:
        return sum(len(worker.answered) for worker in self._workers)
