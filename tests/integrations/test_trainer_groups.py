"""Hugging Face's Trainer under torchrun: its processes are one worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kit.integrations import HEAVY, PATIENT, PLAIN, WITHIN_S, needs
from kit.process_kit import Child, Processes, a_free_address
from kit.tiny_task import DIES_AT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    needs("transformers", "accelerate"),
]
pytest_plugins = ("kit.process_fixtures",)

SCRIPT = Path(__file__).with_name("trainer_script.py")


def trainer_of_two(processes: Processes, address: str, **env: str) -> list[Child]:
    port = a_free_address().rpartition(":")[2]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        processes.run(
            *(str(SCRIPT), "a"),
            **{
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "DILOCO_SERVER": address,
                **place,
                **env,
            },
        )
        for rank in range(2)
    ]


def trained(processes: Processes, folder: Path, *, dies_at: int | None) -> list[dict[str, Tensor]]:
    """What each process of the Trainer comes to, beside a plain loop."""
    folder.mkdir()
    processes.folder = folder
    address = processes.broker(**PATIENT).address()
    plain = processes.run(str(PLAIN), "b", DILOCO_SERVER=address)
    if dies_at is not None:
        first = trainer_of_two(processes, address, **{DIES_AT: str(dies_at)})
        codes = [each.ends(WITHIN_S) for each in first]
        assert -9 in codes, "\n".join(each.output for each in first)
    trainer = trainer_of_two(processes, address)
    codes = [each.ends(WITHIN_S) for each in trainer]
    assert codes == [0, 0], "\n".join(each.output for each in trainer)
    assert plain.ends(WITHIN_S) == 0, plain.output
    return [torch.load(folder / f"a{rank}.pt", weights_only=True) for rank in range(2)]


def test_processes_of_a_trainer_are_one_worker_that_goes_on_after_a_kill(
    processes: Processes, tmp_path: Path
) -> None:
    processes.begin_with(*HEAVY[:1])
    whole = trained(processes, tmp_path / "whole", dies_at=None)
    resumed = trained(processes, tmp_path / "resumed", dies_at=7)
    for name, tensor in whole[0].items():
        for other in (whole[1], *resumed):
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=0)
