"""Whole runs that come to the end their options set: processes, sockets, the daemon's command line."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from kit.process_kit import Processes

pytest_plugins = ("kit.process_fixtures",)

MODES = {
    "sync": ("--max-rounds", "4"),
    "async": ("--mode", "async", "--max-rounds", "6"),
    "streaming": ("--num-fragments", "2", "--token-budget", "640"),
}


@pytest.mark.parametrize(
    "mode",
    ["sync", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("async", "streaming"))],
)
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
            assert result["metrics"]["pushes"] == "4"
