"""Room for connections: each one is an open file, and systems let a process open few unless it asks."""

from __future__ import annotations

import contextlib
import resource

from diloco_broker.shell.connection_watch import MOST_STRANGERS

# Besides connections: files, sockets, what libraries open.
OTHERS = 256
# Of a worker, for the connections that are foreseen: as many as a machine usually has accelerators.
PROCESSES = 8


def allow_connections(workers: int) -> int:
    """Let this process hold the connections of this number of workers, and of all strangers.

    A worker has one for control and one for each of its processes, and twice as many while it comes
    back. Returns how many files it may open now, which is less where the system's hard limit is.
    """
    wanted = MOST_STRANGERS + 2 * (1 + PROCESSES) * workers + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):  # a system with a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
