"""Fixtures for a broker that asks for keys: `pytest_plugins = ("kit.key_fixtures",)`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_broker import Broker, BrokerConfig
from diloco_broker.storage.key_folder import KeyFolder
from kit.keyed_broker import ALLOWED
from kit.process_kit import LOCAL


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    made = KeyFolder.make(tmp_path / "keys")
    made.add_all(ALLOWED.values())
    return made


@pytest.fixture
def keyed(folder: KeyFolder) -> Iterator[Broker]:
    with Broker(BrokerConfig(keys=str(folder.path), workers=2, **LOCAL)) as running:
        yield running
