"""Units of tensor work that may run in other threads, and scratch memory for each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Piece(Generic[Found]):
    """Work in two parts: `run` in any thread, and `finish` in the thread that owns the state.

    `run` reads only its own inputs and writes only to new tensors, so it may run in parallel with
    others. `finish` stores its result, one piece after the other in the order of their creation.
    """

    run: Callable[[], Any]
    finish: Callable[[Any], Found]

    def __call__(self) -> Found:
        """Do both parts now, in this thread."""
        return self.finish(self.run())


class Scratch(threading.local):
    """Rows of fp32 numbers that are overwritten repeatedly; each thread has its own."""

    def __init__(self, rows: int, elements: int) -> None:
        self.rows = torch.empty(rows, elements, dtype=torch.float32)
