"""Memory for chunks: used again once the last reader has let go of it.

Each round makes a new tensor for each chunk, since a chunk that was handed out is never written again
(a worker, a checkpoint or the wire may still read it). Fresh memory costs the kernel a zeroed page for
every 4 KiB: for a chunk of 2 MiB that is more than the whole outer step. Here it is mapped once, in
pages of 2 MiB where the system has them, and handed out again when nothing refers to it.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections import defaultdict, deque

import torch
from torch import Tensor

# Buffers looked at for a free one: those handed out longest ago come first, and chunks are let go of
# in about the order in which they were made.
LOOKED_AT = 64
# References to a buffer that nobody uses: the variable that holds it and the argument of getrefcount.
NOBODY = 2
SMALLEST = 64 << 10  # bytes; below it the allocator is as good


class Buffers:
    """Hands out tensors of fp32, bf16, ... with memory that nobody reads any more.

    A tensor over a buffer, each view of it, and each frame that is sent from it hold a reference to the
    buffer, whichever thread they are let go of in; so its reference count says whether it is free.

    Attributes:
        mapped_bytes: memory that has been mapped, in use or not.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, deque[mmap.mmap]] = defaultdict(deque)
        self.mapped_bytes = 0

    def like(self, tensor: Tensor) -> Tensor:
        """An uninitialised 1-D tensor with the length and dtype of this one."""
        return self.take(tensor.numel(), tensor.dtype)

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised 1-D tensor."""
        size = elements * dtype.itemsize
        if size < SMALLEST:
            return torch.empty(elements, dtype=dtype)
        known = self._by_size[size]
        for _ in range(min(LOOKED_AT, len(known))):
            buffer = known[0]
            known.rotate(-1)
            # The deque holds one more reference than `NOBODY` counts.
            if sys.getrefcount(buffer) == NOBODY + 1:
                return torch.frombuffer(buffer, dtype=dtype)
        buffer = self._map(size)
        known.append(buffer)
        return torch.frombuffer(buffer, dtype=dtype)

    def _map(self, size: int) -> mmap.mmap:
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                buffer.madvise(mmap.MADV_HUGEPAGE)
        self.mapped_bytes += size
        return buffer
