"""A round with each pair of dtypes, up and down, against one with bf16 up and fp32 down.

On loopback, through a link that a proxy makes slow, and over a network that the kernel does. Two runs
live side by side, each with workers of its own, and make rounds in turn. Pseudo-gradients are normal
values, since what int4z packs them to depends on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from diloco_protocol.dtypes import REPLY_DTYPES
from diloco_tools.bench.limited_network import NoNetwork, limited_network
from diloco_tools.bench.link import SlowProxy
from diloco_tools.bench.options import Repeats, Size
from diloco_tools.bench.parts.rounds import (
    BROKER_HOLDS,
    FP32,
    WORKER_HOLDS,
    Round,
    one_round,
    row_of,
)
from diloco_tools.bench.process_pool import Link, ProcessPool, RoleProcess
from diloco_tools.bench.report.arithmetic import against, computed_round, in_turn
from diloco_tools.bench.report.figures import Figure, figure
from diloco_tools.bench.sizes import parameters_of

CODECS, CODECS_COMPUTED = "codecs on loopback", "codecs at 10 Gb/s, computed"
CODECS_WAN, CODECS_LIMITED = "codecs through a link", "codecs over a limited network"
WORKERS = 2
USUAL = ("bf16", "fp32")  # what all others are compared with
FEW_BITS = ("int8", "int4", "int4z")
BITS_PER_S, ROUND_TRIP_S = 1e9, 0.1  # of the link
COMPUTED_GB_PER_S = 1.25  # 10 Gb/s
Pair = tuple[str, str]
Measured = tuple[Pair, list[Round], list[Round]]  # the usual rounds, and its own between them


def pairs(replies: Sequence[str] = REPLY_DTYPES) -> list[Pair]:
    """What is compared with the usual: up and down in few bits, or bf16 down where that is all."""
    return [("bf16", "bf16"), *((each, each if each in replies else "bf16") for each in FEW_BITS)]


def named(pair: Pair) -> str:
    return "/".join(pair)


def codecs(pool: ProcessPool, *, size: Size = "125M", repeats: Repeats = 5) -> list[Figure]:
    """Rounds on loopback with each pair of dtypes: time, bytes, CPU, and what they make of 10 Gb/s."""
    parameters = parameters_of(size)
    trainers = pool.roles("trainer", 2 * WORKERS)
    figures: list[Figure] = []
    for pair, usual, rounds in _in_turn(pool, trainers, size, repeats):
        of_it = partial(figure, CODECS, f"{row_of(size, WORKERS)}, {named(pair)}")
        bits = 8e9 / (WORKERS * parameters)  # a parameter, of so many GB
        found = [
            of_it("up", [bits * each.up for each in rounds], "bits"),
            of_it("down", [bits * each.down for each in rounds], "bits"),
            of_it("round", [each.seconds for each in rounds], "s"),
            of_it("CPU", [_cpu(each) for each in rounds], "s"),
        ]
        computed = partial(figure, CODECS_COMPUTED, f"{row_of(size, WORKERS)}, {named(pair)}")
        at_speed = [_computed(each) for each in rounds]
        found += [
            computed("in", [each.up / COMPUTED_GB_PER_S for each in rounds], "s"),
            computed("out", [each.down / COMPUTED_GB_PER_S for each in rounds], "s"),
            computed("broker CPU", [each.cpu for each in rounds], "s"),
            computed("worker CPU", [max(each.workers_cpu) for each in rounds], "s"),
            computed("round", at_speed, "s"),
        ]
        if usual:
            ratio = against([each.seconds for each in rounds], [each.seconds for each in usual])
            of_cpu = against([_cpu(each) for each in rounds], [_cpu(each) for each in usual])
            at_link = against(at_speed, [_computed(each) for each in usual])
            found += [
                of_it("/ bf16/fp32", ratio, "x", target=_target(pair, "int4z loopback")),
                of_it("CPU / bf16/fp32", of_cpu, "x"),
                computed("/ bf16/fp32", at_link, "x", target=_target(pair, "int4z 10 Gb/s")),
            ]
        figures += found
    return sorted(figures, key=lambda each: each.part != CODECS)


def codecs_wan(pool: ProcessPool, *, size: Size = "125M", repeats: Repeats = 1) -> list[Figure]:
    """Rounds with each pair of dtypes through a link of 1 Gb/s with a round trip of 100 ms.

    A proxy makes it, which all workers of a run share in each direction.
    """
    trainers = pool.roles("trainer", 2 * WORKERS)
    network = f"{BITS_PER_S / 1e9:g} Gb/s, {1e3 * ROUND_TRIP_S:g} ms"
    found = _in_turn(pool, trainers, size, repeats, link=_slow)
    return _seconds(CODECS_WAN, f"{row_of(size, WORKERS)}, {network}", found)


def codecs_limited(pool: ProcessPool, *, size: Size = "125M", repeats: Repeats = 1) -> list[Figure]:
    """Rounds with each pair of dtypes over a network of this kernel, of 1 Gb/s each way; needs root.

    The workers are in a namespace of their own, behind a token bucket.
    """
    try:
        with limited_network(BITS_PER_S) as network:
            trainers = [
                pool.role("trainer", f"limited-{i}", network.inside) for i in range(2 * WORKERS)
            ]
            try:
                found = _in_turn(
                    pool, trainers, size, repeats, bind=f"{network.address}:*", insecure=True
                )
                row = f"{row_of(size, WORKERS)}, {BITS_PER_S / 1e9:g} Gb/s"
                return _seconds(CODECS_LIMITED, row, found)
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
    copies = 2 * (WORKERS * (WORKER_HOLDS + 1) + BROKER_HOLDS)  # one more: the residual
    if not pool.has_memory(
        copies * FP32 * parameters_of(size) / 1e9, f"codecs, {row_of(size, WORKERS)}"
    ):
        return []
    half = len(trainers) // 2

    @contextlib.contextmanager
    def run(which: Sequence[RoleProcess], pair: Pair) -> Iterator[Callable[[], Round]]:
        wire, reply = pair
        with pool.training(
            which, size, link, wire_dtype=wire, reply_dtype=reply, **options
        ) as broker:

            def a_round() -> Round:
                return one_round(which, broker, normal=True)

            a_round()  # memory is taken for the first time
            yield a_round

    all_usual: list[Round] = []
    measured: list[Measured] = []
    with run(trainers[:half], USUAL) as usual_round:
        for pair in pairs():
            with run(trainers[half:], pair) as its_round:
                usual, found = in_turn(usual_round, its_round, repeats)
            all_usual += usual
            measured.append((pair, usual, found))
    return [(USUAL, [], all_usual), *measured]


def _seconds(part: str, row: str, found: Sequence[Measured]) -> list[Figure]:
    """Of each pair, and their ratios to the usual."""
    figures = []
    for pair, usual, rounds in found:
        of_it = partial(figure, part, f"{row}, {named(pair)}")
        seconds = [each.seconds for each in rounds]
        figures.append(of_it("round", seconds, "s"))
        figures.append(of_it("up", [1e3 * each.up for each in rounds], "MB"))
        figures.append(of_it("down", [1e3 * each.down for each in rounds], "MB"))
        if usual:
            ratio = against(seconds, [each.seconds for each in usual])
            figures.append(of_it("/ bf16/fp32", ratio, "x", target=_target(pair, "int4z 1 Gb/s")))
    return figures


def _target(pair: Pair, target: str) -> str | None:
    """Targets are about int4z, with the smallest replies that there are."""
    return target if pair[0] == "int4z" else None


def _cpu(of: Round) -> float:
    """CPU seconds of all processes."""
    return of.cpu + sum(of.workers_cpu)


def _computed(of: Round) -> float:
    return computed_round(of.up, of.down, of.cpu, max(of.workers_cpu), COMPUTED_GB_PER_S)
