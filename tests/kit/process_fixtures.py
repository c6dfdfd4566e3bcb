"""Processes of one test, for `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.process_kit import Nursery


@pytest.fixture
def nest() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()
