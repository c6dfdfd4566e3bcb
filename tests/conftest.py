"""Fixtures that several files use."""

from __future__ import annotations

import pytest

from kit.session_harness import FROZEN, Desk, desk, version


@pytest.fixture
def fresh() -> Desk:
    return desk()


@pytest.fixture
def ready() -> Desk:
    """A worker that has joined and holds version 0."""
    made = desk().connects().is_welcomed(version(0))
    made.receives(version(0))
    made.receives(version(0), fragment=FROZEN, chunks=1)
    made.holds(version(0))
    made.holds(version(0), fragment=FROZEN)
    made.effects = []
    return made
