"""Work queues in the process that trains: marks, order, and workers without a server."""

import gc
import os
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from diloco_protocol import UsageError
from diloco_protocol.data.order import unit_of
from diloco_worker import DiLoCoWorker
from diloco_worker.data import QueuedDataset, WorkQueue
from kit.process_kit import wait_for


def alone() -> DiLoCoWorker:
    model = torch.nn.Linear(2, 1)
    return DiLoCoWorker(model, torch.optim.SGD(model.parameters(), lr=0.1))


def pairs(unit: int) -> list[int]:
    return [10 * unit, 10 * unit + 1]


@pytest.mark.parametrize("processes", [0, 2])
def test_a_worker_alone_trains_on_each_unit_once_an_epoch(processes: int) -> None:
    queue = WorkQueue(alone(), "text", 5, epochs=2)
    data = QueuedDataset(queue, pairs)
    loader: DataLoader[Any] = DataLoader(data, batch_size=2, num_workers=processes)
    found = [each for batch in queue.batches(loader) for each in batch.tolist()]
    assert sorted(found) == sorted(2 * [each for unit in range(5) for each in pairs(unit)])


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_each_epoch_has_each_unit_once_in_its_own_order(size: int) -> None:
    orders = [[unit_of(e * size + place, size, 3) for place in range(size)] for e in range(2)]
    for epoch, order in enumerate(orders):
        assert sorted(order) == [(epoch, unit) for unit in range(size)]
    if size > 7:
        assert [unit for _, unit in orders[0]] != [unit for _, unit in orders[1]]
        assert [unit for _, unit in orders[0]] != list(range(size))


def test_trained_units_are_reported_with_the_following_step() -> None:
    diloco = alone()
    queue = WorkQueue(diloco, "text", 3, seed=None, prefetch=1)
    told: list[Any] = []
    diloco.units.link = type("L", (), {"tell": told.append, "dropped_units": {}})()
    batches = queue.batches(DataLoader(QueuedDataset(queue, pairs), batch_size=2), ahead=1)
    next(batches)
    diloco.units.stepped()
    assert not told, "its step is made before the next batch"
    next(batches)
    diloco.units.stepped()
    assert [(each.begun, each.ended) for each in told] == [((0,), (0,))]


def test_dropped_unit_is_not_reported_as_trained() -> None:
    diloco = alone()
    queue = WorkQueue(diloco, "text", 1, seed=None)
    told: list[Any] = []
    parts = {"tell": told.append, "dropped_units": {"text": {0}}}
    diloco.units.link = type("L", (), {**parts, "has_ended": False, "stopping": None})()
    loader = DataLoader(QueuedDataset(queue, pairs), batch_size=4, drop_last=True)
    assert not list(queue.batches(loader))
    assert not told and not queue._read


def listening() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "diloco-units"}


@pytest.mark.parametrize("processes", [0, 2])
def test_deleted_data_set_leaves_no_thread_and_no_model(processes: int) -> None:
    before = listening()
    queue = WorkQueue(alone(), "text", 3)
    kept = weakref.ref(queue)
    loader: DataLoader[Any] | None = DataLoader(QueuedDataset(queue, pairs), num_workers=processes)
    (thread,) = listening() - before
    assert loader is not None and len(list(queue.batches(loader))) == 6
    assert thread.is_alive(), "although the processes dropped their copies"
    del queue, loader
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    wait_for(lambda: kept() is None)  # the serving thread sees that its process ended


def test_deleting_a_forked_copy_does_not_end_the_original() -> None:
    data = QueuedDataset(WorkQueue(alone(), "text", 3), pairs)
    before = listening()
    child = os.fork()
    if child == 0:
        del data
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    there = QueuedDataset.__new__(QueuedDataset)
    there.__dict__.update(data.__getstate__())
    assert len(list(there)) == 6 and listening() == before


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"units": 0}, "units is 0"),
        ({"units": 2, "epochs": -1}, "epochs is -1"),
        ({"units": 2, "prefetch": 0}, "prefetch is 0"),
    ],
)
def test_invalid_numbers_are_refused(numbers: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        WorkQueue(alone(), "text", **numbers)
