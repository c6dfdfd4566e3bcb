"""The role "kernels": the tensor work of a round at the best speed that torch has. One thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from diloco_protocol import CHUNK_ELEMENTS

WORKING_SET = 64  # chunks that the work goes round through: 128 MiB in fp32, more than any cache
SGD: dict[str, Any] = {
    "lr": 0.7,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 0.0,
    "dampening": 0.0,
}


class Kernels:
    """Each action gives its speed in GB/s, and CPU seconds for a billion elements."""

    def __init__(self, _: object) -> None:
        torch.set_num_threads(1)
        self._received = torch.ones(WORKING_SET, CHUNK_ELEMENTS, dtype=torch.bfloat16)
        self._first = torch.ones(WORKING_SET, CHUNK_ELEMENTS)
        self._second = torch.zeros(WORKING_SET, CHUNK_ELEMENTS)
        self._scratch = torch.empty(CHUNK_ELEMENTS)

    def memcpy(self, chunks: int) -> dict[str, float]:
        """Copy fp32 chunks one after the other; bytes copied."""
        return _speed(lambda i: self._second[i].copy_(self._first[i]), chunks, 4)

    def fold(self, chunks: int) -> dict[str, float]:
        """Add bf16 chunks to an fp32 accumulator through a scratch; bytes in bf16.

        The scratch stays in the cache. `acc.add_(bf16)` without it is seven times slower.
        """
        return _speed(
            lambda i: self._first[i].add_(self._scratch.copy_(self._received[i])), chunks, 2
        )

    def delta(self, chunks: int) -> dict[str, float]:
        """Subtract fp32 chunks and round to bf16 through a scratch; bytes of parameters."""

        def one(i: int) -> None:
            torch.sub(self._first[i], self._second[i], out=self._scratch)
            self._received[i].copy_(self._scratch)

        return _speed(one, chunks, 4)

    def outer_step(self, chunks: int) -> dict[str, float]:
        """SGD with Nesterov momentum by torch's fused kernel, chunk by chunk; bytes of parameters."""
        theta, gradient = self._first, self._second.fill_(1e-3)
        momentum = torch.zeros_like(theta)

        def one(i: int) -> None:
            torch._fused_sgd_(
                [theta[i]], [gradient[i]], [momentum[i]], maximize=False, is_first_step=False, **SGD
            )

        return _speed(one, chunks, 4)


def _speed(one: Callable[[int], object], chunks: int, bytes_each: int) -> dict[str, float]:
    """Of doing something to chunks of elements of so many bytes, after once through all."""
    for i in range(WORKING_SET):
        one(i)
    began, cpu = time.perf_counter(), time.process_time()
    for i in range(chunks):
        one(i % WORKING_SET)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    billions = chunks * CHUNK_ELEMENTS / 1e9
    return {"speed": billions * bytes_each / seconds, "cpu": cpu / billions}
