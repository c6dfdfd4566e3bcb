"""Shorthand for models that have the same value everywhere."""

import threading
import time
from collections.abc import Callable

from diloco_protocol import Segment
from diloco_worker.model.flat_state import FlatState


def first(state: FlatState) -> float:
    """The value of the parameters, which are all the same."""
    vector = state.vectors[Segment.PARAMETERS]
    assert bool((vector == vector[0]).all())
    return float(vector[0])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
