"""The next life of a worker, for `pytest_plugins`; it needs those of `worker_fixtures`."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_protocol import VersionId
from kit.next_life import NextLife, Resume, Saved
from kit.scripted_broker import Beside, ScriptedBroker
from kit.uniform_model import Make


@pytest.fixture
def resume(broker: ScriptedBroker, beside: Beside, make: Make) -> Resume:
    """It has joined; the broker's versions are those given."""

    def resumed(
        saved: Saved, *theirs: VersionId | None, first_round: int = 0, **keywords: Any
    ) -> NextLife:
        state, tensors = saved
        worker, descent = make(**keywords)
        descent.model.load_state_dict(tensors)
        worker.load_state_dict(state)
        started = beside(worker.start)
        join = broker.welcomes(*theirs, first_round=first_round)
        return NextLife(worker, descent, started, join)

    return resumed
