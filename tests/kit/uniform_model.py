"""Shorthand for models that have the same value everywhere."""

import threading
import time
from collections.abc import Callable

import torch

from diloco_protocol import Segment
from diloco_worker.model.flat_state import FlatState
from kit.scripted_broker import Descent, ScriptedBroker, changed


def values(descent: Descent, broker: ScriptedBroker | None = None, fragment: int = 0) -> FlatState:
    """A fragment of the model as it is now, laid out as the broker has it."""
    layout = broker.layout if broker is not None else None
    return descent.values(fragment, part=layout.all[fragment] if layout is not None else None)


def filled(
    descent: Descent, value: float, broker: ScriptedBroker | None = None, fragment: int = 0
) -> FlatState:
    """A fragment with this value everywhere."""
    now = values(descent, broker, fragment)
    return changed(now, lambda vector: torch.full_like(vector, value))


def first(state: FlatState) -> float:
    """The value of the parameters, which are all the same."""
    vector = state.vectors[Segment.PARAMETERS]
    assert bool((vector == vector[0]).all())
    return float(vector[0])


def at(descent: Descent, broker: ScriptedBroker | None = None, fragment: int = 0) -> float:
    return first(values(descent, broker, fragment))


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
