"""Reads what `torch.distributed.checkpoint` saved of workers of several processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from diloco_protocol import UsageError
from diloco_worker.group.dcp import saved_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled.*to save")


def state_of(worker: str, rank: int, count: int) -> dict[str, Any]:
    """A minimal state: values of all kinds, at all depths."""
    fragments = [
        {"base": {"parameters": torch.full((2 + rank,), float(rank))}, "version": [worker, number]}
        for number in range(3)
    ]
    plain = {"worker_id": worker, "frozen": None, "plan": [], "fragments": fragments}
    return {f"{worker}, process {rank} of {count}": plain}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.fixture
def of_two(tmp_path: Path) -> Path:
    resume = {**state_of("a", 0, 2), **state_of("a", 1, 2)}
    saved = {"model": {"w": torch.ones(3)}, "diloco": {"local_step": 18, "resume": resume}}
    save(saved, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


@pytest.mark.parametrize(
    ("worker", "rank", "count", "parts"),
    [
        ("a", 1, 2, [1]),
        (None, 1, 2, [1]),
        ("a", 0, 1, [0, 1]),
        ("a", 0, 3, [0, 1]),
        ("a", 2, 3, [0, 1]),
    ],
)
def test_process_reads_its_own_part_or_those_of_another_number_of_processes(
    of_two: Path, worker: str | None, rank: int, count: int, parts: list[int]
) -> None:
    wanted = {name: part for each in parts for name, part in state_of("a", each, 2).items()}
    for place in (of_two, FileSystemReader(of_two)):
        found = saved_state(place, "diloco", worker, rank, count)
        assert equal(found, {"local_step": 18, "resume": wanted})


def test_worker_of_one_process_reads_its_own_state(tmp_path: Path) -> None:
    plain = {"format": 2, "fragments": [{"base": {"parameters": torch.ones(2)}}]}
    save({"diloco": {"local_step": 1, "resume": plain}}, checkpoint_id=tmp_path, no_dist=True)
    assert equal(saved_state(tmp_path, "diloco", None, 0, 2)["resume"], plain)


def test_of_several_workers_each_reads_its_own(tmp_path: Path) -> None:
    resume = {**state_of("a", 0, 1), **state_of("b", 0, 1)}
    save({"diloco": {"local_step": 1, "resume": resume}}, checkpoint_id=tmp_path, no_dist=True)
    for worker in ("a", "b"):
        found = saved_state(tmp_path, "diloco", worker, 0, 4)
        assert equal(found["resume"], state_of(worker, 0, 1))
    for stranger in (None, "c"):
        with pytest.raises(UsageError, match="several workers, a, b"):
            saved_state(tmp_path, "diloco", stranger, 0, 1)


def test_missing_state_is_reported(of_two: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no 'outer'; it has: diloco, model\."):
        saved_state(of_two, "outer", None, 0, 1)
    with pytest.raises(UsageError, match="not a checkpoint"):
        saved_state(tmp_path / "nothing", "diloco", None, 0, 1)
