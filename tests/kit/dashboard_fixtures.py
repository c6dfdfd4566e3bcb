"""Fixtures for the dashboard in a browser, beside those of `kit.browser_fixtures`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from diloco_broker import Broker
from diloco_tools.monitor.feed import model
from kit.dashboard_runs import a_run, with_token
from kit.dashboard_server import Site
from kit.pages import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """STALE after 3 seconds instead of 10."""
    monkeypatch.setattr(model, "LIVE_BELOW_S", 2.0)
    monkeypatch.setattr(model, "STALE_ABOVE_S", 3.0)


@pytest.fixture
def live_broker() -> Iterator[Broker]:
    with a_run() as (made, _):
        yield made


@pytest.fixture
def live_site(live_broker: Broker) -> Iterator[Site]:
    with serving(live_broker.feed_address) as made:
        yield made


@pytest.fixture
def live(live_site: Site, opened: Callable[..., Page]) -> Page:
    """The page of `live_broker`, which two workers have joined, with the token."""
    return opened(with_token(live_site))
