"""Transport alone: DEALER and ROUTER with our frames and credits, and nothing done with chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from diloco_protocol import CHUNK_ELEMENTS
from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import TRANSPORT, Figure, figure
from diloco_tools.bench.report.ratios import against, in_turn

PART = TRANSPORT
DEFAULT_CHUNK = 2 * CHUNK_ELEMENTS  # bytes in bf16
DEFAULT_WINDOW = 8  # chunks under way: what the broker grants a single push


@dataclass(frozen=True)
class Way:
    """One direction: speed in GB/s, CPU seconds of the broker's end per GB."""

    speed: float
    cpu: float


def measure(
    pool: ProcessPool,
    *,
    repeats: int,
    total: int,
    chunk_sizes: Sequence[int] = (DEFAULT_CHUNK,),
    windows: Sequence[int] = (DEFAULT_WINDOW,),
) -> list[Figure]:
    """Both ways, for each size of chunks (bytes) and each window; `total` bytes a measurement."""
    worker, broker = pool.role("transport", "dealer"), pool.role("transport", "router")
    worker.ask("connect", address=broker.ask("bind")["address"])
    broker.ask("meet")

    def both_ways(chunks: int, size: int, window: int) -> tuple[Way, Way]:
        gigabytes = chunks * size / 1e9
        broker.tell("collect", chunks=chunks)
        sent, got = worker.ask("push", chunks=chunks, size=size, window=window), broker.hear()
        up = Way(gigabytes / (sent["ended"] - sent["began"]), got["cpu"] / gigabytes)
        worker.tell("pull", chunks=chunks, window=window)
        replied = broker.ask("reply", chunks=chunks, size=size, window=window)
        seconds = worker.hear()["ended"] - replied["began"]
        return up, Way(gigabytes / seconds, replied["cpu"] / gigabytes)

    figures = []
    for size in chunk_sizes:
        for window in windows:
            product = partial(both_ways, max(1, total // size), size, window)
            raw, pairs = in_turn(pool.raw.measure, product, repeats)
            of_it = partial(figure, PART, f"chunks of {size // 1024} KiB, window {window}")
            for name, found in zip(("up", "down"), zip(*pairs, strict=True), strict=True):
                speeds = [each.speed for each in found]
                figures.append(of_it(name, speeds, "GB/s"))
                shares = against(speeds, [each.speed for each in raw])
                figures.append(of_it(f"{name} / raw", shares, "x"))
            is_usual = (size, window) == (DEFAULT_CHUNK, DEFAULT_WINDOW)
            cpu = against(
                [up.cpu + down.cpu for up, down in pairs],
                [each.send_cpu + each.receive_cpu for each in raw],
            )
            target = "cpu transport" if is_usual else None
            figures.append(of_it("CPU of the ROUTER / raw", cpu, "x", target=target))
    pool.dismiss("dealer", "router")
    return figures
