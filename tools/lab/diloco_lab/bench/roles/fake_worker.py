"""The role "fake-worker": workers that speak the protocol and have no model, one or many in a thread.

They send each chunk from one buffer, so a machine can hold many of them, or the two of a model with a
billion parameters, and what is measured is the broker. What they receive is counted and dropped.
"""

from __future__ import annotations

import itertools
import os
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import zmq

from diloco_protocol import (
    Kind,
    Manifest,
    TensorEntry,
    VersionId,
    lay_out,
    messages,
    pack,
    unpack,
)
from diloco_protocol.frames import MAX_FRAME_BYTES
from diloco_protocol.records import from_plain

M = TypeVar("M", bound=messages.Message)
PATIENCE_S = 100.0  # for anything that is waited for
ANSWERED_WITHIN_S = 5.0  # heartbeats, once no more are sent
TENSOR_ELEMENTS = 1 << 24  # of each tensor of the model that is pretended
# A real worker's, which the tests compare: chunks that the broker may have in flight to us, and how many
# have arrived when their credit goes back.
WINDOW, CREDIT_BATCH = 16, 4
SOCKETS = 1 << 13  # of many workers
VALUE = 2.0**-6  # exact in every dtype; small enough to stay finite over any number of rounds
VALUE_BYTES = {"fp32": array("f", [VALUE]).tobytes(), "bf16": b"\x80\x3c", "fp16": b"\x00\x24"}


def flat_manifest(parameters: int) -> Manifest:
    """A model with this number of trainable fp32 parameters, in tensors of 16M."""
    sizes = [
        min(TENSOR_ELEMENTS, parameters - start) for start in range(0, parameters, TENSOR_ELEMENTS)
    ]
    return Manifest(
        tuple(
            TensorEntry(f"layer.{i}.weight", (size,), "float32", Kind.TRAINABLE)
            for i, size in enumerate(sizes)
        )
    )


@dataclass
class Upload:
    """A push under way. `began` is when its first chunk was sent, `ended` when the last was in."""

    push_id: int = 0
    wire_dtype: str = ""
    credit: int = 0
    sent: int = 0
    acknowledged: int = 0
    began: float = 0.0
    ended: float = 0.0


class FakeWorker:
    """Joins a run at once. Without a manifest its model is the run's."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        worker_id: str,
        manifest: Manifest | None,
    ) -> None:
        self._worker_id = worker_id
        self._poller = zmq.Poller()
        self._control, self._bulk = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for each in (self._control, self._bulk):
            each.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            each.connect(address)
            self._poller.register(each, zmq.POLLIN)
        self._version: VersionId | None = None
        self._push_ids = itertools.count(1)
        self._owed = 0  # chunks that no credit has been given back for
        self.due: list[float] = []  # when each heartbeat was due
        self.answered: list[float] = []  # when each was answered
        if manifest is None:
            # By its own connection: a broker that sees one close sends an unasked "alive" to everybody.
            self._send(messages.Control("manifest", 1))
            result = self._wait_for(messages.Result)
            manifest = from_plain(Manifest, result.data["manifest"], "manifest")
        self._send(messages.Join(worker_id, manifest))
        welcome = self._wait_for(messages.Welcome)
        self._session, self._wire_dtype = welcome.session, welcome.config.wire_dtype
        layout = lay_out(manifest, chunk_elements=welcome.config.chunk_elements)
        self._lengths = [span.elements for span in layout.fragments[0].spans]
        self._bulk.send_multipart(pack(messages.Credit(WINDOW, self._session)))

    def exchange(self, *, push: bool, pull: bool) -> dict[str, float]:
        """Push once, or wait for the next version, or both; provide the first one where asked to.

        Returns:
            When the first chunk was sent, when the last was in at the broker, when all was over.
        """
        if pull:
            after = -1 if self._version is None else self._version.counter
            self._send(messages.Pull(0, after, self._session))
        upload = self._offer(self._wire_dtype, base=self._version) if push else Upload()
        got, arriving = 0, None
        released: VersionId | None = None
        while (push and not upload.ended) or (
            pull and not (released and released == arriving and got == len(self._lengths))
        ):
            match self._wait_for(messages.Message):
                case messages.Chunk(version=version):
                    got = got + 1 if version == arriving else 1
                    arriving = version
                    self._give_credit_back()
                case messages.Released(version=version):
                    released = version
                case messages.Ack() | messages.Grant() as answer:
                    if answer.push_id == upload.push_id:
                        self._go_on(upload, answer)
                case messages.Notice(what="donate"):
                    upload = self._offer("fp32", purpose=messages.Purpose.DONATION)
        self._version = released or self._version
        return {"began": upload.began, "up": upload.ended, "ended": time.monotonic()}

    def beat(self, due: float) -> None:
        """Send a heartbeat that was due at this moment."""
        self.due.append(due)
        self._send(messages.Heartbeat(self._session, 0))

    def leave(self) -> None:
        self._send(messages.Leave(self._session))

    def listen(self, seconds: float) -> None:
        """Note it when a heartbeat is answered within this time."""
        match self._receive(seconds):
            case messages.Notice(what="alive"):
                self.answered.append(time.monotonic())

    def _send(self, message: messages.Message) -> None:
        self._control.send_multipart(pack(message))

    def _receive(self, seconds: float) -> messages.Message | None:
        """The next message on either connection; None where there is none in whole milliseconds."""
        ready = self._poller.poll(int(1000 * seconds))
        if not ready:
            return None
        frames = ready[0][0].recv_multipart(copy=False)
        message, _ = unpack([frame.buffer for frame in frames])
        if isinstance(message, messages.Error | messages.Rejoin):
            raise RuntimeError(f"{self._worker_id} was refused: {message.text}")
        return message

    def _wait_for(self, kind: type[M]) -> M:
        """The next message of this kind; others are passed over."""
        deadline = time.monotonic() + PATIENCE_S
        while (left := deadline - time.monotonic()) > 0:
            message = self._receive(left)
            if isinstance(message, kind):
                return message
        raise TimeoutError(f"{self._worker_id} waited {PATIENCE_S:g} s for a {kind.__name__}")

    def _give_credit_back(self) -> None:
        self._owed += 1
        if self._owed == CREDIT_BATCH:
            self._send(messages.Credit(self._owed, self._session))
            self._owed = 0

    def _offer(self, wire_dtype: str, **more: Any) -> Upload:
        push_id, chunks = next(self._push_ids), len(self._lengths)
        self._send(messages.Push(self._session, push_id, 0, chunks, wire_dtype, **more))
        return Upload(push_id, wire_dtype)

    def _go_on(self, upload: Upload, answer: messages.Ack | messages.Grant) -> None:
        """Send what there is credit for now."""
        upload.credit += answer.credit
        if isinstance(answer, messages.Ack):
            upload.credit += len(answer.chunks)
            upload.acknowledged += len(answer.chunks)
            if upload.acknowledged == len(self._lengths):
                upload.ended = time.monotonic()
        while upload.credit > 0 and upload.sent < len(self._lengths):
            upload.began = upload.began or time.monotonic()
            chunk = messages.Chunk(0, upload.sent, session=self._session, push_id=upload.push_id)
            values = payload(upload.wire_dtype, self._lengths[upload.sent])
            self._bulk.send_multipart(pack(chunk, values), copy=False)
            upload.credit -= 1
            upload.sent += 1


@cache
def payload(dtype: str, elements: int) -> memoryview:
    """Of a chunk. It never changes, so it is sent as it lies."""
    return memoryview(VALUE_BYTES[dtype] * elements)


class FakeWorkers:
    """What is asked of the role."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self._is_asked = is_asked
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._workers: list[FakeWorker] = []

    def join(self, address: str, parameters: int | None, count: int = 1) -> None:
        """Join a run; without a number of parameters the model is the run's."""
        manifest = None if parameters is None else flat_manifest(parameters)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS)
        self._workers = [
            FakeWorker(self._context, address, f"fake-{os.getpid()}-{i}", manifest)
            for i in range(count)
        ]

    def learn_version(self) -> None:
        """Wait until there are parameters; the first worker provides them where it is asked to."""
        self._workers[0].exchange(push=False, pull=True)

    def push(self, pull: bool) -> dict[str, float]:
        """Let the first worker push once; with `pull` wait for the version that contains it, too."""
        return self._workers[0].exchange(push=True, pull=pull)

    def beat(self, interval_s: float) -> dict[str, Any]:
        """Send heartbeats of all in turn, on a fixed schedule, until the next request comes.

        Returns:
            How many were sent and answered, and how long each answer took in seconds. Counted from when
            a heartbeat was due, so that those behind a slow one are not left out.
        """
        for each in self._workers:
            each.due.clear()
            each.answered.clear()
        next_at = time.monotonic()
        for worker in itertools.cycle(self._workers):
            while (left := next_at - time.monotonic()) > 0:
                worker.listen(left)
                # The time of many is not measured, and the broker needs the core.
                if len(self._workers) > 1:
                    time.sleep(max(0.0, next_at - time.monotonic()))
            if self._is_asked():
                break
            worker.beat(next_at)
            next_at += interval_s / len(self._workers)
        deadline = time.monotonic() + ANSWERED_WITHIN_S
        while time.monotonic() < deadline and (
            late := [each for each in self._workers if len(each.answered) < len(each.due)]
        ):
            for each in late:
                each.listen(0.001)
        seconds = [
            answered - due
            for each in self._workers
            for due, answered in zip(each.due, each.answered, strict=False)
        ]
        return {
            "sent": sum(len(each.due) for each in self._workers),
            "answered": sum(len(each.answered) for each in self._workers),
            "seconds": seconds,
        }

    def leave(self) -> None:
        for each in self._workers:
            each.leave()
        self._context.destroy(linger=1000)
