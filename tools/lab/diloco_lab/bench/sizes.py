"""The models of the benchmark: the demo's GPT in some sizes. Pure."""

from __future__ import annotations

from typing import NamedTuple

VOCABULARY = 256  # bytes
CONTEXT = 64  # bytes that a model sees at once


class Shape(NamedTuple):
    width: int
    layers: int
    heads: int


SIZES = {
    "0.4M": Shape(128, 2, 4),
    "10M": Shape(320, 8, 5),
    "50M": Shape(640, 10, 10),
    "125M": Shape(1024, 10, 16),
    "150M": Shape(1024, 12, 16),
}


def parameters_of(size: str) -> int:
    """Trainable parameters of one of `SIZES`: 12 width^2 a block, bytes and positions."""
    shape = SIZES[size]
    return 12 * shape.width**2 * shape.layers + (VOCABULARY + CONTEXT) * shape.width


def size_of(parameters: int) -> str:
    """The name of a model of the benchmark; of others about how many parameters it has."""
    for name in SIZES:
        if parameters_of(name) == parameters:
            return name
    return f"{parameters / 1e6:.3g}M"
