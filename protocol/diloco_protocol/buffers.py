"""Memory for chunks and flat vectors, at either end: mapped once, used again, in large pages.

Each round makes a new tensor for each chunk and each delta, since what was handed out is never written
again (the wire, a checkpoint or a slow worker may still read it). Fresh memory costs the kernel a zeroed
page for every 4 KiB: for a chunk of 2 MiB that is more than the whole outer step. Here it is mapped in
pages of 2 MiB, where the system has them, and handed out again when nothing refers to it.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

SMALLEST = 64 << 10  # bytes; below it the allocator is as good


def mapped(elements: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised 1-D tensor on the CPU, in memory of its own that goes back when it is freed."""
    size = elements * dtype.itemsize
    if size < SMALLEST:
        return torch.empty(elements, dtype=dtype)
    return torch.frombuffer(_map(size), dtype=dtype)


class Buffers:
    """Hands out tensors with memory that nobody reads any more.

    Each time a buffer is handed out there is one array object over it, which the tensor, each view of
    it and each frame that is sent from it hold. When the last of them lets go, in whichever thread, the
    array goes and the buffer is free; the one freed last is taken first, since it may still be cached.

    Attributes:
        mapped_bytes: memory that has been mapped, in use or not.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self.mapped_bytes = 0

    def like(self, tensor: Tensor) -> Tensor:
        """An uninitialised 1-D tensor with the length and dtype of this one."""
        return self.take(tensor.numel(), tensor.dtype)

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised 1-D tensor on the CPU."""
        size = elements * dtype.itemsize
        if size < SMALLEST:
            return torch.empty(elements, dtype=dtype)
        free = self._free[size]
        try:
            buffer = free.pop()
        except IndexError:
            buffer = _map(size)
            self.mapped_bytes += size
        array = np.frombuffer(buffer, dtype=np.uint8)
        # `append` is one step for other threads, as `pop` is: no lock, which a finalizer must not take.
        weakref.finalize(array, free.append, buffer).atexit = False
        return torch.from_numpy(array).view(dtype)


def _map(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
