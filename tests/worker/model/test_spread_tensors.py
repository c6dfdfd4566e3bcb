"""A model that several processes have together does what a plain worker's does, bit for bit.

Each number of processes is started once, and goes through all cases (kit/spread_cases.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kit.spread_cases import CASES

BOUND_S = 110  # for all cases of one number of processes

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Told = dict[str, str]


def outcomes(count: int, folder: Path) -> list[Told]:
    """What failed in each process, by case."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "kit.spread_cases", str(rank), str(count), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=BOUND_S)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    files = [folder / f"{rank}.json" for rank in range(count)]
    for file, text in zip(files, said, strict=True):
        assert file.exists(), text
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def told() -> dict[int, list[Told]]:
    """By number of processes, what they told when they were done."""
    return {}


def marks(case: str) -> list[pytest.MarkDecorator]:
    return [needs_cuda] if "cuda" in case else []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "case"),
    [
        pytest.param(count, case, marks=marks(case))
        for count in (1, 2, 3, 4)
        for case, (counts, _) in CASES.items()
        if count in counts
    ],
)
def test_processes_do_together_what_one_does(
    count: int,
    case: str,
    told: dict[int, list[Told]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if count not in told:
        told[count] = outcomes(count, tmp_path_factory.mktemp("processes"))
    failed = [
        f"process {rank}: {each[case]}" for rank, each in enumerate(told[count]) if case in each
    ]
    assert not failed, "\n".join(failed)
