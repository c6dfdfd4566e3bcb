"""A pool of memory for chunks and flat vectors, which is mapped once and reused, in large pages.

Each round makes a new tensor for each chunk and each delta, because tensors that were passed to readers
(the wire, a checkpoint, a slow worker) are never modified. Fresh memory costs the kernel a zeroed page
for every 4 KiB: for a chunk of 2 MiB more than the entire outer step. The pool maps memory in pages of
2 MiB, if the system has them, and reuses it after its last reference is dropped. glibc's heap would not:
torch requests aligned memory, for which a freed chunk is a few bytes too short.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SMALLEST = 64 << 10  # bytes; below this the default allocator is as fast
LARGE_PAGE = 2 << 20  # bytes


def mapped(elements: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised 1-D tensor on the CPU, in its own mapping, which is unmapped when it is freed."""
    size = elements * dtype.itemsize
    if size < SMALLEST:
        return torch.empty(elements, dtype=dtype)
    return torch.frombuffer(_map(size), dtype=dtype)


@dataclass(frozen=True, eq=False)
class _Piece:
    memory: memoryview
    whole: _Piece | None = None  # the piece that it is half of; None for a complete mapping

    def halves(self) -> tuple[_Piece, _Piece]:
        middle = self.memory.nbytes // 2
        return _Piece(self.memory[:middle], self), _Piece(self.memory[middle:], self)


class TensorPool:
    """Allocates tensors in memory that has no references any more.

    Each allocation of a buffer has one array object, which the tensor, its views and all frames sent
    from it reference. When the last reference is dropped, in any thread, the array is finalized and the
    buffer is free. The most recently freed buffer is reused first, because it may still be cached. If no
    buffer of a size is free, one of twice the size is split, or two halves are joined: bf16 can reuse
    memory of fp32.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[_Piece]] = defaultdict(list)
        self.mapped_bytes = 0  # memory that has been mapped, in use or not

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised 1-D tensor on the CPU."""
        size = elements * dtype.itemsize
        if size < SMALLEST:
            return torch.empty(elements, dtype=dtype)
        piece = self._reuse(size) or self._new(size, halves=2 * size <= LARGE_PAGE)
        array = np.frombuffer(piece.memory, dtype=np.uint8)
        # `append` and `pop` are atomic, so no lock is needed, which a finalizer must not take.
        weakref.finalize(array, self._free[size].append, piece).atexit = False
        return torch.from_numpy(array).view(dtype)

    def release(self) -> None:
        """Drop free buffers. A mapping is released once none of its pieces is in use."""
        for pieces in [*self._free.values()]:
            pieces.clear()  # in place: finalizers of buffers in use will append to these lists

    def _reuse(self, size: int) -> _Piece | None:
        with contextlib.suppress(IndexError):
            return self._free[size].pop()
        with contextlib.suppress(IndexError):
            first, second = self._free[2 * size].pop().halves()
            self._free[size].append(second)
            return first
        return self._join(size)

    def _join(self, size: int) -> _Piece | None:
        """Join two free halves of a piece of this size; None if there are none."""
        if size % 2:
            return None
        halves = self._free[size // 2]
        seen: dict[_Piece, _Piece] = {}  # free halves by the piece they belong to, or themselves
        joined = None
        while halves and joined is None:
            half = halves.pop()
            whole = half.whole
            if whole in seen and whole is not None and whole.memory.nbytes == size:
                del seen[whole]
                joined = whole
            else:
                seen[whole or half] = half
        halves += seen.values()
        return joined

    def _new(self, size: int, *, halves: bool) -> _Piece:
        """Map a piece, or a pair that can be joined later; two of 1 MiB fill a large page."""
        if halves:
            first, second = self._new(2 * size, halves=False).halves()
            self._free[size].append(second)
            return first
        self.mapped_bytes += size
        return _Piece(memoryview(_map(size)))


def _map(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # not supported by this kernel
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
