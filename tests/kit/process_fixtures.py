"""Processes of one test, for `pytest_plugins`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.process_kit import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()
