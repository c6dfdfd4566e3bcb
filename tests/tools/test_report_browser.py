"""The page of diloco-report in a real browser: headless Chromium, driven by Playwright.

Skipped, with the reason, where there is no Playwright or no Chromium (`make test-browser` sees to both).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from diloco_tools.monitor.report.page import page_of
from kit.past_runs import closed, event, line, start
from kit.report_pages import action, facts_of

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser")
if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest_plugins = ("kit.browser_fixtures",)
pytestmark = pytest.mark.browser

AT = 1_700_000_000.0
PHONE = {"width": 360, "height": 780}
HOSTILE = '<img src=x onerror="document.title=1"><b>' + "long" * 5
SCROLLS = "document.scrollingElement.scrollWidth > document.scrollingElement.clientWidth"
COLOUR = "getComputedStyle(document.documentElement).backgroundColor"


@pytest.fixture
def report(tmp_path: Path) -> str:
    """The address of a page: two lives, hostile names, a pause, warnings."""
    rounds = [
        closed(AT + 9 * n, n, HOSTILE, "b", loss=3.0 - n / 20, seconds=9.0) for n in range(1, 30)
    ]
    lines: list[Any] = [
        start(AT),
        event(AT + 1, f"{HOSTILE} joins from {HOSTILE}."),
        *rounds,
        event(AT + 270, "b counts as dead: nothing was heard from it for 30 s.", level="warning"),
        {**line("stop", AT + 900, text=HOSTILE), "epoch": "b1"},
    ]
    orders = (action(AT + 50, "pause", "the run is paused"), action(AT + 70, "resume", HOSTILE))
    page = tmp_path / "report.html"
    page.write_text(page_of(facts_of(tmp_path, *lines, actions=orders)), encoding="utf-8")
    return page.as_uri()


def drawn(page: Page, kind: str) -> list[tuple[float, float]]:
    """Where all of a kind begins from the left, and how wide it is, as the browser lays it out."""
    boxes = [each.bounding_box() for each in page.locator(kind).all()]
    return [(box["x"], box["width"]) for box in boxes if box is not None]


def test_page_is_drawn_without_a_script_and_complains_of_nothing(
    report: str, opened: Callable[..., Page]
) -> None:
    page = opened(report, java_script_enabled=False)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    assert asked == [report], "nothing else is fetched"
    assert page.title() == "Run 3fa2c1d09b11: report"
    assert page.locator("script, img").count() == 0
    curves = drawn(page, ".curve")
    assert len(curves) >= 8 and all(width > 100 for _, width in curves)
    ((_, width), *_) = drawn(page, ".row .here")
    assert width > 300
    assert page.locator(".who").first.inner_text() == HOSTILE
    assert page.locator("thead").first.is_visible()


def test_page_fits_a_phone(report: str, opened: Callable[..., Page]) -> None:
    page = opened(report, viewport=PHONE)
    assert not page.evaluate(SCROLLS)
    assert not page.locator("thead").first.is_visible(), "each line is a card"
    texts = drawn(page, "text.x:not(.odd)")
    assert texts and all(x >= 0 and x + width <= PHONE["width"] for x, width in texts)


def test_page_is_dark_for_who_wants_it_and_light_on_paper(
    report: str, opened: Callable[..., Page]
) -> None:
    page = opened(report, color_scheme="dark")
    dark = page.evaluate(COLOUR)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(COLOUR)
    page.emulate_media(media="print", color_scheme="dark")
    assert dark != light
    assert page.evaluate(COLOUR) == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
