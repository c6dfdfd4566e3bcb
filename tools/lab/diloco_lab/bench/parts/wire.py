"""What this machine could do, and what of it arrives at the broker, and through a slow link."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from diloco_lab.bench.link import SlowProxy
from diloco_lab.bench.parts import Repeats, Size
from diloco_lab.bench.process_pool import BrokerProcess, Ends, ProcessPool, RawSample
from diloco_lab.bench.report.arithmetic import against, in_turn
from diloco_lab.bench.report.figures import Figure, figure
from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver.options import numbers, whole_numbers
from diloco_lab.driver.roles import RoleProcess, ask_all
from diloco_protocol import CHUNK_ELEMENTS
from diloco_tools.tcp_proxy import HOST

TRANSPORT, TRANSPORT_WITH_FOLD = "transport", "transport with fold"
LIMITS, WAN = "limits", "wide-area link"
KERNEL_CHUNKS = 512  # of each measurement: 1 GiB in fp32
DEFAULT_CHUNK_KIB = 2 * CHUNK_ELEMENTS // 1024  # in bf16
DEFAULT_WINDOW = 16  # chunks in flight: what the broker grants a single push at most
# The link.
BITS_PER_S = 1e9
ROUND_TRIP_S = 0.1
RAW_S = 1.0  # that a measurement of raw TCP takes at the link's speed


def limits(pool: ProcessPool, *, repeats: Repeats = 5) -> list[Figure]:
    """memcpy, raw TCP, the fold, the outer step.

    One thread each, in turn.
    """
    kernels = pool.role("kernels")
    measures = {
        "memcpy, one thread": "memcpy",
        "raw TCP, loopback": "",
        "fold: bf16 through a scratch": "fold",
        "outer step, of parameter bytes": "outer_step",
    }
    found: dict[str, list[float]] = {row: [] for row in measures}
    for _ in range(repeats):
        for row, kernel in measures.items():
            speed = (
                kernels.ask(kernel, chunks=KERNEL_CHUNKS)["speed"] if kernel else pool.raw().speed
            )
            found[row].append(speed)
    pool.dismiss("kernels")
    return [figure(LIMITS, row, "speed", values, "GB/s") for row, values in found.items()]


def of_all(samples: Sequence[RawSample]) -> list[Figure]:
    """The limit over the whole run."""
    row = partial(figure, LIMITS, "raw TCP, over the whole run")
    if not samples:
        return []
    return [
        row("speed", [each.speed for each in samples], "GB/s"),
        row("send", [each.send_cpu for each in samples], "s/GB"),
        row("receive", [each.receive_cpu for each in samples], "s/GB"),
    ]


def transport(
    pool: ProcessPool,
    *,
    chunk_kib: Annotated[
        str, numbers("Sizes of chunks in KiB, with commas; at most 4096.", 4096)
    ] = str(DEFAULT_CHUNK_KIB),
    window: Annotated[str, numbers("Chunks under way, with commas.", 256)] = str(DEFAULT_WINDOW),
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
    for kib in whole_numbers(chunk_kib):
        for under_way in whole_numbers(window):
            raw, found = in_turn(pool.raw, partial(both_ways, 1024 * kib, under_way), repeats)
            of_it = partial(figure, TRANSPORT, f"chunks of {kib} KiB, window {under_way}")
            ups, downs, used = zip(*found, strict=True)
            for name, speeds in (("up", ups), ("down", downs)):
                figures.append(of_it(name, speeds, "GB/s"))
                shares = against(speeds, [each.speed for each in raw])
                figures.append(of_it(f"{name} / raw", shares, "x"))
            is_usual = (kib, under_way) == (DEFAULT_CHUNK_KIB, DEFAULT_WINDOW)
            cpu = against(used, [each.send_cpu + each.receive_cpu for each in raw])
            target = "cpu transport" if is_usual else None
            figures.append(of_it("CPU of the ROUTER / raw", cpu, "x", target=target))
    pool.dismiss("dealer", "router")
    return figures


def fold(
    pool: ProcessPool,
    *,
    size: Size = "125M",
    pushers: Annotated[str, numbers("Pushes at a time, with commas.", 64)] = "1,2,4",
    repeats: Repeats = 5,
) -> list[Figure]:
    """A real broker takes pushes in and adds them up.

    One worker more belongs to the run and begins its push last, so the round stays open, without a step
    of the optimizer, while the others' chunks are measured: received, checked, decoded, added to the
    accumulator, acknowledged.
    """
    figures = []
    parameters = parameters_of(size)
    for count in whole_numbers(pushers):
        with pool.fake_training(count + 1, parameters) as (broker, workers):
            push = partial(_push, workers, broker, count * 2 * parameters / 1e9)  # bf16
            push()  # momentum and accumulator take their memory for the first time
            raw, found = in_turn(pool.raw, push, repeats)
        speeds, used = zip(*found, strict=True)
        of_it = partial(figure, TRANSPORT_WITH_FOLD, f"{size}, {count} at a time")
        shares = against(speeds, [each.speed for each in raw])
        cpu = against(used, [each.receive_cpu for each in raw])
        figures += [
            of_it("speed", speeds, "GB/s"),
            of_it("/ raw", shares, "x", target="fold"),
            of_it("broker CPU / raw receive", cpu, "x"),
        ]
    return figures


def _push(
    workers: Sequence[RoleProcess], broker: BrokerProcess, gigabytes: float
) -> tuple[float, float]:
    """GB/s of all pushes but the last, and CPU seconds of the broker per GB of them."""
    *measured, last = workers
    cpu = broker.cpu_seconds
    found = ask_all(measured, "push", pull=False)
    used = broker.cpu_seconds - cpu
    last.ask("push", pull=False)
    seconds = max(each["up"] for each in found) - min(each["began"] for each in found)
    return gigabytes / seconds, used / gigabytes


def wan(pool: ProcessPool, *, size: Size = "50M", repeats: Repeats = 3) -> list[Figure]:
    """A round through a link of 1 Gb/s with a round trip of 100 ms.

    What share of it do the credits let through? One worker with the real hook. The link itself counts:
    all bytes from the first piece of a chunk to the last, against what it could have carried meanwhile,
    in either direction. Raw TCP goes through a link of its own.
    """
    (trainer,) = pool.roles("trainer")
    far = Ends(pool.role("raw", "far-sender"), pool.role("raw", "far-receiver"))
    receiver = f"tcp://{HOST}:{far.receiver.ask('port')['port']}"
    shape = BITS_PER_S / 8, ROUND_TRIP_S / 2
    raw, up, down, seconds = [], [], [], []
    with (
        pool.broker(workers=1, sync_every=1) as broker,
        SlowProxy(receiver, *shape) as raw_link,
        SlowProxy(broker.address, *shape) as link,
    ):
        far.connect(through=raw_link.port)
        trainer.ask("build", size=size)
        trainer.ask("join", address=link.address)
        for _ in range(repeats):
            raw_link.forget()
            far.move(RAW_S * BITS_PER_S / 8)
            raw.append(raw_link.up.share)
            link.forget()
            found = trainer.ask("round")
            seconds.append(found["ended"] - found["began"])
            up.append(link.up.share)
            down.append(link.down.share)
        trainer.ask("leave")
        pool.dismiss("far-")
    network = f"{BITS_PER_S / 1e9:g} Gb/s, {1e3 * ROUND_TRIP_S:g} ms"
    of_it = partial(figure, WAN, f"{size}, 1 worker, {network}")
    return [
        of_it("round", seconds, "s"),
        of_it("raw TCP", raw, "%"),
        of_it("up", up, "%", target="link"),
        of_it("down", down, "%", target="link"),
    ]
