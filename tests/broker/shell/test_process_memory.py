"""What the broker's process takes of the machine: memory that it keeps and gives back, open files."""

import subprocess
import sys
from pathlib import Path

import pytest

from diloco_protocol.chunks import CHUNK_ELEMENTS
from kit.process_kit import Processes, memory_kib, wait_for
from kit.raw_worker import RawWorker, one_tensor

CLAIMED = 400_000_000  # elements: 4.8 GB with momentum and sums

MEMORY = """
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
OPEN_FILES = """
import resource, sys
from diloco_broker.shell.process_memory import allow_connections
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(allow_connections(100), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def said_by(script: str, *arguments: object) -> list[str]:
    """The words that a process of its own prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    can, kept, too_much, still, done, after = said_by(MEMORY)
    if can == done == "False":
        pytest.skip("another allocator")
    assert int(kept) >= 60 and (too_much, int(still) >= 60) == ("False", True)
    assert done == "True" and int(after) < 8


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(300, 4000, 2312), (300, 500, 500), (3000, 4000, 3000)],
    ids=["what is needed", "no more than may be", "never less than there was"],
)
def test_limit_is_raised_for_the_workers_that_may_come(soft: int, hard: int, expected: int) -> None:
    assert said_by(OPEN_FILES, soft, hard) == [str(each) for each in (expected, expected, hard)]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_claim_of_a_size_takes_no_memory_and_is_forgotten(processes: Processes) -> None:
    broker = processes.broker(
        workers=1, max_parameters=2 * CLAIMED, disconnect_grace=0.1, chunk_elements=CHUNK_ELEMENTS
    )
    address = broker.address()

    def memory() -> int:
        """MiB that it has taken, on disk or not; pages of files come and go as the system likes."""
        return (memory_kib(broker.pid, "RssAnon") + memory_kib(broker.pid, "VmSwap")) >> 10

    with RawWorker(address, "first") as first:  # a broker that a worker has joined before
        first.join(one_tensor(10))
        first.send("leave", session=first.session)
        broker.says("first leaves")
    before = memory()
    with RawWorker(address, "claimant") as claimant:
        claimant.join(one_tensor(CLAIMED))
        while claimant.receive("notice")["what"] != "seed":
            pass
        chunks = -(-CLAIMED // claimant.config["chunk_elements"])
        offer = {"push_id": 41, "fragment": 0, "chunks": chunks, "wire_dtype": "fp32"}
        claimant.send("push", session=claimant.session, purpose="seeding", **offer)
        claimant.receive("grant")
        claimant.send_chunk(41, 0, bytes(4 * CHUNK_ELEMENTS))
        claimant.receive("ack")
        assert memory() < before + 64
    broker.says("claimant counts as dead")
    wait_for(lambda: memory() < before + 32)
    with RawWorker(address, "other") as other:
        assert other.join(one_tensor(20))["first_round"] == 0
