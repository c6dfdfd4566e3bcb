"""Raises the limit of open files: each connection needs one, and the default limit is low."""

from __future__ import annotations

import contextlib
import resource

from diloco_broker.shell.connection_watch import MOST_UNAUTHENTICATED

# Open files besides connections: files, sockets, those of libraries.
OTHERS = 256
# Processes per worker for which connections are reserved: a machine usually has 8 accelerators.
PROCESSES = 8


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
