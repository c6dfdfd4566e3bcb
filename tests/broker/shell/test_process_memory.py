"""The memory of a process that keeps what it frees: what an attack has taken is given back."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes
from diloco_broker.shell.process_memory import (
    give_back_freed_memory, keep_freed_memory, rss_bytes,
)

can = keep_freed_memory()
heap = ctypes.CDLL(None)
heap.malloc.restype, heap.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
before = rss_bytes()
taken = [heap.malloc(2 << 20) for _ in range(32)]
for place in taken:
    ctypes.memset(place, 1, 2 << 20)
last = heap.malloc(64)
for place in taken:
    heap.free(place)
kept = rss_bytes() - before
too_much = give_back_freed_memory(most_bytes=1 << 20)
still = rss_bytes() - before
done = give_back_freed_memory()
print(can, kept >> 20, too_much, still >> 20, done, (rss_bytes() - before) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    command = [sys.executable, "-c", SCRIPT]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    can, kept, too_much, still, done, after = said.split()
    if can == done == "False":
        pytest.skip("another allocator")
    assert int(kept) >= 60 and (too_much, int(still) >= 60) == ("False", True)
    assert done == "True" and int(after) < 8
