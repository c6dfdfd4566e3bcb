"""The parameters of a run as a plain state dict, from a checkpoint or from a broker that is running."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import zmq
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_protocol.chunks import FragmentLayout, ModelLayout, lay_out_plan
from diloco_protocol.codecs import from_bytes, segment_dtype, wire_dtype
from diloco_protocol.errors import ProtocolError, UsageError
from diloco_protocol.frames import MAX_FRAME_BYTES, pack, unpack
from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import (
    Chunk,
    Control,
    Credit,
    Error,
    Message,
    Pull,
    Released,
    Result,
    RunConfig,
)
from diloco_protocol.records import from_plain

# Chunks asked for at a time.
CREDIT = 16


def model_of(found: Checkpoint) -> dict[str, Tensor]:
    """The model of a checkpoint: what its `state_dict` has, in its own shapes and dtypes."""
    return assemble(found.layout, {f: each.chunks for f, each in found.tensors.items()})


def assemble(layout: ModelLayout, chunks: Mapping[int, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Tensors by name from the chunks of each fragment; a tied tensor stands under all its names."""
    model: dict[str, Tensor] = {}
    for part in layout.all:
        if not part.chunks:
            continue
        flat = _segments(part, chunks[part.fragment])
        for place in part.places:
            entry = place.entry
            values = flat[place.segment.value][place.start : place.stop].reshape(entry.shape)
            for name in (entry.name, *entry.aliases):
                model[name] = values.to(getattr(torch, entry.dtype), copy=True)
    return model


def _segments(part: FragmentLayout, chunks: Sequence[Tensor]) -> dict[str, Tensor]:
    pieces: dict[str, list[Tensor]] = {}
    for span in part.spans:
        pieces.setdefault(span.segment.value, []).append(chunks[span.index])
    flat = {name: torch.cat(found) for name, found in pieces.items()}
    for segment, length in part.lengths.items():  # tensors without elements lie in no chunk
        if not length:
            flat[segment.value] = torch.empty(0, dtype=segment_dtype(segment, torch.float32))
    return flat


def write_model(model: Mapping[str, Tensor], path: Path) -> int:
    """Write a safetensors file, whole or not at all. Returns its size in bytes.

    Raises:
        UsageError: it cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(dict(model), aside)
        aside.replace(path)
        return path.stat().st_size
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error}.") from None


class LiveModel:
    """A reader that asks a running broker for its newest parameters, as any observer may.

    Args:
        address: of the broker's control socket.
        timeout: seconds without a word after which it is given up.

    Raises:
        UsageError: there is no broker, it has no model, or it goes silent.
    """

    def __init__(self, address: str, timeout: float = 10.0) -> None:
        self._address, self._timeout = address, timeout
        self._context = zmq.Context()
        self._socket: zmq.Socket[Any] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.ipv6 = "[" in address
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"{address} is no address of a broker: {error}.") from None

    def __enter__(self) -> LiveModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read(self) -> tuple[dict[str, Tensor], str]:
        """The model, and a sentence that says which version of each fragment it is."""
        request = secrets.randbits(31)
        self._send(Control("manifest", request))
        answer = self._await(lambda m: isinstance(m, Result) and m.request == request)[0]
        assert isinstance(answer, Result)
        if not answer.ok:
            raise UsageError(f"{self._address}: {answer.text}")
        manifest = from_plain(Manifest, answer.data["manifest"], "manifest")
        config = from_plain(RunConfig, answer.data["config"], "config")
        plan = answer.data["plan"] or ()
        layout = lay_out_plan(
            manifest,
            plan,
            num_fragments=config.num_fragments,
            chunk_elements=config.chunk_elements,
        )
        dtype = wire_dtype(config.reply_dtype)
        found = {part.fragment: self._fragment(part, dtype) for part in layout.all if part.chunks}
        versions = ", ".join(str(found[part.fragment][1].version) for part in layout.fragments)
        text = f"version{'s' if config.num_fragments > 1 else ''} {versions}"
        return assemble(layout, {f: chunks for f, (chunks, _) in found.items()}), text

    def _fragment(self, part: FragmentLayout, dtype: torch.dtype) -> tuple[list[Tensor], Released]:
        """All chunks of the fragment's newest version; from the beginning where a newer one comes."""
        self._send(Pull(part.fragment, credit=CREDIT))
        chunks: dict[int, Tensor] = {}
        released: Released | None = None
        while released is None or len(chunks) < part.chunks:
            message, payload = self._await(
                lambda m: isinstance(m, Released | Chunk) and m.fragment == part.fragment
            )
            if isinstance(message, Released):
                released = message
                chunks.clear()
            elif isinstance(message, Chunk):
                self._send(Credit(1))
                if released is not None and message.version == released.version:
                    span = part.spans[message.index]
                    values = from_bytes(payload, segment_dtype(span.segment, dtype))
                    chunks[message.index] = values.to(segment_dtype(span.segment, torch.float32))
        return [chunks[index] for index in range(part.chunks)], released

    def _send(self, message: Message) -> None:
        self._socket.send_multipart(pack(message))

    def _await(self, is_it: Any) -> tuple[Message, Any]:
        until = time.monotonic() + self._timeout
        while (left := until - time.monotonic()) > 0:
            if not self._socket.poll(int(left * 1000) + 1):
                break
            frames = self._socket.recv_multipart(copy=False)
            try:
                message, payload = unpack([frame.buffer for frame in frames])
            except ProtocolError as error:
                raise UsageError(f"{self._address} does not speak our protocol: {error}") from None
            if isinstance(message, Error):
                raise UsageError(f"{self._address}: {message.text}")
            if is_it(message):
                return message, payload
        raise UsageError(
            f"No broker answered at {self._address} for {self._timeout:g} s; is the address right "
            "and the broker running?"
        )
