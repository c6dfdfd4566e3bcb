"""The memory of a process that does nothing but serve: how much it is; what is freed is used again.

glibc maps each large buffer anew and gives it back when it is freed, so each chunk of each round costs
the kernel a zeroed page for every 4 KiB: for a chunk of 2 MiB more than adding it up or stepping it
takes. Here such buffers come from the heap, which keeps what is freed. The broker's buffers have a
handful of sizes and live for one round, so the heap does not grow beyond what one round needs. What an
attack has made it grow by is given back when that is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Of <malloc.h>. 32 MiB is the most that glibc allows for the first (HEAP_MAX_SIZE / 2 on 64 bits).
M_MMAP_THRESHOLD, MOST_FROM_HEAP = -3, 32 << 20
M_TRIM_THRESHOLD, NEVER = -1, (1 << 31) - 1
# To give back a mebibyte takes 0.13 ms: this much takes 17 ms.
A_MOMENT_BYTES = 128 << 20


def keep_freed_memory() -> bool:
    """Let this process's allocator keep what is freed; False where it is not glibc's.

    For a process of one's own only: it holds for everything in it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    settings = ((M_MMAP_THRESHOLD, MOST_FROM_HEAP), (M_TRIM_THRESHOLD, NEVER))
    return all(mallopt(*setting) for setting in settings)


def give_back_freed_memory(most_bytes: int = A_MOMENT_BYTES) -> bool:
    """Give what is freed back to the system, unless it is so much that this takes more than a moment.

    Returns whether it was done; False also where the allocator is not glibc's, 2.33 or later.
    """
    try:
        library = ctypes.CDLL(None)
        free_bytes, trim = library.mallinfo2, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    free_bytes.restype, trim.argtypes = _HeapFigures, (ctypes.c_size_t,)
    if free_bytes().fordblks > most_bytes:  # of all threads; it looks at no page
        return False
    trim(0)
    return True


class _HeapFigures(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>; `fordblks` is the bytes that are free."""

    _fields_ = [
        ("others", ctypes.c_size_t * 8),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def keep_what_is_there() -> None:
    """Let the collector of cyclic garbage pass over everything that this process has now.

    That is modules and their functions, some 200,000 objects: to look through all of them takes the
    loop 75 ms, in which no heartbeat is answered. Call it once, before serving.
    """
    gc.collect()
    gc.freeze()


def rss_bytes() -> int:
    """Memory of this process now; its peak where /proc is missing."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def memory_bytes() -> int | None:
    """Memory that this process may use: the machine's, or less where its control group has less.

    None where the system does not say.
    """
    found = list(_limits_of_control_groups())
    with contextlib.suppress(AttributeError, OSError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def _limits_of_control_groups() -> Iterator[int]:
    """Of the groups that this process is in, and those that these are in: cgroups(7), both versions."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root, name = Path("/sys/fs/cgroup"), "memory.max"
                if controllers:
                    root, name = root / controllers, "memory.limit_in_bytes"
                own = PurePosixPath(path.lstrip("/"))
                for group in (own, *own.parents):
                    with contextlib.suppress(OSError, ValueError):  # "max", or not there
                        yield int((root / group / name).read_text())
