"""The dashboard with the pages that a browser has open of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kit import dashboard_server
from kit.dashboard_server import Site
from kit.feed_snapshots import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Page

PATIENCE_MS = 1000 * PATIENCE_S
PAGES: list[Page] = []  # that are open


@contextmanager
def serving(*given: Any, **options: Any) -> Iterator[Site]:
    """The dashboard. Its pages are closed before it ends: they would look for it in vain."""
    with dashboard_server.serving(*given, **options) as site:
        try:
            yield site
        finally:
            while PAGES:
                PAGES.pop().close()
