"""Memory for chunks and flat vectors, at either end: mapped once, used again, in large pages.

Each round makes a new tensor for each chunk and each delta, since a tensor that was handed out is never
written again (the wire, a checkpoint or a slow worker may still read it). Fresh memory costs the kernel
a zeroed page for every 4 KiB: for a chunk of 2 MiB that is more than the whole outer step. Here it is
mapped in pages of 2 MiB, where the system has them, and handed out again when nothing refers to it.
glibc's heap does not: torch asks it for aligned memory, for which a freed chunk is too short by a few
bytes.
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

SMALLEST = 64 << 10  # bytes; below it the allocator is as good


def mapped(elements: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised 1-D tensor on the CPU, in memory of its own that goes back when it is freed."""
    size = elements * dtype.itemsize
    if size < SMALLEST:
        return torch.empty(elements, dtype=dtype)
    return torch.frombuffer(_map(size), dtype=dtype)


@dataclass(frozen=True, eq=False)
class _Piece:
    memory: memoryview
    whole: _Piece | None = None  # a longer piece that it is half of; None for a whole mapping

    def halves(self) -> tuple[_Piece, _Piece]:
        middle = self.memory.nbytes // 2
        return _Piece(self.memory[:middle], self), _Piece(self.memory[middle:], self)


class TensorPool:
    """Hands out tensors in memory that no tensor uses any more.

    Each time a buffer is handed out there is one array object over it, which the tensor, each view of
    it and each frame that is sent from it hold. When the last of them lets go, in whichever thread, the
    array goes and the buffer is free; one freed lately is taken first, since it may still be cached.
    Where none of a size is free, one twice as long is halved, and two halves are joined again: bf16
    lies where fp32 was.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[_Piece]] = defaultdict(list)
        self.mapped_bytes = 0  # memory that has been mapped, in use or not

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised 1-D tensor on the CPU."""
        size = elements * dtype.itemsize
        if size < SMALLEST:
            return torch.empty(elements, dtype=dtype)
        piece = self._reuse(size) or self._new(size)
        array = np.frombuffer(piece.memory, dtype=np.uint8)
        # `append` is one step for other threads, as `pop` is: no lock, which a finalizer must not take.
        weakref.finalize(array, self._free[size].append, piece).atexit = False
        return torch.from_numpy(array).view(dtype)

    def release(self) -> None:
        """Give back what is free."""
        self._free.clear()

    def _reuse(self, size: int) -> _Piece | None:
        with contextlib.suppress(IndexError):
            return self._free[size].pop()
        with contextlib.suppress(IndexError):
            first, second = self._free[2 * size].pop().halves()
            self._free[size].append(second)
            return first
        return self._join(size)

    def _join(self, size: int) -> _Piece | None:
        """A piece of which both halves are free; None if there is none."""
        halves = self._free[size // 2]
        seen: dict[_Piece, _Piece] = {}  # by what it is half of, or itself
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

    def _new(self, size: int) -> _Piece:
        buffer = _map(size)
        self.mapped_bytes += size
        return _Piece(memoryview(buffer))


def _map(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
