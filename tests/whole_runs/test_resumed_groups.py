"""A worker of several processes goes on from its checkpoint, also with another number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kit.islands import Island
from kit.process_kit import PATIENCE_S, Processes
from kit.saved_islands import train_from_checkpoint

pytestmark = pytest.mark.slow
pytest_plugins = ("kit.process_fixtures",)

SYNC: dict[str, Any] = {
    "sync_every": 4,
    "max_rounds": 12,
    "chunk_elements": 777,
    "deterministic": True,  # what a push has sent when its worker is killed counts whole or not
}
# All processes but one own nothing.
ONE_CHUNK = {**SYNC, "chunk_elements": 100_000}
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


# With a residual, and chunks in flight of which the bytes are kept.
FEW_BITS = {**STREAMING, "wire_dtype": "int4z", "reply_dtype": "int4z"}
MODES = {"sync": SYNC, "streaming": STREAMING, "one-chunk": ONE_CHUNK, "few-bits": FEW_BITS}


# Each way to load in each mode, each change of the number once: not their product.
@pytest.mark.parametrize(
    ("mode", "before", "after", "load"),
    [
        *(("sync", 2, 2, "own"), ("sync", 2, 1, "all"), ("sync", 2, 3, "dcp")),
        *(("streaming", 3, 2, "all"), ("streaming", 1, 2, "dcp")),
        *(("few-bits", 2, 2, "own"), ("few-bits", 2, 3, "all"), ("few-bits", 2, 1, "dcp")),
        ("one-chunk", 1, 3, "all"),
    ],
)
def test_worker_goes_on_as_if_nothing_had_happened(
    processes: Processes, tmp_path: Path, mode: str, before: int, after: int, load: str
) -> None:
    """Gradients are those of one process, so the model is bit for bit that of a run without a stop."""
    models = []
    for name, dies_at in (("stopped", 19), ("whole", -1)):
        folder = tmp_path / name
        folder.mkdir()
        broker = processes.broker(save_dir=str(folder / "run"), **MODES[mode])
        island = Island(
            *(
                processes,
                folder,
                "ddp" if before > 1 else "plain",
                before,
                broker.address(),
                "a",
                train_from_checkpoint,
            ),
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
        results = island.results()
        counted, then = sum(each["tokens"] for each in results), 18 * 8 * before
        now = (results[0]["steps"] - 18) * 8 * (after if dies_at > 0 else before)
        assert counted == then + now, "tokens of all processes together are those of the worker"
        models.append(load_file(folder / "run" / "final-model.safetensors"))
    stopped, whole = models
    for name, value in whole.items():
        assert stopped[name].equal(value), name


@pytest.mark.parametrize(
    ("before", "after", "load", "spoilt", "words"),
    [
        (2, 2, "own", "model", "tensors differ (embed.weight)"),
        (2, 1, "all", "model", "tensors differ (embed.weight)"),
        (1, 2, "all", "model", "tensors differ (embed.weight)"),
        (2, 2, "own", "moment", "load in each what was saved at the same moment"),
    ],
)
def test_what_was_not_saved_together_is_refused_by_all(
    processes: Processes,
    tmp_path: Path,
    before: int,
    after: int,
    load: str,
    spoilt: str,
    words: str,
) -> None:
    """What a stale model is away from its base would be pushed as if it had been trained."""
    broker = processes.broker(save_dir=None, **SYNC)
    kind = "ddp" if before > 1 else "plain"
    island = Island(
        *(processes, tmp_path, kind, before, broker.address(), "a", train_from_checkpoint),
        save_at=18,
        dies_at=19,
        load=load,
    )
    assert -9 in island.ends()
    island.go_on("ddp" if after > 1 else "plain", after, spoilt=spoilt)
    codes = island.ends()
    assert all(code > 0 for code in codes), codes
    for each in island.ranks:
        assert words in each.output, each.output


def test_state_of_one_process_is_not_enough_for_another_number(
    processes: Processes, tmp_path: Path
) -> None:
    broker = processes.broker(save_dir=None, **SYNC)
    island = Island(
        *(processes, tmp_path, "ddp", 2, broker.address(), "a", train_from_checkpoint),
        save_at=18,
        dies_at=19,
        load="own",
    )
    assert -9 in island.ends()
    island.go_on("ddp", 3, load="own")
    assert all(island.ends())
    said = "\n".join(each.output for each in island.ranks)
    assert "is missing; give load_state_dict() a list" in said
