"""The processes of one worker decide alike: through new settings, and after they have left."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_worker import DiLoCoWorker
from kit.islands import Island, gradients_of_a_pipeline, language
from kit.process_kit import Processes

pytestmark = pytest.mark.slow
pytest_plugins = ("kit.process_fixtures",)


class Script:
    """The model of one process, and its worker."""

    def __init__(self, address: str, name: str) -> None:
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.model = language()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.diloco = DiLoCoWorker(
            self.model, self.optimizer, server=address, worker_id=name, process_group="world"
        )

    def steps(self, number: int) -> None:
        for _ in range(number):
            gradients_of_a_pipeline(self.model, self.diloco.local_step)
            self.optimizer.step()
            print(f"step {self.diloco.local_step}", flush=True)


def ends_well(island: Island) -> list[Any]:
    """What each process has written."""
    codes = island.ends()
    assert codes == [0, 0], "\n".join(each.output for each in island.ranks)
    return [json.loads(island.out(rank).read_text()) for rank in (0, 1)]


def train_until_a_new_setting(kind: str, address: str, name: str, out: str, _: Any) -> None:
    script = Script(address, name)
    with script.diloco as diloco:
        while diloco.sync_every != 3:
            script.steps(1)
        told = [diloco.local_step, diloco.config and diloco.config.sync_every]
        script.steps(7)
    Path(out).write_text(json.dumps(told))


def test_new_setting_is_used_by_all_processes_from_one_step_on(
    processes: Processes, tmp_path: Path
) -> None:
    _, address = processes.serve("--sync-every", "8", "--workers", "1")
    island = Island(processes, tmp_path, "ddp", 2, address, "a", script=train_until_a_new_setting)
    island.ranks[0].says("step 9")
    processes.asks("set", address, "--sync-every", "3")
    told = ends_well(island)
    assert told[0] == told[1]
    assert told[0][1] == 3


def call_after_leaving(kind: str, address: str, name: str, out: str, _: Any) -> None:
    script = Script(address, name)
    with script.diloco as diloco:
        script.steps(4)
    Path(out).write_text(json.dumps([diloco.load_global(), diloco.force_sync()]))


def test_calls_after_the_worker_has_left_return_in_all_processes(
    processes: Processes, tmp_path: Path
) -> None:
    _, address = processes.serve("--sync-every", "2", "--workers", "1")
    island = Island(processes, tmp_path, "ddp", 2, address, "a", script=call_after_leaving)
    assert ends_well(island) == [[False, False]] * 2
