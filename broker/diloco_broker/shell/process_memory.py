"""The memory and the open files of a serving process: what it has, and how it asks for more.

glibc maps each large buffer separately and unmaps it when it is freed, so each chunk of each round costs
the kernel a zeroed page for every 4 KiB: for a chunk of 2 MiB more than adding or stepping it. With the
settings here such buffers come from the heap, which keeps freed memory. The broker's buffers have few
sizes and live for one round, so the heap does not grow beyond the needs of one round. Memory that an
attack made it allocate is returned to the system afterwards.
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

from diloco_broker.shell.connection_watch import MOST_UNAUTHENTICATED

# Parameters of <malloc.h>, and their values in bytes. glibc allows at most 32 MiB (HEAP_MAX_SIZE / 2 on
# 64 bits) for the first.
M_MMAP_THRESHOLD, MOST_FROM_HEAP = -3, 32 << 20
M_TRIM_THRESHOLD, NEVER = -1, (1 << 31) - 1
# Open files besides connections: files, sockets, those of libraries.
OTHERS = 256
# Processes per worker for which connections are reserved: a machine usually has 8 accelerators.
PROCESSES = 8
# For `gc.set_threshold`: a young collection after 700 allocations, a middle one after 3 young ones, a
# full one after 3000 middle ones, which are hundreds of rounds. The usual last two are 10 and 10.
RARELY_FULL = 700, 3, 3000
# Bytes that are returned to the system in one call: 0.13 ms per MiB, so 17 ms.
A_MOMENT_BYTES = 128 << 20


def allow_connections(workers: int) -> int:
    """Raise the limit of open files for this many workers, and for peers that have not joined.

    A worker has one control connection and one per process, and twice as many while it reconnects.
    Returns the new limit, which is lower if the system's hard limit is.
    """
    wanted = MOST_UNAUTHENTICATED + 2 * (1 + PROCESSES) * workers + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):  # the system has another, lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def keep_freed_memory() -> bool:
    """Make the allocator keep freed memory; returns False if it is not glibc's.

    It affects the entire process, so call it only in a dedicated one.
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
    """Return freed memory to the system, unless it is more than `most_bytes`.

    After `keep_what_is_there` it collects garbage first. Returns whether it was done; False also if the
    allocator is not that of glibc 2.33 or later.
    """
    if gc.get_threshold() == RARELY_FULL:
        gc.collect()
    try:
        library = ctypes.CDLL(None)
        free_bytes, trim = library.mallinfo2, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    free_bytes.restype, trim.argtypes = _HeapFigures, (ctypes.c_size_t,)
    if free_bytes().fordblks > most_bytes:  # of all threads; reads no pages
        return False
    trim(0)
    return True


class _HeapFigures(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>; `fordblks` is the number of free bytes."""

    _fields_ = [
        ("others", ctypes.c_size_t * 8),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def keep_what_is_there() -> None:
    """Exclude all current objects from cyclic garbage collection, and make full collections rare.

    The current ones are modules and their functions, about 200,000 objects: scanning them blocks the
    loop for 75 ms, during which no heartbeat is answered. Later ones belong to the parameters, some
    25,000 with 125 million: scanning them takes 8 to 25 ms, and hardly any are garbage. Call it once,
    before serving.
    """
    gc.collect()
    gc.freeze()
    if sys.version_info < (3, 14):  # its collector is incremental, and reads thresholds otherwise
        gc.set_threshold(*RARELY_FULL)


def rss_bytes() -> int:
    """Resident memory of this process, bytes; its peak if /proc is missing."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def memory_bytes() -> int | None:
    """Memory that this process may use, bytes: the machine's, or the limit of its control group.

    None if unknown.
    """
    found = list(_limits_of_control_groups())
    with contextlib.suppress(AttributeError, OSError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def _limits_of_control_groups() -> Iterator[int]:
    """Memory limits of this process's control groups and their parents (cgroups(7), both versions)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root, name = Path("/sys/fs/cgroup"), "memory.max"
                if controllers:
                    root, name = root / controllers, "memory.limit_in_bytes"
                own = PurePosixPath(path.lstrip("/"))
                for group in (own, *own.parents):
                    with contextlib.suppress(OSError, ValueError):  # "max", or no such file
                        yield int((root / group / name).read_text())
