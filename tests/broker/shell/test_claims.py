"""A size that is only claimed takes no memory of a live broker, and what came is given back."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_broker.shell.process_memory import memory_bytes
from diloco_protocol.chunks import CHUNK_ELEMENTS
from kit.process_kit import Processes, memory_kib, wait_for
from kit.raw_worker import RawWorker, one_tensor

pytest_plugins = ("kit.process_fixtures",)

CLAIMED = 400_000_000  # elements: 4.8 GB with momentum and sums


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
        while claimant.receive("notice")["what"] != "donate":
            pass
        chunks = -(-CLAIMED // claimant.config["chunk_elements"])
        offer = {"push_id": 41, "fragment": 0, "chunks": chunks, "wire_dtype": "fp32"}
        claimant.send("push", session=claimant.session, purpose="donation", **offer)
        claimant.receive("grant")
        claimant.send_chunk(41, 0, bytes(4 * CHUNK_ELEMENTS))
        claimant.receive("ack")
        assert memory() < before + 64
    broker.says("claimant counts as dead")
    wait_for(lambda: memory() < before + 32)
    with RawWorker(address, "other") as other:
        assert other.join(one_tensor(20))["first_round"] == 0


def test_memory_that_there_is_is_known() -> None:
    found = memory_bytes()
    assert found is None or found > 64 << 20
