"""Workers that know two brokers, one of which is killed, and workers that follow one that moves."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_broker import Broker, BrokerConfig
from diloco_worker import DiLoCoClient
from kit.process_kit import LOCAL, PATIENCE_S, Processes
from kit.sites import ledger_of

ONES = {"weight": torch.ones(4, 4)}


def a_broker(**options: Any) -> Broker:
    given: dict[str, Any] = {**LOCAL, "save_dir": None, "recover_wait": 0.0, **options}
    return Broker(BrokerConfig(**given))


def test_push_of_a_broker_that_was_killed_counts_at_the_second(processes: Processes) -> None:
    first = processes.broker(save_dir=None, workers=2)
    with a_broker(workers=2) as second:
        both = f"{first.address()}, {second.address}"
        a, b = (DiLoCoClient(both, worker_id=name, timeout=PATIENCE_S) for name in "ab")
        with a, b:
            model = torch.nn.Linear(4, 4, bias=False)
            before = a.join(model)
            b.join(model)
            push_id = a.push(ONES)  # and the round waits for the other
            first.kill()
            began = time.monotonic()
            b.push(ONES)
            after = a.pull()
            took = time.monotonic() - began
        assert took < 5.0, "0.2 s on an idle machine"
        assert after.version.run == before.version.run
        assert after.version.counter == before.version.counter + 1
        assert push_id in ledger_of(second)["a"]


# A broker that moves to another address, and a worker that follows it by a file.


@pytest.mark.slow
def test_worker_follows_a_broker_that_moves(processes: Processes, tmp_path: Path) -> None:
    file = tmp_path / "address"
    known = f"file://{file}"
    worker = processes.train("a", known, 200, pause=0.01)
    worker.says(f"the file {file} does not exist yet; waiting for ")
    options = ("--sync-every", "5", "--save-dir", "run", "--address-file", str(file))
    first, here = processes.serve(*options)
    assert file.read_text().splitlines()[0] == here
    first.says("Round 3 closed")
    with DiLoCoClient(known, timeout=30.0) as client:
        assert client.pull().version.counter >= 3
    first.kill()
    file.write_text("")  # as a script does that cannot replace the file
    second, there = processes.serve(*options)
    assert there != here
    assert processes.asks("status", "--address", known) == 0
    second.says("expected workers averaged")
    assert worker.ends() == 0, worker.output
    result = processes.result("a")
    assert result["steps"] == 200
    assert int(result["metrics"]["pushes"]) > 10
    assert all(torch.isfinite(torch.tensor(result["weights"])))
