"""What is tuned for an arm: the settings of which it gets the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Choices = tuple[Mapping[str, Any], ...]


def outer(*pairs: tuple[float, float]) -> Choices:
    """Outer learning rates eta and momenta mu."""
    return tuple({"outer_lr": eta, "outer_momentum": mu} for eta, mu in pairs)


# As published for DiLoCo (.7, .9; arXiv 2311.08105), with less momentum, with none.
OUTER = outer((0.7, 0.9), (0.8, 0.5), (1.0, 0.0))
# For a step at each push of one of four workers, of which there are four times as many.
OUTER_PER_PUSH = outer((0.2, 0.5), (0.1, 0.9), (0.25, 0.0))
INNER: Choices = tuple({"lr": lr} for lr in (0.75e-3, 1.5e-3, 3e-3))
