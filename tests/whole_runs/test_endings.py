"""Whole runs that come to the end their options set: processes, sockets, the daemon's command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from kit.paths import KIT
from kit.process_kit import Processes

pytest_plugins = ("kit.process_fixtures",)

MODES = {
    "sync": ("--max-rounds", "4"),
    "async": ("--mode", "async", "--max-rounds", "6"),
    "streaming": ("--num-fragments", "2", "--token-budget", "640"),
}


@pytest.mark.parametrize("mode", MODES)
def test_workers_finish_the_last_round_and_the_broker_leaves_the_model(
    processes: Processes, tmp_path: Path, mode: str
) -> None:
    folder = tmp_path / "run"
    options = ("--workers", "2", "--sync-every", "6", "--save-dir", str(folder), *MODES[mode])
    broker, address = processes.serve(*options)
    workers = [processes.train(name, address, steps=100_000) for name in "ab"]
    for worker in workers:
        worker.says("stops: The run is over: ")
        assert worker.ends() == 0
    assert broker.ends() == 0
    final = load_file(folder / "final-model.safetensors")
    assert len(final) == 4
    if mode == "sync":
        sums = [final[name].double().sum().item() for name in ("0.weight", "0.bias")]
        for name in "ab":
            result = processes.result(name)
            assert result["steps"] == 24
            assert result["weights"][:2] == pytest.approx(sums, abs=1e-5)
            assert result["metrics"]["rounds"] == "4"


@pytest.mark.slow
def test_a_worker_that_leaves_without_having_closed_a_round_says_so_at_both_ends(
    processes: Processes,
) -> None:
    broker, address = processes.serve("--sync-every", "5", "--no-save")
    words = "without having closed a round"
    idle, busy = (processes.train(name, address, steps=3 + len(name)) for name in ("a", "bb"))
    for worker in (idle, busy):
        assert worker.ends() == 0
    assert words in idle.output and words not in busy.output
    assert processes.asks("shutdown", "--address", address, "--yes") == 0
    broker.ends()
    assert f"a left {words}" in broker.output and f"bb left {words}" not in broker.output


@pytest.mark.slow
def test_an_operator_has_all_workers_save_and_then_stop(processes: Processes) -> None:
    _, address = processes.serve("--workers", "2", "--sync-every", "5", "--no-save")
    script = str(KIT / "saving_script.py")
    workers = [
        processes.run(script, "100000", DILOCO_SERVER=address, DILOCO_WORKER_ID=name)
        for name in "ab"
    ]
    for worker in workers:
        worker.says("step 12")
    assert processes.asks("save-all", "--address", address) == 0
    for worker in workers:
        worker.says("saves")
    assert processes.asks("stop-all", "--address", address, "--yes") == 0
    assert [worker.ends() for worker in workers] == [3, 3]
