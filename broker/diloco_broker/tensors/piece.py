"""Pieces of tensor work that may be lent to other threads, and what each thread needs of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Piece(Generic[Found]):
    """A piece of work whose inputs are all here.

    `run` reads only what it was made with, and writes only to what it makes: any thread may call it,
    beside others. `finish` stores its result, in the thread that owns the state, one
    piece after the other in the order in which they were made.
    """

    run: Callable[[], Any]
    finish: Callable[[Any], Found]

    def __call__(self) -> Found:
        """All of it, here and now."""
        return self.finish(self.run())


class Scratch(threading.local):
    """Rows of fp32 numbers that are written over and over; each thread has its own."""

    def __init__(self, rows: int, elements: int) -> None:
        self.rows = torch.empty(rows, elements, dtype=torch.float32)
