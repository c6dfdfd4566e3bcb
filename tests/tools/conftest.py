"""Fixtures that several tests of the tools use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.feed_snapshots import Publisher


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()
