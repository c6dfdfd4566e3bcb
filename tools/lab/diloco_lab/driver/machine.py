"""This machine and its processes, as Linux's /proc describes them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import resource
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import zmq

from diloco_tools.tcp_proxy import HOST


def resident(pid: int) -> int:
    """Bytes of memory of a process; raises OSError if it is gone."""
    return bytes_in(f"/proc/{pid}/status", "VmRSS")


def peak(pid: int) -> int:
    """Its largest memory since its start, or since `forget_peak`."""
    return bytes_in(f"/proc/{pid}/status", "VmHWM")


def available_bytes() -> int:
    """Memory that new processes can have without swapping."""
    return bytes_in("/proc/meminfo", "MemAvailable")


def bytes_in(path: str, name: str) -> int:
    """The value of a line such as "VmRSS:   1024 kB"."""
    (found,) = (line for line in Path(path).read_text().splitlines() if line.startswith(name + ":"))
    return int(found.split()[1]) * 1024


def forget_peak(pid: int) -> None:
    """Reset the peak of a process to its current memory; see proc(5), clear_refs."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def give_back() -> None:
    """Return unused memory of this process to the system, so that it is not counted."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all of its threads, to the nanosecond; raises OSError if it is gone.

    The id of its clock is that of clock_getcpuclockid(3) on Linux.
    """
    return time.clock_gettime((~pid << 3) | 2)


def allow_many_files() -> None:
    """Let this process and its children open as many files and sockets as they may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def free_port() -> int:
    """A free port."""
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def complaint() -> str:
    """Why nothing can be measured here; empty if it can."""
    if Path("/proc/self/clear_refs").exists():
        return ""
    return f"processes are watched through Linux's /proc, and this is {sys.platform}"


def describe() -> dict[str, Any]:
    """The context of measurements: processor, memory, load, versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "pyzmq": zmq.__version__,
        "libzmq": zmq.zmq_version(),
    }
