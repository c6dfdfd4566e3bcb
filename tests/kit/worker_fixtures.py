"""Fixtures for workers against a scripted broker: `pytest_plugins = ("kit.worker_fixtures",)`."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from kit.scripted_broker import Beside, ScriptedBroker
from kit.scripted_training import ScriptedTraining


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with closing(ScriptedBroker()) as made:
        yield made


@pytest.fixture
def beside() -> Iterator[Beside]:
    with closing(Beside()) as made:
        yield made


@pytest.fixture
def training(
    broker: ScriptedBroker, beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ScriptedTraining]:
    """Its workers are closed at once after the test, whatever became of it."""
    monkeypatch.delenv("DILOCO_SERVER", raising=False)
    made = ScriptedTraining(broker, beside)
    yield made
    for worker in made.workers:
        worker.close(failed=True)
