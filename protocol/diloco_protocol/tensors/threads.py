"""Thread pools for tensor work, in addition to the thread that owns the state."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

# With more threads memory bandwidth is the bottleneck.
MOST_BY_DEFAULT = 4


def thread_count(asked: int | None) -> int:
    """The number of threads: as requested, else one less than this process's cores, from 1 to 4."""
    if asked:
        return asked
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min(cores - 1, MOST_BY_DEFAULT))


def thread_pool(threads: int) -> ThreadPoolExecutor | None:
    """A pool of this many threads; None for fewer than one."""
    if threads < 1:
        return None
    return ThreadPoolExecutor(threads, thread_name_prefix="diloco-tensors")
