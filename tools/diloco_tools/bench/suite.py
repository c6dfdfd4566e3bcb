"""What `diloco-bench all` consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from diloco_tools.bench import (
    attached,
    billion,
    crowd,
    folding,
    free,
    heartbeat,
    limits,
    rounds,
    saving,
    streaming,
    transport,
    wan,
)
from diloco_tools.bench.figures import Figure, figure
from diloco_tools.bench.scale import Scale
from diloco_tools.bench.stage import Stage


@dataclass(frozen=True)
class Part:
    """Something to measure, by itself or as one of many."""

    name: str
    measure: Callable[[Stage], list[Figure]]


def parts_of(scale: Scale) -> list[Part]:
    """Everything; the largest model comes last, when the workers have given their memory back."""
    fold_size, pushers = scale.fold
    free_size, free_workers, free_seconds = scale.free
    beat_size, beat_workers, beat_rounds = scale.heartbeat
    idle_workers, idle_seconds = scale.idle
    stream_steps, stream_repeats = scale.stream
    parameters, largest_rounds = scale.billion
    save_size, savers = scale.saving
    n = scale.repeats

    def largest(stage: Stage) -> list[Figure]:
        stage.dismiss("trainer-")
        return billion.measure(stage, parameters=parameters, rounds=largest_rounds)

    parts = [
        Part(limits.PART, lambda s: limits.measure(s, repeats=n)),
        Part(
            transport.PART,
            lambda s: transport.measure(s, repeats=n, total=scale.transport_bytes),
        ),
        Part(
            folding.PART,
            lambda s: folding.measure(s, size=fold_size, pushers=pushers, repeats=n),
        ),
        *rounds_of(scale.rounds, scale.round_repeats),
        Part(
            free.PART,
            lambda s: free.measure(
                s, size=free_size, workers=free_workers, seconds=free_seconds, repeats=n
            ),
        ),
        Part(
            streaming.PART,
            lambda s: streaming.measure(s, steps=stream_steps, repeats=stream_repeats),
        ),
        Part(
            heartbeat.PART,
            lambda s: heartbeat.measure(
                s, size=beat_size, workers=beat_workers, rounds=beat_rounds
            ),
        ),
        Part(saving.PART, lambda s: saving.measure(s, size=save_size, workers=savers, repeats=n)),
        Part(wan.PART, lambda s: wan.measure(s, size=scale.wan, repeats=n)),
        Part(attached.PART, lambda s: attached.measure(s, steps=scale.attached_steps)),
        Part(
            crowd.PART,
            lambda s: crowd.measure(s, workers=idle_workers, seconds=idle_seconds),
        ),
    ]
    return [*parts, Part(billion.PART, largest)] if parameters else parts


def rounds_of(every: Sequence[tuple[str, int, str]], repeats: Mapping[str, int]) -> list[Part]:
    """A part for each configuration of whole rounds: (size, workers, reply dtype)."""

    def part(size: str, workers: int, reply: str) -> Part:
        return Part(
            f"{rounds.PART}, {rounds.of(size, workers, reply)}",
            lambda s: rounds.measure(
                s, size=size, workers=workers, reply=reply, repeats=repeats[size]
            ),
        )

    return [part(*each) for each in every]


def conclusions(stage: Stage, figures: Sequence[Figure]) -> list[Figure]:
    """What follows from several parts: how memory grows, and the limit over the whole run."""
    found = rounds.growth(figures)
    samples = stage.raw_samples
    if samples:
        row = "raw TCP, over the whole run"
        found.append(figure(limits.PART, row, "speed", [s.speed for s in samples], "GB/s"))
        found.append(figure(limits.PART, row, "send", [s.send_cpu for s in samples], "s/GB"))
        receive = [s.receive_cpu for s in samples]
        found.append(figure(limits.PART, row, "receive", receive, "s/GB"))
    return found
