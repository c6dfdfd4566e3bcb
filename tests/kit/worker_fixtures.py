"""Fixtures for workers against a scripted broker: `pytest_plugins = ("kit.worker_fixtures",)`."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from kit.scripted_broker import ScriptedBroker
from kit.scripted_training import ScriptedTraining


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with closing(ScriptedBroker()) as made:
        yield made


@pytest.fixture
def training(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedTraining]:
    monkeypatch.delenv("DILOCO_SERVER", raising=False)
    with closing(ScriptedTraining(broker)) as made:
        yield made
