"""A worker of several processes behind a relay: each of its connections for chunks goes through it."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from kit.islands import Island
from kit.process_kit import PATIENCE_S, Processes
from kit.sites import assert_close

pytestmark = pytest.mark.slow
pytest_plugins = ("kit.process_fixtures",)

SYNC: dict[str, Any] = {"sync_every": 3, "max_rounds": 8, "chunk_elements": 777}
ANYWHERE = "tcp://127.0.0.1:*"


def final_model(processes: Processes, **options: Any) -> dict[str, Tensor]:
    """Of two workers, one of them of two processes."""
    is_tree = options.get("relays", False)
    folder = processes.folder / ("tree" if is_tree else "star")
    folder.mkdir()
    broker = processes.broker(workers=2, save_dir=str(folder / "run"), **SYNC, **options)
    address, others = broker.address(), []
    if is_tree:
        words = ("-m", "diloco_broker", "relay", "--parent", address, "--name", "north")
        others.append(processes.run(*words, "--bind", ANYWHERE, "--feed", ANYWHERE))
        address = others[0].address()
    kinds = (("ddp", 2), ("plain", 1))
    islands = [
        Island(processes, folder, kind, count, address, f"worker-{number}")
        for number, (kind, count) in enumerate(kinds)
    ]
    for island in islands:
        codes = island.ends()
        assert codes == [0] * len(codes), "\n".join(each.output for each in island.ranks)
    for each in (*others, broker):
        assert each.ends(PATIENCE_S) == 0, each.output
    return load_file(folder / "run" / "final-model.safetensors")


def test_worker_of_two_processes_comes_to_the_same_through_a_relay(processes: Processes) -> None:
    wire: dict[str, Any] = {"wire_dtype": "fp32"}
    assert_close(final_model(processes, relays=True, **wire), final_model(processes, **wire))
