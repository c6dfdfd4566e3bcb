"""Fixtures for workers against a scripted broker: `pytest_plugins = ("kit.worker_fixtures",)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from diloco_worker import DiLoCoWorker
from kit.scripted_broker import Beside, Descent, ScriptedBroker, scripted_broker, version
from kit.uniform_model import Make, filled


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with scripted_broker() as made:
        yield made


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside()
    yield made
    made.close()


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DiLoCoWorker]]:
    """Workers that are closed at once after the test, whatever became of it."""
    monkeypatch.delenv("DILOCO_SERVER", raising=False)
    made: list[DiLoCoWorker] = []
    yield made
    for worker in made:
        worker.close(failed=True)


@pytest.fixture
def make(broker: ScriptedBroker, workers: list[DiLoCoWorker]) -> Make:
    def made(model: nn.Module | None = None, **keywords: Any) -> tuple[DiLoCoWorker, Descent]:
        descent = Descent(model)
        keywords = {"server": broker.address, "worker_id": "me", **keywords}
        worker = DiLoCoWorker(descent.model, descent.optimizer, **keywords)
        workers.append(worker)
        return worker, descent

    return made


@pytest.fixture
def begin(broker: ScriptedBroker, beside: Beside, make: Make) -> Make:
    """A worker that has joined and whose model is at version 0: all values 100, frozen ones 0."""

    def begun(
        model: nn.Module | None = None,
        *,
        first_round: int = 0,
        state: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> tuple[DiLoCoWorker, Descent]:
        worker, descent = make(model, **keywords)
        if state is not None:
            worker.load_state_dict(state)
        started = beside(worker.start)
        broker.welcomes(version(0), first_round=first_round)
        assert broker.layout is not None
        for part in broker.layout.all:
            if part.chunks:
                broker.hears_pull(part.fragment)
                value = 0 if part is broker.layout.frozen else 100
                broker.serves(filled(descent, value, broker, part.fragment), version(0))
        assert started() is worker
        return worker, descent

    return begun
