"""The role "fake_worker": it speaks the protocol, has no model, and sends each chunk from one buffer.

So a machine can hold many workers, or the two of a model with a billion parameters, and what is
measured is the broker. What it receives is counted and dropped.
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
    pack,
    unpack,
)
from diloco_protocol.frames import MAX_FRAME_BYTES
from diloco_protocol.messages import (
    Ack,
    Chunk,
    Control,
    Credit,
    Error,
    Grant,
    Heartbeat,
    Join,
    Leave,
    Message,
    Notice,
    Pull,
    Purpose,
    Push,
    Rejoin,
    Released,
    Result,
    Standing,
    Welcome,
)
from diloco_protocol.records import from_plain

PATIENCE_S = 100.0  # for anything that is waited for
TENSOR_ELEMENTS = 1 << 24  # of each tensor of the model that is pretended
WINDOW = 8  # chunks that the broker may have under way to us: what a real worker gives
CREDIT_BATCH = WINDOW // 2
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
VALUE = 2.0**-6  # exact in every dtype; small enough to stay finite over any number of rounds
VALUE_BYTES = {"fp32": array("f", [VALUE]).tobytes(), "bf16": b"\x80\x3c", "fp16": b"\x00\x24"}


class Refusal(Exception):
    """The broker said `error` or `rejoin` to something that was meant well."""


def flat_manifest(parameters: int) -> Manifest:
    """A model with this number of trainable fp32 parameters, in tensors of 16M."""
    sizes = [TENSOR_ELEMENTS] * (parameters // TENSOR_ELEMENTS)
    sizes += [parameters % TENSOR_ELEMENTS] if parameters % TENSOR_ELEMENTS else []
    return Manifest(
        tuple(
            TensorEntry(f"layer.{i}.weight", (size,), "float32", Kind.TRAINABLE)
            for i, size in enumerate(sizes)
        )
    )


@dataclass
class Upload:
    """A push under way. `began` is when its first chunk was sent, `ended` when the last was in."""

    push: Push
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
        self._answer: Result | None = None  # to a control action

    # Taking part.

    def join(self) -> None:
        """Join, and provide the parameters if the broker asks for them."""
        if self._manifest is None:
            self._send(Control("manifest", 1))
            self._await(lambda: self._answer is not None, "the manifest")
            assert self._answer is not None
            self._manifest = from_plain(Manifest, self._answer.data["manifest"], "manifest")
        self._send(Join(self.worker_id, self._manifest))
        self._await(lambda: self.session != b"", "a welcome")

    def leave(self) -> None:
        self._send(Leave(self.session))
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
        config = self.config
        assert config is not None
        if pull:
            self._pull(-1 if self.version is None else self.version.counter)
        self._pushes += 1
        self._offer(
            Push(
                self.session,
                self._pushes,
                0,
                len(self._lengths),
                config.wire_dtype,
                base=self.version,
            )
        )
        self._await(lambda: self._is_up and (not pull or self._is_here), "the round")
        assert self._upload is not None
        if pull:
            self.version = self._released
        found = {"began": self._upload.began, "up": self._upload.ended, "ended": time.monotonic()}
        self._upload = None
        return found

    def beat(self) -> None:
        """Send a heartbeat; `answered` will have the time of the answer."""
        self._send(Heartbeat(self.session, 0))

    def turn(self, timeout_ms: int) -> None:
        """Wait at most `timeout_ms` for messages and deal with them."""
        ready = dict(self._poller.poll(timeout_ms))
        for each in (self.control, self.bulk):
            if each in ready:
                self._receive(each)

    # Within.

    def _await(self, what: Callable[[], bool], doing: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.worker_id} waited {PATIENCE_S:g} s for {doing}")
            self.turn(1000)

    def _send(
        self, message: Message, payload: memoryview | None = None, *, bulk: bool = False
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

    def _take(self, message: Message) -> None:
        match message:
            case Welcome():
                self._welcomed(message)
            case Chunk(version=version):
                if version != self._arriving:
                    self._arriving, self._got = version, 0
                self._got += 1
                self._owed += 1
                if self._owed >= CREDIT_BATCH:
                    self._send(Credit(self._owed, self.session))
                    self._owed = 0
            case Released():
                self._released = message.version
            case Ack():
                self._acknowledged(message)
            case Grant():
                self._granted(message)
            case Notice(what="alive"):
                self.answered.append(time.monotonic())
            case Notice(what="donate"):
                self._donate()
            case Result():
                self._answer = message
            case Error() | Rejoin():
                raise Refusal(f"{self.worker_id}: {message.text}")
            case _:
                pass

    def _welcomed(self, welcome: Welcome) -> None:
        assert self._manifest is not None
        self.session, self.config = welcome.session, welcome.config
        self.version = welcome.versions[0] if welcome.versions else None
        layout = lay_out(self._manifest, chunk_elements=welcome.config.chunk_elements)
        self._lengths = [span.elements for span in layout.fragments[0].spans]
        self._send(Credit(WINDOW, self.session), bulk=True)

    @property
    def _is_here(self) -> bool:
        """Whether a version is here, whole and released."""
        return (
            self._released is not None
            and self._released == self._arriving
            and self._got == len(self._lengths)
        )

    @property
    def _is_up(self) -> bool:
        return self._upload is not None and self._upload.ended > 0

    def _pull(self, after: int) -> None:
        self._released = self._arriving = None
        self._got = 0
        self._send(Pull(0, after, self.session))

    def _donate(self) -> None:
        self._pushes += 1
        chunks = len(self._lengths)
        self._offer(Push(self.session, self._pushes, 0, chunks, "fp32", purpose=Purpose.DONATION))

    def _offer(self, push: Push) -> None:
        self._upload = Upload(push)
        self._send(push)

    def _granted(self, grant: Grant) -> None:
        upload = self._upload
        if upload is not None and grant.push_id == upload.push.push_id:
            if grant.standing in (Standing.NEW, Standing.RESUME):
                upload.credit += grant.credit
            self._pump(upload)

    def _acknowledged(self, ack: Ack) -> None:
        upload = self._upload
        if upload is None or ack.push_id != upload.push.push_id:
            return
        upload.credit += len(ack.chunks) + ack.credit
        upload.acknowledged += len(ack.chunks)
        if upload.acknowledged == len(self._lengths):
            upload.ended = time.monotonic()
        self._pump(upload)

    def _pump(self, upload: Upload) -> None:
        """Send what there is credit for."""
        push = upload.push
        while upload.credit > 0 and upload.sent < len(self._lengths):
            upload.began = upload.began or time.monotonic()
            chunk = Chunk(0, upload.sent, session=self.session, push_id=push.push_id)
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


class Role:
    """One fake worker at a time."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._is_asked = is_asked
        self._worker: FakeWorker | None = None

    @property
    def _it(self) -> FakeWorker:
        assert self._worker is not None, "it has not joined"
        return self._worker

    def join(self, address: str, worker_id: str, parameters: int | None) -> None:
        """Join a run; without a number of parameters the model is the run's."""
        manifest = None if parameters is None else flat_manifest(parameters)
        self._context = zmq.Context()
        self._worker = FakeWorker(self._context, address, worker_id, manifest)
        self._worker.join()

    def learn_version(self) -> None:
        self._it.learn_version()

    def push(self, pull: bool) -> dict[str, float]:
        return self._it.push(pull=pull)

    def beat(self, interval_s: float) -> dict[str, Any]:
        """Send heartbeats on a fixed schedule until the next request comes; how long each took, in s.

        Counted from when a heartbeat was due, so that those behind a slow one are not left out.
        """
        worker = self._it
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
        self._it.leave()
        self._worker = None
        if self._context is not None:
            self._context.term()
