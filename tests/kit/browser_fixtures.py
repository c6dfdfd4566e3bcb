"""Fixtures for pages in headless Chromium: `pytest_plugins = ("kit.browser_fixtures",)`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from diloco_broker import Broker
from diloco_tools.monitor.feed import model
from kit.dashboard_server import Site
from kit.pages import PAGES, PATIENCE_MS, serving
from kit.whole_run import joined, make_config, mlp

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP = {"width": 1280, "height": 800}


def chromium() -> str | None:
    """The browser of this machine: $CHROMIUM, or one on the path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = chromium()
    if found is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed: make test-browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Containers run tests as root, where Chromium's sandbox does not start.
        made = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page; whatever its console complains of fails the test, unless it was expected."""
    contexts = []
    complaints: list[str] = []

    def open_(address: str, expected: str = "^$", **options: Any) -> Page:
        context = browser.new_context(**{"viewport": DESKTOP} | options)
        contexts.append(context)
        page = context.new_page()
        PAGES.append(page)
        page.set_default_timeout(PATIENCE_MS)

        def complains(text: str) -> None:
            if not re.search(expected, text):
                complaints.append(text)

        page.on("console", lambda m: complains(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complains(str(error)))
        page.on("dialog", lambda dialog: complains(f"dialog: {dialog.message}"))
        page.goto(address)
        return page

    yield open_
    for context in contexts:
        context.close()
    PAGES.clear()  # a dashboard of the next test must not close them again
    assert complaints == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """STALE after 3 seconds instead of 10."""
    monkeypatch.setattr(model, "LIVE_BELOW_S", 2.0)
    monkeypatch.setattr(model, "STALE_ABOVE_S", 3.0)


@pytest.fixture
def live_broker() -> Iterator[Broker]:
    with Broker(make_config(workers=2)) as made, joined(made, mlp(), 2):
        yield made


@pytest.fixture
def live_site(live_broker: Broker) -> Iterator[Site]:
    with serving(live_broker.feed_address) as made:
        yield made


@pytest.fixture
def live(live_site: Site, opened: Callable[..., Page]) -> Page:
    """The page of `live_broker`, which two workers have joined."""
    return opened(live_site.with_token())
