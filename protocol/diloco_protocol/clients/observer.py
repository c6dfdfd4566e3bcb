"""Reads the newest parameters of a running broker, without joining the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diloco_protocol import messages
from diloco_protocol.chunks import FragmentLayout, lay_out_plan
from diloco_protocol.clients.operator import Operator
from diloco_protocol.dtypes import REPLY_DTYPES, check_wire_dtype, whole_dtype
from diloco_protocol.errors import ProtocolError, UsageError
from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import Message, RunConfig
from diloco_protocol.records import from_plain
from diloco_protocol.tensors.codecs import decode_chunk, segment_dtype
from diloco_protocol.tensors.state_dict import assemble
from diloco_protocol.version import VersionId

# Chunks requested at a time.
CREDIT = 16


@dataclass(frozen=True)
class ReadModel:
    """A model that was read from a broker."""

    tensors: dict[str, Tensor]  # its state dict, in the original shapes and dtypes
    versions: tuple[VersionId, ...]  # of each trained fragment, in order
    reply_dtype: str = "fp32"  # of the run


class Observer(Operator):
    """Reads the newest parameters of a broker; `keys` are those of a worker or an operator."""

    def read(self) -> ReadModel:
        """Read the model, each fragment in its newest version.

        Raises as `ask` does, and UsageError if the broker has no model, or stops sending it.
        """
        answer = self.ask("manifest")
        if not answer.ok:
            raise UsageError(f"{self.address}: {answer.text}")
        config = from_plain(RunConfig, answer.data["config"], "config")
        check_wire_dtype(config.reply_dtype, REPLY_DTYPES)
        layout = lay_out_plan(
            from_plain(Manifest, answer.data["manifest"], "manifest"),
            answer.data["plan"] or (),
            num_fragments=config.num_fragments,
            chunk_elements=config.chunk_elements,
        )
        found = {
            part.fragment: self._pull(part, whole_dtype(config.reply_dtype))
            for part in layout.all
            if part.chunks
        }
        versions = tuple(found[part.fragment][1] for part in layout.fragments)
        tensors = assemble(layout, {f: each for f, (each, _) in found.items()})
        return ReadModel(tensors, versions, config.reply_dtype)

    def _pull(self, part: FragmentLayout, wire: str) -> tuple[list[Tensor], VersionId]:
        """Read all chunks of the fragment's newest version; starts again if a newer one is released."""
        self._dealer.send(messages.Pull(part.fragment, credit=CREDIT))
        chunks: dict[int, Tensor] = {}
        version: VersionId | None = None
        while version is None or len(chunks) < part.chunks:
            message, payload = self._await(
                lambda m: (
                    isinstance(m, messages.Released | messages.Chunk)
                    and m.fragment == part.fragment
                )
            )
            if isinstance(message, messages.Released):
                version = message.version
                chunks.clear()
            elif isinstance(message, messages.Chunk):
                self._dealer.send(messages.Credit(1))
                if version is not None and message.version == version:
                    span = part.spans[message.index]
                    values = decode_chunk(span, payload, wire)
                    chunks[message.index] = values.to(segment_dtype(span.segment))
        return [chunks[index] for index in range(part.chunks)], version

    def _await(self, is_it: Callable[[Message], bool]) -> tuple[Message, Any]:
        until = time.monotonic() + self.timeout
        while True:
            try:
                found = self._dealer.receive(until)
            except ProtocolError as error:
                raise UsageError(f"{self.address} does not speak our protocol: {error}") from None
            if found is None:
                raise UsageError(
                    f"The broker at {self.address} sent no parameters for {self.timeout:g} s."
                )
            if isinstance(found[0], messages.Error):
                raise UsageError(f"{self.address}: {found[0].text}")
            if is_it(found[0]):
                return found
