"""What `diloco-bench all` consists of, whole and quick, and what follows from several parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, ParamSpec

from diloco_tools.bench.parts import (
    asynchronous,
    attached,
    checkpoint,
    fold,
    heartbeat,
    idle,
    largest,
    limits,
    rounds,
    streaming,
    transport,
    wan,
)
from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import Figure, figure

MIB = 1 << 20
RAW_BYTES, QUICK_RAW_BYTES = 512 * MIB, 128 * MIB  # that a measurement of raw TCP moves

P = ParamSpec("P")


@dataclass(frozen=True)
class Part:
    """Something to measure, by itself or as one of many."""

    name: str
    measure: Callable[[ProcessPool], list[Figure]]


def part(
    name: str,
    measure: Callable[Concatenate[ProcessPool, P], list[Figure]],
    *args: P.args,
    **arguments: P.kwargs,
) -> Part:
    """A part with its arguments."""

    def with_arguments(pool: ProcessPool) -> list[Figure]:
        return measure(pool, *args, **arguments)

    return Part(name, with_arguments)


def round_parts(every: Sequence[tuple[str, int, str]], repeats: Mapping[str, int]) -> list[Part]:
    """A part for each configuration of whole rounds (size, workers, reply dtype); repeats by size."""
    return [
        part(
            f"{rounds.PART}, {rounds.row_of(size, workers, reply)}",
            rounds.measure,
            size=size,
            workers=workers,
            reply=reply,
            repeats=repeats[size],
        )
        for size, workers, reply in every
    ]


def whole_parts() -> list[Part]:
    """Everything; the largest model comes last, when the trainers have given their memory back."""
    configurations = [
        (size, workers, reply)
        for size in ("10M", "50M", "125M")
        for workers in (2, 4, 8)
        for reply in ("fp32", "bf16")
    ]
    return [
        part(limits.PART, limits.measure, repeats=5),
        part(transport.PART, transport.measure, repeats=5, total=512 * MIB),
        part(fold.PART, fold.measure, size="125M", pushers=(1, 2, 4), repeats=5),
        *round_parts(configurations, {"10M": 5, "50M": 5, "125M": 3}),
        part(
            asynchronous.PART,
            asynchronous.measure,
            size="10M",
            workers=(2, 4),
            seconds=5.0,
            repeats=5,
        ),
        part(streaming.PART, streaming.measure, steps=40, repeats=2),
        part(heartbeat.PART, heartbeat.measure, size="125M", workers=4, rounds=3),
        part(checkpoint.PART, checkpoint.measure, size="50M", workers=2, repeats=5),
        part(wan.PART, wan.measure, size="50M", repeats=5),
        part(attached.PART, attached.measure, steps=150),
        part(idle.PART, idle.measure, workers=500, seconds=9.0),
        part(largest.PART, largest.measure, parameters=1_000_000_000, repeats=2),
    ]


def quick_parts() -> list[Part]:
    """The same with small models and few repeats, and without the largest."""
    return [
        part(limits.PART, limits.measure, repeats=3),
        part(transport.PART, transport.measure, repeats=3, total=128 * MIB),
        part(fold.PART, fold.measure, size="10M", pushers=(1,), repeats=3),
        *round_parts([("10M", 2, "fp32")], {"10M": 3}),
        part(
            asynchronous.PART,
            asynchronous.measure,
            size="10M",
            workers=(2,),
            seconds=1.0,
            repeats=3,
        ),
        part(streaming.PART, streaming.measure, steps=10, repeats=1),
        part(heartbeat.PART, heartbeat.measure, size="10M", workers=2, rounds=3),
        part(checkpoint.PART, checkpoint.measure, size="10M", workers=1, repeats=3),
        part(wan.PART, wan.measure, size="10M", repeats=3),
        part(attached.PART, attached.measure, steps=20),
        part(idle.PART, idle.measure, workers=100, seconds=2.0),
    ]


def conclusions(pool: ProcessPool, figures: Sequence[Figure]) -> list[Figure]:
    """What follows from several parts: how memory grows, and the limit over the whole run."""
    found = rounds.growth(figures)
    samples = pool.raw_samples
    if samples:
        of_all = partial(figure, limits.PART, "raw TCP, over the whole run")
        found.append(of_all("speed", [s.speed for s in samples], "GB/s"))
        found.append(of_all("send", [s.send_cpu for s in samples], "s/GB"))
        found.append(of_all("receive", [s.receive_cpu for s in samples], "s/GB"))
    return found
