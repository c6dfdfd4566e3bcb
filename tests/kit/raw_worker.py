"""A worker written from the pages in protocol/ alone: plain msgpack and a DEALER, nothing of ours.

It keeps the specification honest, and it can misbehave in ways the real worker cannot.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable
from typing import Any

import msgpack
import torch
import zmq
from torch import Tensor

from kit.raw_codecs import decode, encode

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTIZED = ("int8", "int4", "int4z")
PATIENCE_S = 20.0

Header = dict[str, Any]


class RawWorker:
    """One worker over two DEALER sockets, driven message by message."""

    def __init__(self, address: str, worker_id: str) -> None:
        self.worker_id = worker_id
        self.context = zmq.Context()
        self.control = self._dealer(address)
        self.bulk = self._dealer(address)
        self.session = b""
        self.config: Header = {}
        self.version: Header | None = None
        self.ledger: Header = {}
        self.values = torch.empty(0)
        self.takes_deltas = True

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.ipv6 = "[" in address
        socket.connect(address)
        return socket

    def __enter__(self) -> RawWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    # Messages.

    def send(self, kind: str, *, on: zmq.Socket[bytes] | None = None, **fields: Any) -> None:
        header = {"v": 1, "kind": kind, **fields}
        (on or self.control).send(msgpack.packb(header))

    def send_chunk(
        self, push_id: int, index: int, payload: bytes, fields: Header | None = None
    ) -> None:
        header = {"v": 1, "kind": "chunk", "fragment": 0, "index": index, "push_id": push_id}
        header |= {"session": self.session} | (fields or {})
        self.bulk.send_multipart([msgpack.packb(header), payload])

    def receive(self, *kinds: str, on: zmq.Socket[bytes] | None = None) -> Header:
        """The next message of one of these kinds; others are passed over."""
        socket = on or self.control
        deadline = time.monotonic() + PATIENCE_S
        while socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            frames = socket.recv_multipart()
            header: Header = msgpack.unpackb(frames[0])
            if header["kind"] in kinds:
                if len(frames) > 1:
                    header["payload"] = frames[1]
                return header
            assert header["kind"] != "error", header
        raise AssertionError(f"{self.worker_id} got no {' or '.join(kinds)}")

    # A worker's incarnation.

    def join(self, entries: Iterable[Header], **fields: Any) -> Header:
        """Join and bind the bulk connection; returns the welcome."""
        manifest = {"entries": list(entries)}
        self.send("join", worker_id=self.worker_id, manifest=manifest, **fields)
        welcome = self.receive("welcome")
        self.session, self.config = welcome["session"], welcome["config"]
        self.send("credit", on=self.bulk, chunks=8, session=self.session)
        return welcome

    def seed(self, values: Tensor) -> None:
        """Answer the broker's wish for parameters; `values` is the flat fp32 vector."""
        while self.receive("notice")["what"] != "seed":
            pass
        self._upload(41, values.float(), "fp32", purpose="seeding")

    def push(self, push_id: int, delta: Tensor, wire: str | None = None, **fields: Any) -> None:
        """Send a whole pseudo-gradient, in the run's wire dtype unless another is named."""
        name = wire or self.config["wire_dtype"]
        values = delta if name in QUANTIZED else delta.to(DTYPES[name])
        self._upload(push_id, values, name, base=self.version, **fields)

    def _upload(self, push_id: int, values: Tensor, wire: str, **fields: Any) -> None:
        parts = torch.split(values, self.config["chunk_elements"])
        self.send(
            "push",
            session=self.session,
            push_id=push_id,
            fragment=0,
            chunks=len(parts),
            wire_dtype=wire,
            **fields,
        )
        grant = self.receive("grant")
        while grant["standing"] == "wait":
            grant = self.receive("grant")
        credit = grant["credit"]
        for index, part in enumerate(parts):
            while not credit:
                credit += len(self.receive("ack")["chunks"])
            coded = wire in QUANTIZED
            payload = (
                encode(part.tolist(), wire) if coded else bytes(part.view(torch.uint8).numpy())
            )
            self.send_chunk(push_id, index, payload)
            credit -= 1
        self.send("commit", session=self.session, push_id=push_id, fragment=0)

    def pull(self, elements: int, after: int = -1) -> Tensor:
        """The newest parameters above a counter, as the flat fp32 vector.

        Quantized, they come as differences from those that were pulled last.
        """
        reply, held = self.config["reply_dtype"], {}
        if reply in QUANTIZED and self.version is not None and self.takes_deltas:
            held = {"delta_of": self.version}
        fields: Header = {"fragment": 0, "after": after, **held}
        self.send("pull", session=self.session, **fields)
        dtype, length = DTYPES.get(reply, torch.float32), self.config["chunk_elements"]
        values = torch.zeros(elements)
        left = dict.fromkeys(range(-(-elements // length)))
        versions = set()
        while left:
            chunk = self.receive("chunk", on=self.bulk)
            if chunk.get("delta_of") is not None:
                assert chunk["delta_of"] == self.version
                start = chunk["index"] * length
                part = self._followed(chunk, self.values[start : start + length].clone())
            else:
                part = torch.frombuffer(bytearray(chunk["payload"]), dtype=dtype).float()
            values[chunk["index"] * length :][: len(part)] = part
            left.pop(chunk["index"])
            versions.add(chunk["version"]["tag"])
            self.send("credit", chunks=1, session=self.session)
        released = self.receive("released")
        assert versions == {released["version"]["tag"]}, "a torn version"
        self.version, self.ledger = released["version"], released["ledger"]
        self.values = values
        return values.clone()

    def _followed(self, chunk: Header, values: Tensor) -> Tensor:
        start = 0
        for size in chunk["parts"]:
            code = chunk["payload"][start : start + size]
            read = decode(code, self.config["reply_dtype"], len(values))
            values += torch.tensor(read)
            start += size
        assert start == len(chunk["payload"])
        whole = values.numpy().tobytes() + bytes(4 * (len(values) % 2))
        patterns = struct.unpack(f"<{len(whole) // 8}Q", whole)
        assert sum(patterns) % 2**64 == chunk["checksum"]
        return values


def one_tensor(elements: int) -> list[Header]:
    return [{"name": "weight", "shape": [elements], "dtype": "float32", "kind": "trainable"}]
