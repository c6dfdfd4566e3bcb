"""The parts of the benchmark, what `diloco-bench all` does with each, and what follows from several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from diloco_tools.bench.options import Repeats, check_reply, check_size, numbers, words
from diloco_tools.bench.parts import load, rounds, training, wire
from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import (
    TRANSPORT,
    TRANSPORT_WITH_FOLD,
    WHOLE_ROUND,
    Figure,
    figure,
)
from diloco_tools.bench.sizes import SIZES

RAW_BYTES, QUICK_RAW_BYTES = 512 << 20, 128 << 20  # that a measurement of raw TCP moves


@dataclass(frozen=True)
class Part:
    """Something to measure, by itself or as one of many."""

    name: str
    measure: Callable[[ProcessPool], list[Figure]]


@dataclass(frozen=True)
class Command:
    """A command that measures one part, or one for each of several configurations.

    Attributes:
        name: of its files.
        described_by: whose keywords are its options, and whose first sentence is its help.
        parts: what it measures with these options.
        whole, quick: its options in `all` and in `all --quick`, for each time that it is there.
    """

    name: str
    described_by: Callable[..., Any]
    parts: Callable[..., list[Part]]
    whole: Sequence[Mapping[str, Any]]
    quick: Sequence[Mapping[str, Any]]


def single(
    name: str,
    measure: Callable[..., list[Figure]],
    *,
    whole: Mapping[str, Any] | None = None,
    quick: Mapping[str, Any],
) -> Command:
    """The command of one part, with options where `all` does not take those of the command."""

    def parts(**options: Any) -> list[Part]:
        return [Part(name, partial(measure, **options))]

    return Command(name.replace(" ", "-").replace(",", ""), measure, parts, [whole or {}], [quick])


def round_parts(
    *,
    sizes: Annotated[
        Sequence[str],
        words("--parameters", f"Models, with commas: {', '.join(SIZES)}.", check_size),
    ] = ("125M",),
    workers: Annotated[Sequence[int], numbers("Numbers of workers, with commas.", 64)] = (2,),
    replies: Annotated[
        Sequence[str],
        words("--reply-dtype", "On the way down, with commas: fp32, bf16, fp16.", check_reply),
    ] = ("fp32",),
    repeats: Repeats = 5,
) -> list[Part]:
    """Whole synchronous rounds with real workers: time, bytes, phases, CPU, memory.

    A part for each configuration.
    """
    return [
        Part(
            f"{WHOLE_ROUND}, {rounds.row_of(size, count, reply)}",
            partial(rounds.whole_round, size=size, workers=count, reply=reply, repeats=repeats),
        )
        for size in sizes
        for count in workers
        for reply in replies
    ]


EVERY_ROUND = {"workers": (2, 4, 8), "replies": ("fp32", "bf16")}
COMMANDS = {
    "limits": single(wire.LIMITS, wire.limits, quick={"repeats": 3}),
    "transport": single(TRANSPORT, wire.transport, quick={"repeats": 3}),
    "fold": single(
        TRANSPORT_WITH_FOLD, wire.fold, quick={"size": "10M", "pushers": (1,), "repeats": 3}
    ),
    "round": Command(
        "round",
        round_parts,
        round_parts,
        whole=[
            {**EVERY_ROUND, "sizes": ("10M", "50M")},
            {**EVERY_ROUND, "sizes": ("125M",), "repeats": 3},
        ],
        quick=[{"sizes": ("10M",), "repeats": 3}],
    ),
    "async": single(
        training.ASYNCHRONOUS,
        training.asynchronous,
        quick={"workers": (2,), "seconds": 1.0, "repeats": 3},
    ),
    "streaming": single(training.STREAMING, training.streaming, quick={"steps": 10, "repeats": 1}),
    "heartbeat": single(load.HEARTBEAT, load.heartbeat, quick={"size": "10M", "workers": 2}),
    "checkpoint": single(
        rounds.CHECKPOINT,
        rounds.checkpoint,
        whole={"repeats": 5},
        quick={"size": "10M", "workers": 1},
    ),
    "wan": single(wire.WAN, wire.wan, whole={"repeats": 5}, quick={"size": "10M"}),
    "attached": single(
        training.ATTACHED, training.attached, whole={"steps": 150}, quick={"steps": 20}
    ),
    "idle": single(load.IDLE, load.idle, quick={"workers": 100, "seconds": 2.0}),
    # Last, when the trainers have given their memory back. Not in the quick one.
    "largest": replace(single(load.LARGEST, load.largest, quick={}), quick=()),
}


def all_parts(*, quick: bool = False) -> list[Part]:
    """Everything, or the same with small models and few repeats and without the largest."""
    return [
        part
        for command in COMMANDS.values()
        for options in (command.quick if quick else command.whole)
        for part in command.parts(**options)
    ]


def conclusions(pool: ProcessPool, figures: Sequence[Figure]) -> list[Figure]:
    """What follows from several parts: how memory grows, and the limit over the whole run."""
    found = rounds.growth(figures)
    samples = pool.raw_samples
    if samples:
        of_all = partial(figure, wire.LIMITS, "raw TCP, over the whole run")
        found.append(of_all("speed", [s.speed for s in samples], "GB/s"))
        found.append(of_all("send", [s.send_cpu for s in samples], "s/GB"))
        found.append(of_all("receive", [s.receive_cpu for s in samples], "s/GB"))
    return found
