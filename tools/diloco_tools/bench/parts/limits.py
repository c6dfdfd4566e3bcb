"""The limits of this machine: memcpy, raw TCP, the fold, the outer step. One thread each."""

from __future__ import annotations

from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import Figure, figure

PART = "limits"
CHUNKS = 512  # of each measurement: 1 GiB in fp32


def measure(pool: ProcessPool, *, repeats: int) -> list[Figure]:
    """All four in turn, several times."""
    kernels = pool.role("kernels")
    found: dict[str, list[float]] = {"memcpy": [], "fold": [], "outer_step": []}
    raw: list[float] = []
    for _ in range(repeats):
        for name, values in found.items():
            values.append(kernels.ask(name, chunks=CHUNKS)["speed"])
        raw.append(pool.raw.measure().speed)
    pool.dismiss("kernels")
    rows = {
        "memcpy, one thread": found["memcpy"],
        "raw TCP, loopback": raw,
        "fold: bf16 through a scratch": found["fold"],
        "outer step, of parameter bytes": found["outer_step"],
    }
    return [figure(PART, row, "speed", values, "GB/s") for row, values in rows.items()]
