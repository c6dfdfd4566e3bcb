"""What this machine could do, and what of it arrives at the broker, and through a slow link."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from diloco_protocol import CHUNK_ELEMENTS
from diloco_tools.bench.options import Repeats, Size, numbers
from diloco_tools.bench.process_pool import (
    Ends,
    ProcessPool,
    ask_all,
    join_fake_workers,
    join_trainers,
)
from diloco_tools.bench.report.arithmetic import against, in_turn
from diloco_tools.bench.report.figures import TRANSPORT, TRANSPORT_WITH_FOLD, Figure, figure
from diloco_tools.bench.sizes import parameters_of
from diloco_tools.tcp_proxy import HOST

LIMITS, WAN = "limits", "wide-area link"
KERNEL_CHUNKS = 512  # of each measurement: 1 GiB in fp32
DEFAULT_CHUNK = 2 * CHUNK_ELEMENTS  # bytes in bf16
DEFAULT_WINDOW = 8  # chunks under way: what the broker grants a single push
# The link.
BITS_PER_S = 1e9
ROUND_TRIP_S = 0.1
RAW_S = 1.0  # that a measurement of raw TCP takes at the link's speed


def limits(pool: ProcessPool, *, repeats: Repeats = 5) -> list[Figure]:
    """memcpy, raw TCP, the fold, the outer step.

    One thread each, in turn.
    """
    kernels = pool.role("kernels")
    found: dict[str, list[float]] = {"memcpy": [], "fold": [], "outer_step": []}
    raw: list[float] = []
    for _ in range(repeats):
        for name, values in found.items():
            values.append(kernels.ask(name, chunks=KERNEL_CHUNKS)["speed"])
        raw.append(pool.raw().speed)
    pool.dismiss("kernels")
    rows = {
        "memcpy, one thread": found["memcpy"],
        "raw TCP, loopback": raw,
        "fold: bf16 through a scratch": found["fold"],
        "outer step, of parameter bytes": found["outer_step"],
    }
    return [figure(LIMITS, row, "speed", values, "GB/s") for row, values in rows.items()]


def transport(
    pool: ProcessPool,
    *,
    chunk_kib: Annotated[
        Sequence[int], numbers("Sizes of chunks in KiB, with commas; at most 4096.", 4096)
    ] = (DEFAULT_CHUNK // 1024,),
    window: Annotated[Sequence[int], numbers("Chunks under way, with commas.", 256)] = (
        DEFAULT_WINDOW,
    ),
    repeats: Repeats = 5,
) -> list[Figure]:
    """DEALER and ROUTER with our frames and credits, for each size of chunks and each window.

    Nothing is done with the chunks. A measurement moves as much as one of raw TCP does.
    """
    worker, broker = pool.role("transport", "dealer"), pool.role("transport", "router")
    worker.ask("connect", address=broker.ask("bind")["address"])
    broker.ask("meet")

    def both_ways(size: int, window: int) -> tuple[float, float, float]:
        """GB/s up and down, CPU seconds of the broker's end per GB of both."""
        chunks = max(1, pool.bytes_raw // size)
        gigabytes = chunks * size / 1e9
        broker.tell("collect", chunks=chunks)
        sent, got = worker.ask("push", chunks=chunks, size=size, window=window), broker.hear()
        worker.tell("pull", chunks=chunks, window=window)
        replied = broker.ask("reply", chunks=chunks, size=size, window=window)
        up, down = sent["ended"] - sent["began"], worker.hear()["ended"] - replied["began"]
        return gigabytes / up, gigabytes / down, (got["cpu"] + replied["cpu"]) / gigabytes

    figures = []
    for size in [1024 * each for each in chunk_kib]:
        for chunks_under_way in window:
            raw, found = in_turn(pool.raw, partial(both_ways, size, chunks_under_way), repeats)
            row = f"chunks of {size // 1024} KiB, window {chunks_under_way}"
            of_it = partial(figure, TRANSPORT, row)
            ups, downs, used = zip(*found, strict=True)
            for name, speeds in (("up", ups), ("down", downs)):
                figures.append(of_it(name, speeds, "GB/s"))
                shares = against(speeds, [each.speed for each in raw])
                figures.append(of_it(f"{name} / raw", shares, "x"))
            is_usual = (size, chunks_under_way) == (DEFAULT_CHUNK, DEFAULT_WINDOW)
            cpu = against(used, [each.send_cpu + each.receive_cpu for each in raw])
            target = "cpu transport" if is_usual else None
            figures.append(of_it("CPU of the ROUTER / raw", cpu, "x", target=target))
    pool.dismiss("dealer", "router")
    return figures


def fold(
    pool: ProcessPool,
    *,
    size: Size = "125M",
    pushers: Annotated[Sequence[int], numbers("Pushes at a time, with commas.", 64)] = (1, 2, 4),
    repeats: Repeats = 5,
) -> list[Figure]:
    """A real broker takes pushes in and adds them up.

    One worker more belongs to the run and begins its push last, so the round stays open, without a step
    of the optimizer, while the others' chunks are measured: received, checked, decoded, added to the
    accumulator, acknowledged.
    """
    return [each for count in pushers for each in _fold(pool, size, count, repeats)]


def _fold(pool: ProcessPool, size: str, count: int, repeats: int) -> list[Figure]:
    parameters = parameters_of(size)
    gigabytes = count * 2 * parameters / 1e9  # bf16
    everybody = pool.fake_workers(count + 1)
    with pool.broker("--workers", str(count + 1), "--stall-timeout", "0") as broker:
        join_fake_workers(everybody, broker.address, parameters)
        *measured, last = everybody

        def push() -> tuple[float, float]:
            cpu = broker.cpu_seconds
            found = ask_all(measured, "push", pull=False)
            used = broker.cpu_seconds - cpu
            last.ask("push", pull=False)
            seconds = max(each["up"] for each in found) - min(each["began"] for each in found)
            return gigabytes / seconds, used / gigabytes

        push()  # momentum and accumulator take their memory for the first time
        limits, found = in_turn(pool.raw, push, repeats)
        ask_all(everybody, "leave")
    speeds = [speed for speed, _ in found]
    of_it = partial(figure, TRANSPORT_WITH_FOLD, f"{size}, {count} at a time")
    cpu = against([used for _, used in found], [each.receive_cpu for each in limits])
    shares = against(speeds, [each.speed for each in limits])
    return [
        of_it("speed", speeds, "GB/s"),
        of_it("/ raw", shares, "x", target="fold"),
        of_it("broker CPU / raw receive", cpu, "x"),
    ]


def wan(pool: ProcessPool, *, size: Size = "50M", repeats: Repeats = 3) -> list[Figure]:
    """A round through a link of 1 Gb/s with a round trip of 100 ms.

    What share of it do the credits let through? One worker with the real hook. The link itself counts:
    all bytes from the first piece of a chunk to the last, against what it could have carried meanwhile,
    in either direction. Raw TCP goes through a link of its own.
    """
    link, trainers = pool.role("link"), pool.trainers(1)
    shape = {"bits_per_s": BITS_PER_S, "delay_s": ROUND_TRIP_S / 2}
    ends = Ends(pool.role("raw", "far-sender"), pool.role("raw", "far-receiver"))
    receiver = f"tcp://{HOST}:{ends.receiver.ask('port')['port']}"
    raw_at = link.ask("open", target=receiver, **shape)["port"]
    ends.connect(through=raw_at)
    raw, up, down, seconds = [], [], [], []
    with pool.broker("--workers", "1", "--sync-every", "1") as broker:
        trainers[0].ask("build", size=size)
        at = link.ask("open", target=broker.address, **shape)["port"]
        join_trainers(trainers, f"tcp://{HOST}:{at}")
        for _ in range(repeats):
            link.ask("forget", port=raw_at)
            ends.move(RAW_S * BITS_PER_S / 8)
            raw.append(link.ask("shares", port=raw_at)["up"])
            link.ask("forget", port=at)
            found = trainers[0].ask("round")
            seconds.append(found["ended"] - found["began"])
            shares = link.ask("shares", port=at)
            up.append(shares["up"])
            down.append(shares["down"])
        trainers[0].ask("leave")
    pool.dismiss("link", "far-")
    network = f"{BITS_PER_S / 1e9:g} Gb/s, {1e3 * ROUND_TRIP_S:g} ms"
    of_it = partial(figure, WAN, f"{size}, 1 worker, {network}")
    return [
        of_it("round", seconds, "s"),
        of_it("raw TCP", raw, "%"),
        of_it("up", up, "%", target="link"),
        of_it("down", down, "%", target="link"),
    ]
