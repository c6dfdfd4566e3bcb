"""A model in several processes matches one in a single process bit for bit.

Each number of processes goes through all cases (kit/spread_cases.py) in one test: separate tests would
start the same processes in each process of pytest.
"""

import json
from pathlib import Path

import pytest
import torch

from kit.process_kit import Processes
from kit.spread_cases import main

BOUND_S = 110  # for all cases of one number of processes


def outcomes(
    processes: Processes, count: int, folder: Path, only: str | None = None
) -> list[dict[str, str]]:
    """The failures in each process, by case."""
    children = [processes.start(main, rank, count, folder, only) for rank in range(count)]
    for child in children:
        assert child.ends(BOUND_S) == 0, child.output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(3, marks=pytest.mark.slow),  # splits nothing evenly
        *(pytest.param(each, marks=pytest.mark.nightly) for each in (1, 2, 4)),
    ],
)
def test_several_processes_match_one(processes: Processes, count: int, tmp_path: Path) -> None:
    told = outcomes(processes, count, tmp_path)
    failed = [
        f"process {rank}, {case}: {error}"
        for rank, errors in enumerate(told)
        for case, error in errors.items()
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("count", [1, 2])
def test_processes_with_a_gpu_do_the_same(processes: Processes, count: int, tmp_path: Path) -> None:
    told = outcomes(processes, count, tmp_path, "replicas_on_cuda_do_what_a_plain_worker_does")
    assert told == [{}] * count
