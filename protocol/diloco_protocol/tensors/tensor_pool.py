"""Memory for chunks and flat vectors, at either end: mapped once, used again, in large pages.

Each round makes a new tensor for each chunk and each delta, since what was handed out is never written
again (the wire, a checkpoint or a slow worker may still read it). Fresh memory costs the kernel a zeroed
page for every 4 KiB: for a chunk of 2 MiB that is more than the whole outer step. Here it is mapped in
pages of 2 MiB, where the system has them, and handed out again when nothing refers to it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
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
    """Hands out tensors with memory that nobody reads any more.

    Each time a buffer is handed out there is one array object over it, which the tensor, each view of
    it and each frame that is sent from it hold. When the last of them lets go, in whichever thread, the
    array goes and the buffer is free; one freed lately is taken first, since it may still be cached.
    Where none of a size is free, one twice as long is halved, and two halves are joined again: chunks in
    bf16 lie where fp32 accumulators were.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[_Piece]] = defaultdict(list)
        self._counting = threading.Lock()
        self._filling: threading.Thread | None = None
        self._changed = threading.Condition()  # one of the next three has changed
        self._allowed = 0.0  # `mapped_bytes` that `preallocate` may reach now
        self._is_idle = False  # it waits for more to be allowed
        self._is_closed = False
        self.mapped_bytes = 0  # memory that has been mapped, in use or not

    def like(self, tensor: Tensor) -> Tensor:
        """An uninitialised 1-D tensor with the length and dtype of this one."""
        return self.take(tensor.numel(), tensor.dtype)

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

    def preallocate(
        self, sizes: Sequence[int], *, ahead: float = math.inf
    ) -> threading.Thread | None:
        """Have a thread of its own map and touch memory that will be needed; None if it is too little.

        The first touch of a page costs more than all that is done with it later, on a virtual machine a
        hundred times as much: whoever has to be quick should not be the one who does it. `sizes` are
        bytes of each buffer; what is mapped by others meanwhile counts as part of them. No more than
        `ahead` bytes are mapped before `allow` says so: what somebody has only announced may never come.
        """
        wanted = [size for size in sizes if size >= SMALLEST]
        if not wanted:
            return None
        limit = self.mapped_bytes + sum(wanted)
        self._allowed = self.mapped_bytes + ahead
        self._filling = threading.Thread(
            target=self._touch, args=(wanted, limit), name="diloco-memory", daemon=True
        )
        self._filling.start()
        return self._filling

    def allow(self, more: float) -> None:
        """Let `preallocate` go on for so many bytes."""
        with self._changed:
            self._allowed += more
            self._changed.notify()

    def is_worth_waiting(self, size: int) -> bool:
        """Is none free of so many bytes, though `preallocate` is still at work?"""
        if size < SMALLEST or self._free[size]:
            return False
        return self._filling is not None and self._filling.is_alive() and not self._is_idle

    def close(self) -> None:
        """End `preallocate`, which takes as long as to touch one buffer. Nothing else changes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._filling is not None:
            self._filling.join()

    def _touch(self, sizes: Sequence[int], limit: int) -> None:
        for size in sizes:
            self._wait_until_allowed(size, limit)
            if self._is_closed or self.mapped_bytes + size > limit:
                return
            try:
                piece = self._new(size)
            except (OSError, MemoryError):  # whoever needs it will be told
                return
            # numpy lets other threads run meanwhile. So does torch, but a process that ends while a
            # thread is in there is aborted.
            np.frombuffer(piece.memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
            self._free[size].append(piece)

    def _wait_until_allowed(self, size: int, limit: int) -> None:
        with self._changed:
            while not self._is_closed and self._allowed < self.mapped_bytes + size <= limit:
                self._is_idle = True
                self._changed.wait()
            self._is_idle = False

    def _new(self, size: int) -> _Piece:
        buffer = _map(size)
        with self._counting:
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
