"""The role "tensor-work": what the broker's tensors have to do in a round, without a network.

It uses the broker's own parts, which no public name shows: how soon a given number of threads are done
with given chunks could not be seen from outside, where workers need the same cores.
"""

from __future__ import annotations

import time

import torch

from diloco_broker.config import BrokerConfig
from diloco_broker.core.effects import Fold, Step, StoreInitial
from diloco_broker.core.events import WorkDone
from diloco_broker.shell.tensor_work import TensorExecutor
from diloco_broker.tensors.outer.make import make_outer
from diloco_protocol import CHUNK_ELEMENTS, Kind, Manifest, TensorEntry, lay_out
from diloco_protocol.chunks import ChunkSpan
from diloco_protocol.tensors.codecs import encode_chunk, segment_dtype

CHUNKS = 64
WORKERS = 2
DIFFERENT = 8  # pseudo-gradients; each is sent of several chunks
SPREAD = 1e-3  # of their normal values


class TensorWork:
    """A run of 64 chunks with two workers."""

    def __init__(self, _: object) -> None:
        torch.set_num_threads(1)
        entry = TensorEntry("w", (CHUNKS * CHUNK_ELEMENTS,), "float32", Kind.TRAINABLE)
        self._layout = lay_out(Manifest((entry,)))
        self._round = 0

    def prepare(self, threads: int, wire: str, reply: str) -> dict[str, float]:
        """Begin with as many threads and these dtypes, and make a round's pushes."""
        torch.manual_seed(0)
        self._round = 0
        config = BrokerConfig(
            workers=WORKERS, wire_dtype=wire, reply_dtype=reply, tensor_threads=threads
        )
        initial = {"w": torch.randn(CHUNKS * CHUNK_ELEMENTS)}
        self._executor = TensorExecutor(config, make_outer(config), initial, None)
        for span in self._spans:
            self._executor.add(StoreInitial(0, span.index, None))
        self._finish()
        deltas = [SPREAD * torch.randn(CHUNK_ELEMENTS) for _ in range(DIFFERENT)]
        self._wire = wire
        self._pushes = [
            [
                _sent(span, deltas[(span.index + 3 * worker) % DIFFERENT], wire)
                for span in self._spans
            ]
            for worker in range(WORKERS)
        ]
        return {}

    @property
    def _spans(self) -> tuple[ChunkSpan, ...]:
        return self._layout.fragments[0].spans

    def round(self) -> dict[str, float]:
        """Decode, add up and step all chunks; seconds."""
        began = time.perf_counter()
        for worker, payloads in enumerate(self._pushes):
            for index, payload in enumerate(payloads):
                fold = Fold(0, index, str(worker), self._round, 1.0, self._wire, payload)
                self._executor.add(fold)
        self._finish()
        self._round += 1
        return {"seconds": time.perf_counter() - began}

    def end(self) -> dict[str, float]:
        """End its threads."""
        self._executor.close()
        return {}

    def _finish(self) -> None:
        """Do what is queued, and step each chunk once all have brought it."""
        brought = [0] * CHUNKS
        while self._executor:
            for event in self._executor.do_some(self._layout):
                if isinstance(event, WorkDone):
                    index = event.work.index
                    brought[index] += 1
                    if brought[index] == WORKERS:
                        self._executor.add(Step(0, index, float(WORKERS), self._round))


def _sent(span: ChunkSpan, delta: torch.Tensor, wire: str) -> bytearray:
    values = delta.to(segment_dtype(span.segment, wire))
    return bytearray(encode_chunk(span, values, wire))
