"""A worker of several processes goes on from its checkpoint, also with another number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kit.islands import Island
from kit.process_kit import PATIENCE_S, Processes

pytest_plugins = ("kit.process_fixtures",)

SYNC: dict[str, Any] = {
    "sync_every": 4,
    "max_rounds": 12,
    "chunk_elements": 777,
    "deterministic": True,  # what a push has sent when its worker is killed counts whole or not
}
# Behind step 18 a fragment is in flight.
STREAMING: dict[str, Any] = {
    "sync_every": 6,
    "num_fragments": 2,
    "fragment_sync_delay": 2,
    "fragment_merge": "rebase",
    "max_rounds": 14,
    "chunk_elements": 777,
    "deterministic": True,  # what a push has sent when its worker is killed counts whole or not
}


@pytest.fixture(autouse=True)
def preloaded(processes: Processes) -> None:
    processes.begin_with("torch.distributed.tensor.parallel", "torch.distributed.fsdp")


@pytest.mark.parametrize("mode", [SYNC, STREAMING], ids=["sync", "streaming"])
@pytest.mark.parametrize(
    ("before", "after", "load"),
    [(2, 2, "own"), (2, 3, "all"), (3, 2, "all"), (2, 1, "all"), (1, 2, "all")],
)
def test_worker_goes_on_as_if_nothing_had_happened(
    processes: Processes, tmp_path: Path, mode: dict[str, Any], before: int, after: int, load: str
) -> None:
    """Gradients are those of one process, so the model is bit for bit that of a run without a stop."""
    models = []
    for name, dies_at in (("stopped", 19), ("whole", -1)):
        folder = tmp_path / name
        folder.mkdir()
        broker = processes.broker(save_dir=str(folder / "run"), **mode)
        island = Island(
            *(processes, folder, "ddp" if before > 1 else "plain", before, broker.address(), "a"),
            save_at=18,
            dies_at=dies_at,
            load=load,
        )
        codes = island.ends()
        if dies_at > 0:
            assert -9 in codes, island.ranks[0].output
            island.go_on("ddp" if after > 1 else "plain", after)
            codes = island.ends()
            assert "goes on at 18" in island.ranks[0].output
        assert not any(codes), "\n".join(each.output for each in island.ranks)
        assert broker.ends(PATIENCE_S) == 0, broker.output
        models.append(load_file(folder / "run" / "final-model.safetensors"))
    stopped, whole = models
    for name, value in whole.items():
        assert stopped[name].equal(value), name


def test_state_of_one_process_is_not_enough_for_another_number(
    processes: Processes, tmp_path: Path
) -> None:
    broker = processes.broker(save_dir=None, **SYNC)
    island = Island(
        *(processes, tmp_path, "ddp", 2, broker.address(), "a"), save_at=18, dies_at=19, load="own"
    )
    assert -9 in island.ends()
    island.go_on("ddp", 3, load="own")
    assert all(island.ends())
    said = "\n".join(each.output for each in island.ranks)
    assert "is missing; give load_state_dict() a list" in said
