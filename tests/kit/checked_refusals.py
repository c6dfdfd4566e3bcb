"""Checks that each message which the broker's core refuses has changed and asked for nothing."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_broker.core import machine
from diloco_broker.core.effects import Effect
from diloco_broker.core.events import Event, Now, Received
from diloco_broker.core.operations import refusals
from diloco_protocol.bitmap import Bitmap

# Time goes on, and a refused message is a sign of life. What is packed once, for all who ask, may be.
NOT_COMPARED = {"now", "held_s", "last_seen", "disconnected_at", "_described"}


def contents(value: Any) -> Any:
    """What there is in a record of the core, as plain values that later changes do not reach."""
    if isinstance(value, Bitmap):
        return value.to_bytes()
    if isinstance(value, dict):
        return {key: contents(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return [contents(each) for each in value]
    if isinstance(value, set | bytearray):
        return type(value)(value)
    names = [each.name for each in fields(value)] if is_dataclass(value) else vars_of(value)
    if not names:
        return value
    return {name: contents(getattr(value, name)) for name in names if name not in NOT_COMPARED}


def vars_of(value: Any) -> list[str]:
    """The names of what an object of a plain class of ours holds."""
    is_ours = type(value).__module__.startswith("diloco_")
    return list(vars(value)) if is_ours and hasattr(value, "__dict__") else []


@contextmanager
def checked_refusals() -> Iterator[None]:
    """Fail where a core handles a message, refuses it, and something has changed before that."""
    handle, refuse = machine.Core.handle, refusals.refuse
    before: Any = None
    answers: list[list[Effect]] = []

    def refuses(state: Any, route: Any, message: Any, error: Any) -> list[Effect]:
        after = contents(state)
        changed = [name for name in after if after[name] != before[name]]
        assert not changed, f"{message} was refused ({error}), and has changed {changed}"
        answers.append(list(refuse(state, route, message, error)))
        return answers[-1]

    def handles(core: machine.Core, event: Event, now: Now) -> list[Effect]:
        nonlocal before
        if not isinstance(event, Received):
            return handle(core, event, now)
        before = contents(core.state)
        answers.clear()
        asked_for = handle(core, event, now)
        for answer in answers:
            assert asked_for[: len(answer)] == answer, f"{event.message} was refused half-way"
        return asked_for

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "refusals", SimpleNamespace(refuse=refuses))
        patch.setattr(machine.Core, "handle", handles)
        yield
