"""Rounds of two workers with each pair of dtypes, up and down, against one with bf16 up and fp32 down.

On loopback, through a link that a proxy makes slow, and over a network that the kernel does. Two runs
live side by side, each with workers of its own, and make rounds in turn. Pseudo-gradients are normal
values, since what int4z packs them to depends on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from statistics import fmean, median

from diloco_lab.bench.link import SlowProxy
from diloco_lab.bench.parts import Repeats, Size
from diloco_lab.bench.parts.rounds import (
    Round,
    has_room,
    one_round,
    row_of,
)
from diloco_lab.bench.process_pool import Link, ProcessPool
from diloco_lab.bench.report.arithmetic import against, in_turn
from diloco_lab.bench.report.figures import Figure, figure
from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver.roles import RoleProcess
from diloco_lab.network.namespaces import NoNetwork, at_the_hub, network, one_switch

CODECS, CODECS_CPU = "codecs on loopback", "codecs, CPU of a round"
CODECS_COMPUTED = "codecs at 10 Gb/s, computed"
CODECS_WAN, CODECS_LIMITED = "codecs through a link", "codecs over a limited network"
WORKERS = 2
USUAL = ("bf16", "fp32")  # what all others are compared with
RATIO = f"/ {'/'.join(USUAL)}"
PAIRS = [(each, each) for each in ("bf16", "int8", "int4", "int4z")]  # up and down
BITS_PER_S, ROUND_TRIP_S = 1e9, 0.1  # of the link
COMPUTED_GB_PER_S = 1.25  # 10 Gb/s
Pair = tuple[str, str]
Measured = tuple[Pair, list[Round], list[Round]]  # the usual rounds, and its own between them


def row_of_pair(size: str, pair: Pair) -> str:
    return f"{size}, {'/'.join(pair)}"


def codecs(pool: ProcessPool, *, size: Size = "125M", repeats: Repeats = 5) -> list[Figure]:
    """Rounds on loopback with each pair of dtypes: time, bytes, CPU, and what they make of 10 Gb/s."""
    parameters = parameters_of(size)
    trainers = pool.roles("trainer", 2 * WORKERS)
    found = _in_turn(pool, trainers, size, repeats)
    on_loopback, of_cpu, at_10_gbits = [], [], []
    for pair, usual, rounds in found:
        row = row_of_pair(size, pair)
        loopback, cpu = partial(figure, CODECS, row), partial(figure, CODECS_CPU, row)
        computed = partial(figure, CODECS_COMPUTED, row)
        up, down = (median(getattr(each, way) for each in rounds) for way in ("up", "down"))
        bits = 8e9 / (WORKERS * parameters)  # a parameter, of so many GB
        seconds, used, at_speed = ([of(each) for each in rounds] for of in MEASURES)
        on_loopback += [
            loopback("up", bits * up, "bits"),
            loopback("down", bits * down, "bits"),
            loopback("round", seconds, "s"),
        ]
        of_cpu += [
            cpu("broker", [each.cpu for each in rounds], "s"),
            cpu("each worker", [fmean(each.workers_cpu) for each in rounds], "s"),
            cpu("all", used, "s"),
        ]
        at_10_gbits += [
            computed("in", up / COMPUTED_GB_PER_S, "s"),
            computed("out", down / COMPUTED_GB_PER_S, "s"),
            computed("round", at_speed, "s"),
        ]
        if usual:
            before = [[of(each) for each in usual] for of in MEASURES]
            target = partial(_target, pair)
            on_loopback.append(
                loopback(RATIO, against(seconds, before[0]), "x", target=target("int4z loopback"))
            )
            of_cpu.append(cpu(RATIO, against(used, before[1]), "x"))
            at_10_gbits.append(
                computed(RATIO, against(at_speed, before[2]), "x", target=target("int4z 10 Gb/s"))
            )
    return [*on_loopback, *of_cpu, *at_10_gbits]


def codecs_wan(pool: ProcessPool, *, size: Size = "50M", repeats: Repeats = 3) -> list[Figure]:
    """Rounds with each pair of dtypes through a link of 1 Gb/s with a round trip of 100 ms.

    A proxy makes it, which all workers of a run share in each direction.
    """
    trainers = pool.roles("trainer", 2 * WORKERS)
    network = f"{BITS_PER_S / 1e9:g} Gb/s, {1e3 * ROUND_TRIP_S:g} ms"
    found = _in_turn(pool, trainers, size, repeats, link=_slow)
    return _through(CODECS_WAN, size, network, found)


def codecs_limited(pool: ProcessPool, *, size: Size = "50M", repeats: Repeats = 3) -> list[Figure]:
    """Rounds with each pair of dtypes over a network of this kernel, of 1 Gb/s each way; needs root.

    Broker and workers are in a namespace each, behind a token bucket: what they share is the broker's
    line.
    """
    try:
        with network(one_switch(2 * WORKERS), BITS_PER_S) as lines:
            trainers = [
                pool.role("trainer", f"limited-{name}", lines.inside(name))
                for name in lines.workers
            ]
            try:
                found = _in_turn(pool, trainers, size, repeats, **at_the_hub(lines))
                return _through(CODECS_LIMITED, size, f"{BITS_PER_S / 1e9:g} Gb/s", found)
            finally:
                pool.dismiss("limited-")
    except NoNetwork as error:
        pool.skipped.append(f"{CODECS_LIMITED}: left out, {error}")
        return []


@contextlib.contextmanager
def _slow(address: str) -> Iterator[str]:
    with SlowProxy(address, BITS_PER_S / 8, ROUND_TRIP_S / 2) as proxy:
        yield proxy.address


def _in_turn(
    pool: ProcessPool,
    trainers: Sequence[RoleProcess],
    size: str,
    repeats: int,
    link: Link = contextlib.nullcontext,
    **options: object,
) -> list[Measured]:
    """Of each pair the usual rounds around its own, and its own; the usual itself comes first."""
    row = f"codecs, {row_of(size, WORKERS)}"
    if not has_room(pool, row, size, WORKERS, runs=2, more=WORKERS):  # the residuals
        return []
    half = len(trainers) // 2

    @contextlib.contextmanager
    def run(which: Sequence[RoleProcess], pair: Pair) -> Iterator[Callable[[], Round]]:
        wire, reply = pair
        with pool.training(
            which, size, link, wire_dtype=wire, reply_dtype=reply, **options
        ) as broker:
            a_round = partial(one_round, which, broker, normal=True)
            a_round()  # memory is taken for the first time
            yield a_round

    all_usual: list[Round] = []
    measured: list[Measured] = []
    with run(trainers[:half], USUAL) as usual_round:
        for pair in PAIRS:
            with run(trainers[half:], pair) as its_round:
                usual, found = in_turn(usual_round, its_round, repeats)
            all_usual += usual
            measured.append((pair, usual, found))
    return [(USUAL, [], all_usual), *measured]


def _through(part: str, size: str, network: str, found: Sequence[Measured]) -> list[Figure]:
    """Of each pair the time and the bytes of a round, and its ratio to the usual."""
    figures = []
    for pair, usual, rounds in found:
        of_it = partial(figure, part, f"{row_of_pair(size, pair)}, {network}")
        seconds = [each.seconds for each in rounds]
        figures += [
            of_it("up", 1e3 * median(each.up for each in rounds), "MB"),
            of_it("down", 1e3 * median(each.down for each in rounds), "MB"),
            of_it("round", seconds, "s"),
        ]
        if usual:
            ratio = against(seconds, [each.seconds for each in usual])
            figures.append(of_it(RATIO, ratio, "x", target=_target(pair, "int4z 1 Gb/s")))
    return figures


def _target(pair: Pair, target: str) -> str | None:
    """Targets are about int4z, with the smallest replies that there are."""
    return target if pair[0] == "int4z" else None


def computed(of: Round) -> float:
    """Seconds of a round with a machine for each process and a link of 10 Gb/s at the broker.

    Bytes in, bytes out, the broker's work and a worker's go on at the same time, each process's on one
    core at worst, so the longest of them counts.
    """
    on_the_link = max(of.up, of.down) / COMPUTED_GB_PER_S
    return max(on_the_link, of.cpu, *of.workers_cpu)


# Seconds of a round, its CPU seconds, and the seconds that it would take at 10 Gb/s.
MEASURES = (attrgetter("seconds"), attrgetter("all_cpu"), computed)
