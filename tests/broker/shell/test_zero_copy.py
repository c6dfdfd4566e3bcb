"""Chunks are sent from where they lie, and their memory is used again: does anybody ever see that?"""

import threading
import zlib
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

from diloco_broker import Broker
from diloco_protocol.tensors.tensor_pool import SMALLEST
from diloco_worker import DiLoCoClient, GlobalParameters
from kit.whole_run import joined, make_config

# Large enough that memory is used again.
CHUNK = SMALLEST // 4
READERS, ROUNDS = 3, 40


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7 * CHUNK + 5))


def checksum(pulled: GlobalParameters) -> int:
    return zlib.crc32(pulled.tensors["weight"].numpy().tobytes())


def gradient(worker: int, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + number)
    return {"weight": torch.randn(7 * CHUNK + 5, generator=generator)}


@pytest.mark.slow
@pytest.mark.parametrize("reply", ["fp32", "bf16"])
def test_every_reader_of_a_version_gets_the_same_bytes_while_others_push(reply: str) -> None:
    """Observers read at any time, also the version before, while its successor is being made."""
    config = make_config(workers=2, chunk_elements=CHUNK, reply_dtype=reply)
    seen: dict[int, set[int]] = defaultdict(set)
    count = 0
    is_over = threading.Event()
    failures: list[BaseException] = []

    def observe(address: str) -> None:
        nonlocal count
        try:
            with DiLoCoClient(address, timeout=20) as client:
                while not is_over.is_set():
                    pulled = client.pull()
                    seen[pulled.version.counter].add(checksum(pulled))
                    count += 1
        except BaseException as error:  # noqa: BLE001 - it is raised where the test can see it
            failures.append(error)

    with Broker(config) as broker, joined(broker, Wide(), 2) as clients:
        threads = [threading.Thread(target=observe, args=(broker.address,)) for _ in range(READERS)]
        for thread in threads:
            thread.start()
        for number in range(ROUNDS):
            for worker, client in enumerate(clients):
                client.push(gradient(worker, number))
            for client in clients:
                pulled = client.pull()
                assert pulled.version.counter == number + 1
                seen[number + 1].add(checksum(pulled))
        is_over.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert not failures
    assert count > READERS, "the observers have seen some of it"
    assert {version: len(sums) for version, sums in seen.items() if len(sums) != 1} == {}
    assert len(set.union(*seen.values())) >= ROUNDS
