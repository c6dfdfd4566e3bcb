"""How much is measured: sizes of models, repeats, seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 256  # bytes
CONTEXT = 64  # bytes that a model sees at once


@dataclass(frozen=True)
class Shape:
    """Of the demo's GPT."""

    width: int
    layers: int
    heads: int


# GPT-shaped models by the name of their size.
SIZES: dict[str, Shape] = {
    "0.4M": Shape(128, 2, 4),
    "10M": Shape(320, 8, 5),
    "50M": Shape(640, 10, 10),
    "125M": Shape(1024, 10, 16),
}


def parameters_of(size: str) -> int:
    """Trainable parameters of one of `SIZES`: 12 width^2 a block, bytes and positions.

    >>> parameters_of("0.4M"), parameters_of("125M")
    (434176, 126156800)
    """
    shape = SIZES[size]
    return 12 * shape.width**2 * shape.layers + (VOCABULARY + CONTEXT) * shape.width


@dataclass(frozen=True)
class Scale:
    """What `diloco-bench all` measures, and how often.

    Attributes:
        repeats: of what takes a second or less; the slowest parts have their own.
        raw_bytes: that a measurement of raw TCP moves.
        transport_bytes: the same of transport alone.
        fold: model size and numbers of pushers.
        rounds: (size, workers, reply dtype) of each whole round.
        round_repeats: by size.
        free: model size, workers and seconds of asynchronous mode.
        stream: training steps with and without overlap, each, and how often.
        heartbeat: model size, workers and rounds.
        idle: workers and seconds.
        saving: model size, and workers of each run.
        billion: parameters and rounds of the largest model; 0 leaves it out.
        wan: model size.
        attached_steps: steps with and without the hook.
    """

    repeats: int
    raw_bytes: int
    transport_bytes: int
    fold: tuple[str, tuple[int, ...]]
    rounds: tuple[tuple[str, int, str], ...]
    round_repeats: dict[str, int]
    free: tuple[str, tuple[int, ...], float]
    stream: tuple[int, int]
    heartbeat: tuple[str, int, int]
    idle: tuple[int, float]
    saving: tuple[str, int]
    billion: tuple[int, int]
    wan: str
    attached_steps: int


WHOLE = Scale(
    repeats=5,
    raw_bytes=512 << 20,
    transport_bytes=512 << 20,
    fold=("125M", (1, 2, 4)),
    rounds=tuple(
        (size, workers, reply)
        for size in ("10M", "50M", "125M")
        for workers in (2, 4, 8)
        for reply in ("fp32", "bf16")
    ),
    round_repeats={"10M": 5, "50M": 5, "125M": 3},
    free=("10M", (2, 4), 5.0),
    stream=(40, 2),
    heartbeat=("125M", 4, 3),
    idle=(500, 9.0),
    saving=("50M", 2),
    billion=(1_000_000_000, 2),
    wan="50M",
    attached_steps=150,
)

QUICK = Scale(
    repeats=3,
    raw_bytes=128 << 20,
    transport_bytes=128 << 20,
    fold=("10M", (1,)),
    rounds=(("10M", 2, "fp32"),),
    round_repeats={"10M": 3},
    free=("10M", (2,), 1.0),
    stream=(10, 1),
    heartbeat=("10M", 2, 3),
    idle=(100, 2.0),
    saving=("10M", 1),
    billion=(0, 0),
    wan="10M",
    attached_steps=20,
)
