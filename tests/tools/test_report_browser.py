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

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: make test-browser"
)
if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest_plugins = ("kit.browser_fixtures",)
pytestmark = pytest.mark.browser

AT = 1_700_000_000.0
PHONE = {"width": 360, "height": 780}
HOSTILE = '</script><img src=x onerror="document.title=1"><b>long'
SCROLLS = "document.scrollingElement.scrollWidth > document.scrollingElement.clientWidth"
COLOUR = "getComputedStyle(document.documentElement).backgroundColor"


@pytest.fixture
def report(tmp_path: Path) -> str:
    """The address of a page: two starts of the broker, hostile names, a pause, a warning."""
    rounds = [
        closed(AT + 9 * n, n, HOSTILE, "b", loss=2 + 8 * 0.6**n, seconds=9.0) for n in range(1, 30)
    ]
    lines: list[Any] = [
        start(AT),
        event(AT + 1, f"{HOSTILE} joins from {HOSTILE}."),
        *rounds,
        event(AT + 270, "b counts as dead: nothing was heard from it for 30 s.", level="warning"),
        {**closed(AT + 3000, 30, HOSTILE, loss=2.0, seconds=7200.0), "epoch": "b1"},
        {**line("stop", AT + 3010, text=HOSTILE), "epoch": "b1"},
    ]
    orders = (action(AT + 50, "pause", "the run is paused"), action(AT + 70, "resume", HOSTILE))
    page = tmp_path / "report.html"
    page.write_text(page_of(facts_of(tmp_path, *lines, actions=orders)), encoding="utf-8")
    return page.as_uri()


def read(page: Page, plot: str, *keys: str) -> str:
    """What a plot says once these keys were pressed in it."""
    page.locator(f"#plot-{plot} .surface").focus()
    for key in keys:
        page.keyboard.press(key)
    return " ".join(page.locator(f"#plot-{plot} .u-legend .u-value").all_inner_texts())


def test_page_draws_and_fetches_nothing(report: str, opened: Callable[..., Page]) -> None:
    page = opened(report)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    playwright.expect(page).to_have_title("Run 3fa2c1d09b11: report")
    assert asked == [report], "nothing else is fetched"
    assert page.locator("img").count() == 0
    assert page.locator(".plot canvas").count() == 5
    boxes = [each.bounding_box() for each in page.locator(".plot canvas").all()]
    assert all(box and box["width"] > 100 for box in boxes)
    assert read(page, "loss") == "30 2"
    assert read(page, "loss", "Home") == "1 6.8"
    assert read(page, "loss", "ArrowRight") == "2 4.88"
    assert read(page, "speeds", "Home").startswith("22:13:29 UTC ")


def test_tables_show_the_run_without_control(report: str, opened: Callable[..., Page]) -> None:
    page = opened(report)
    workers = page.locator("#workers tbody tr")
    playwright.expect(workers).to_have_count(2)
    assert workers.first.locator(".id .main").inner_text() == HOSTILE
    assert "died" in workers.nth(1).inner_text()
    assert page.locator("#lives tbody tr").count() == 2
    assert HOSTILE in page.locator("#orders").inner_text()
    assert page.locator("#control").is_hidden() and page.locator(".kick").count() == 0


def test_page_is_dark_or_light_on_paper(report: str, opened: Callable[..., Page]) -> None:
    page = opened(report, color_scheme="dark")
    playwright.expect(page.locator("#workers tbody tr")).to_have_count(2)
    dark = page.evaluate(COLOUR)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(COLOUR)
    page.emulate_media(media="print", color_scheme="dark")
    assert dark != light
    assert page.evaluate(COLOUR) == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
