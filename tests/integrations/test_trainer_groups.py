"""Trainers of several processes, Hugging Face's and Lightning's: the processes are one worker."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kit.integrations import HEAVY, PATIENT, WITHIN_S, needs
from kit.process_kit import Child, Processes, a_free_address
from kit.tiny_task import DIES_AT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

FOLDER = Path(__file__).parent


def trainer_of_two(processes: Processes, script: str, address: str, **env: str) -> list[Child]:
    port = a_free_address().rpartition(":")[2]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        processes.run(
            *(str(FOLDER / script), "a"),
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


def trained(
    processes: Processes, script: str, folder: Path, *, dies_at: int | None
) -> list[dict[str, Tensor]]:
    """What each process of the Trainer comes to, and one of one process beside it."""
    folder.mkdir()
    processes.folder = folder
    address = processes.broker(**PATIENT).address()
    alone = processes.run(str(FOLDER / script), "b", DILOCO_SERVER=address)
    if dies_at is not None:
        first = trainer_of_two(processes, script, address, **{DIES_AT: str(dies_at)})
        codes = [each.ends(WITHIN_S) for each in first]
        assert -9 in codes, "\n".join(each.output for each in first)
    trainer = trainer_of_two(processes, script, address)
    codes = [each.ends(WITHIN_S) for each in trainer]
    assert codes == [0, 0], "\n".join(each.output for each in trainer)
    assert alone.ends(WITHIN_S) == 0, alone.output
    return [torch.load(folder / f"{name}.pt", weights_only=True) for name in ("a0", "a1", "b")]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("trainer_script.py", marks=needs("transformers", "accelerate")),
        pytest.param("lightning_script.py", marks=needs("lightning")),
    ],
)
def test_processes_of_a_trainer_are_one_worker_that_goes_on_after_a_kill(
    processes: Processes, tmp_path: Path, script: str
) -> None:
    processes.begin_with(*(name for name in HEAVY if find_spec(name.partition(".")[0])))
    whole = trained(processes, script, tmp_path / "whole", dies_at=None)
    resumed = trained(processes, script, tmp_path / "resumed", dies_at=7)
    for other in (*whole[1:], *resumed):
        torch.testing.assert_close(other, whole[0], rtol=0, atol=0)
