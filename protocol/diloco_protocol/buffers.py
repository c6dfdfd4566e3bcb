"""Memory for chunks and flat vectors, at either end: mapped once, used again, in large pages.

Each round makes a new tensor for each chunk and each delta, since what was handed out is never written
again (the wire, a checkpoint or a slow worker may still read it). Fresh memory costs the kernel a zeroed
page for every 4 KiB: for a chunk of 2 MiB that is more than the whole outer step. Here it is mapped in
pages of 2 MiB, where the system has them, and handed out again when nothing refers to it.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections import defaultdict, deque

import torch
from torch import Tensor

# Buffers looked at for a free one: those handed out longest ago come first, and chunks are let go of
# in about the order in which they were made.
LOOKED_AT = 64
SMALLEST = 64 << 10  # bytes; below it the allocator is as good


def mapped(elements: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised 1-D tensor on the CPU, in memory of its own that goes back when it is freed."""
    size = elements * dtype.itemsize
    return torch.empty(elements, dtype=dtype) if size < SMALLEST else _over(_map(size), dtype)


class Buffers:
    """Hands out tensors with memory that nobody reads any more.

    A tensor over a buffer, each view of it, and each frame that is sent from it hold a reference to the
    buffer, in whichever thread they are let go of; so its reference count says whether it is free.

    Attributes:
        mapped_bytes: memory that has been mapped, in use or not.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, deque[mmap.mmap]] = defaultdict(deque)
        self._one_at_a_time = threading.Lock()
        self.mapped_bytes = 0

    def like(self, tensor: Tensor) -> Tensor:
        """An uninitialised 1-D tensor with the length and dtype of this one."""
        return self.take(tensor.numel(), tensor.dtype)

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised 1-D tensor on the CPU."""
        size = elements * dtype.itemsize
        if size < SMALLEST or not CAN_COUNT:
            return mapped(elements, dtype)
        with self._one_at_a_time:
            known = self._by_size[size]
            for _ in range(min(LOOKED_AT, len(known))):
                known.rotate(-1)
                if _references(known) == UNUSED:
                    return _over(known[-1], dtype)
            buffer = _map(size)
            known.append(buffer)
            self.mapped_bytes += size
            return _over(buffer, dtype)


def _references(known: deque[mmap.mmap]) -> int:
    """To the last buffer, those of the pool and of this very look included."""
    return sys.getrefcount(known[-1])


# Of a buffer that nobody reads. Releases of Python differ in what a look at it counts.
UNUSED = _references(deque([mmap.mmap(-1, mmap.PAGESIZE)]))
# Without the global lock, counts are spread over threads and say nothing.
CAN_COUNT = getattr(sys, "_is_gil_enabled", lambda: True)()


def _over(buffer: mmap.mmap, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype)


def _map(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
