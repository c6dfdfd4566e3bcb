"""A process of k holds about 1/k of what a worker of one holds, and a slice: counted in bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.measured_islands import measure
from kit.process_kit import PATIENCE_S, Processes, a_free_address

pytestmark = pytest.mark.slow
pytest_plugins = ("kit.process_fixtures",)

# Base 1, delta in bf16 1/2, the version that arrives 1; and some for chunks at the ends.
OF_FP32 = 2.6
# What is on its way within the worker, what travels to and from the broker, and what is worked on.
SLICES = 16 << 20


@pytest.mark.parametrize(("kind", "count"), [("ddp", 2), ("fsdp", 4)])
def test_process_of_k_keeps_its_part_of_the_vectors_and_a_slice(
    processes: Processes, tmp_path: Path, kind: str, count: int
) -> None:
    broker = processes.broker(
        wire_dtype="bf16", sync_every=2, save_dir=None, chunk_elements=524_288
    )
    out, sizes = str(tmp_path / "out"), {"width": 2048, "layers": 6, "steps": 6}
    place = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": a_free_address().rpartition(":")[2],
    }
    ranks = [
        processes.start(measure, kind, broker.address(), out, sizes, RANK=str(rank), **place)
        for rank in range(count)
    ]
    for each in ranks:
        assert each.ends(4 * PATIENCE_S) == 0, each.output
    for rank in range(count):
        told = json.loads(Path(f"{out}.{rank}").read_text())
        assert told["rounds"] == 3
        most = OF_FP32 / count * told["whole"] + SLICES
        assert told["most"] <= most, f"{told['most'] / told['whole']:.2f} of the fp32 parameters"
        assert told["most"] >= told["whole"] / count, "nothing was counted"
