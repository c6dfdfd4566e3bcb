"""The dashboard in a real browser: headless Chromium, driven by Playwright.

Needs the package playwright and an installed Chromium (`make test-browser` sees to both); without them
these tests are skipped, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from diloco_broker import Broker
from diloco_tools.monitor.feed.replay import read_history
from diloco_worker import DiLoCoClient
from kit import dashboard_server
from kit.dashboard_server import TOKEN, Publisher, Site, a_worker
from kit.feed_snapshots import PATIENCE_S
from kit.pages import PATIENCE_MS, serving
from kit.past_runs import write_run

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: make test-browser"
)
if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest_plugins = ("kit.browser_fixtures",)
pytestmark = pytest.mark.browser

PHONE = {"width": 390, "height": 844}
SCROLLED = "document.scrollingElement"
HOSTILE = '<img src=x onerror="document.title=1"><script>alert(1)</script>'


@pytest.fixture
def site(publisher: Publisher) -> Iterator[Site]:
    with serving(publisher.address) as made:
        yield made


@pytest.fixture
def page(site: Site, opened: Callable[..., Page]) -> Page:
    """The page of `publisher`, with the token."""
    return opened(site.with_token())


def sees(page: Page, selector: str, text: str | re.Pattern[str]) -> None:
    playwright.expect(page.locator(selector)).to_contain_text(text, timeout=PATIENCE_MS)


def reads(page: Page, plot: str, *values: str) -> None:
    """The legend of a plot comes to have these values, of x first."""
    shown = page.locator(f"{plot} .u-legend .u-value")
    playwright.expect(shown).to_have_text(values, timeout=PATIENCE_MS)


class TestLive:
    def test_table_fills_and_a_kick_removes_a_worker(self, live: Page, live_broker: Broker) -> None:
        page = live
        sees(page, "#freshness b", "LIVE")
        rows = page.locator("#worker-box tbody tr")
        playwright.expect(rows).to_have_count(2, timeout=PATIENCE_MS)
        sees(page, "#worker-box tbody tr:first-child", "w0")
        sees(page, "#worker-box tbody tr:first-child .health", "● ok")
        sees(page, "#counts", "2 alive")

        page.get_by_role("button", name="Kick w1").click()
        sees(page, "#ask-title", "Kick w1")
        sees(page, "#ask-text", "1 worker remains.")
        playwright.expect(page.locator("#ask-no")).to_be_focused()
        page.keyboard.press("Escape")
        playwright.expect(page.locator("#ask")).to_be_hidden()
        playwright.expect(rows).to_have_count(2)

        page.get_by_role("button", name="Kick w1").click()
        page.locator("#ask-yes").click()
        sees(page, "#result-text", "w1 was removed")
        playwright.expect(rows).to_have_count(1, timeout=PATIENCE_MS)
        with DiLoCoClient(live_broker.address, timeout=PATIENCE_S) as observer:
            workers = observer.status()["workers"]
        assert [worker["id"] for worker in workers] == ["w0"]

    def test_settings_change_after_old_and_new_were_shown(self, live: Page) -> None:
        page = live
        sees(page, "#rows-list", "lr 0.7")
        page.get_by_role("button", name="Outer learning rate").click()
        sees(page, "#ask-text", "0.7")
        for typed in ("", "0.7", "0", "-1", "x"):
            page.locator("#ask-typed").fill(typed)
            assert page.locator("#ask-yes").is_disabled(), typed
        page.locator("#ask-typed").fill("0.5")
        sees(page, "#ask-label", "0.7 →")
        page.keyboard.press("Enter")
        sees(page, "#result-text", "uter learning rate 0.7 -> 0.5")
        sees(page, "#rows-list", "lr 0.5")

        page.get_by_role("button", name="Workers wanted").click()
        page.locator("#ask-typed").fill("3")
        page.locator("#ask-yes").click()
        sees(page, "#counts", "3 wanted")

    @pytest.mark.usefixtures("impatient")
    def test_shutdown_takes_the_name_of_the_run(self, live: Page, live_broker: Broker) -> None:
        page = live
        sees(page, "#freshness b", "LIVE")
        name = page.locator("#run").inner_text().removeprefix("run ")
        assert re.fullmatch("[0-9a-f]{8}", name)
        page.locator("#shutdown").click()
        sees(page, "#ask-label", name)
        assert page.locator("#ask-yes").is_disabled()
        page.locator("#ask-typed").fill(name[:-1])
        assert page.locator("#ask-yes").is_disabled()
        page.locator("#ask-typed").fill(name)
        page.locator("#ask-yes").click()
        sees(page, "#result-text", "stops")
        sees(page, "#freshness b", "STALE")
        sees(page, "#control-reason", "silent")
        for control in ("#pause", "#shutdown", "#lr", "#worker-box .kick >> nth=0"):
            if page.locator(control).count():
                assert page.locator(control).is_disabled(), control

    def test_page_goes_stale_with_the_broker(self, page: Page, publisher: Publisher) -> None:
        publisher.says()
        sees(page, "#freshness b", "LIVE")
        sees(page, "#freshness b", "LATE")
        sees(page, "#freshness b", "STALE")
        sees(page, "#notice", "the broker has sent nothing for")
        sees(page, "#announce", "The feed is stale.")
        beat = page.locator("#worker-box tbody tr:first-child .beat_age_s .main")
        then = beat.inner_text()
        playwright.expect(beat).not_to_have_text(then, timeout=PATIENCE_MS)
        assert page.locator("#worker-box .kick").first.is_disabled()
        publisher.says(sequence=8)
        sees(page, "#freshness b", "LIVE")
        playwright.expect(page.locator("#notice")).to_be_hidden()
        assert page.locator("#worker-box .kick").first.is_enabled()


class TestToken:
    def test_it_stays_with_the_tab(self, page: Page, publisher: Publisher, site: Site) -> None:
        publisher.says()
        sees(page, "#freshness b", "LIVE")
        assert page.url == f"{site.address}/"
        assert page.context.cookies() == []
        assert page.locator("#pause").is_enabled()
        page.reload()
        publisher.says(sequence=8)
        sees(page, "#facts", "sync")
        playwright.expect(page.locator("#pause")).to_be_enabled(timeout=PATIENCE_MS)

    def test_broken_one_is_replaced(
        self, opened: Callable[..., Page], publisher: Publisher
    ) -> None:
        with serving(publisher.address) as site:
            page = opened(site.with_token("broken"))
            publisher.says()
            sees(page, "#facts", "sync")
            sees(page, "#control-reason", "Wrong token")
            for control in ("#pause", "#shutdown", "#worker-box .kick >> nth=0"):
                assert page.locator(control).is_disabled(), control
            page.get_by_label("Token").fill(TOKEN)
            page.get_by_role("button", name="Use", exact=True).click()
            playwright.expect(page.locator("#pause")).to_be_enabled()
            playwright.expect(page.locator("#token-form")).to_be_hidden()


class TestLook:
    def test_text_of_unauthenticated_peers_is_never_markup(
        self, page: Page, publisher: Publisher
    ) -> None:
        publisher.says(
            workers=[a_worker(HOSTILE, host=HOSTILE, state=HOSTILE, health=HOSTILE)],
            events=[{"sequence": 1, "level": HOSTILE, "text": HOSTILE}],
            rejections=[{"age_s": 1.0, "worker": HOSTILE, "code": HOSTILE, "text": HOSTILE}],
            waiting_for=HOSTILE,
            state="waiting",
            mode=HOSTILE,
            run=HOSTILE,
            checkpoint={"folder": HOSTILE, "error": HOSTILE},
        )
        sees(page, "#worker-box .id .main", HOSTILE)
        sees(page, "#events-list", HOSTILE)
        page.locator("#worker-box .kick").click()
        sees(page, "#ask-title", f"Kick {HOSTILE}")
        page.keyboard.press("Escape")
        page.locator("#shutdown").click()
        sees(page, "#ask-label", HOSTILE[:8])
        assert page.locator("img, script:not([src])").count() == 0
        assert page.title() != "1"

    def test_columns_sort_and_focus_stays(self, page: Page, publisher: Publisher) -> None:
        speeds = {"a": 2.0, "b": 3.0, "c": 1.0}
        said = [a_worker(name, steps_per_s=speed) for name, speed in speeds.items()]
        publisher.says(workers=said)
        names = page.locator("#worker-box .id .main")
        playwright.expect(names).to_have_text(["a", "b", "c"], timeout=PATIENCE_MS)
        button = page.get_by_role("button", name="Speed")
        button.focus()
        page.keyboard.press("Enter")
        playwright.expect(names).to_have_text(["c", "a", "b"])
        page.keyboard.press("Enter")
        playwright.expect(names).to_have_text(["b", "a", "c"])
        head = page.locator("th", has_text="Speed")
        playwright.expect(head).to_have_attribute("aria-sort", "descending")
        page.get_by_role("button", name="Kick a").focus()
        publisher.says(sequence=8, workers=said[:1])
        playwright.expect(names).to_have_text(["a"], timeout=PATIENCE_MS)
        playwright.expect(page.get_by_role("button", name="Kick a")).to_be_focused()

    def test_plots_say_their_values(self, page: Page, publisher: Publisher, site: Site) -> None:
        for number in range(4):
            publisher.says(
                sequence=10 + number,
                uptime_s=100.0 + number,
                last_round={"number": number, "seconds": 40.0, "loss": 4.0 - number},
            )
            site.await_state(sequence=10 + number)
        reads(page, "#plot-loss", "3", "1")
        plot = page.locator("#plot-loss .surface")
        plot.focus()
        page.keyboard.press("Home")
        reads(page, "#plot-loss", "0", "4")
        page.keyboard.press("ArrowRight")
        reads(page, "#plot-loss", "1", "3")
        plot.hover(position={"x": 70, "y": 50})
        reads(page, "#plot-loss", "0", "4")
        assert page.locator("#plot-loss canvas").evaluate(
            """(canvas) => canvas.getContext("2d")
              .getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0)"""
        ), "something is drawn"

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_phone_shows_cards_and_never_scrolls_sideways(
        self, opened: Callable[..., Page], publisher: Publisher, scheme: str
    ) -> None:
        with serving(publisher.address) as site:
            page = opened(site.with_token(), viewport=PHONE, has_touch=True, color_scheme=scheme)
            long = a_worker("a-worker-with-a-name-of-remarkable-length-and-no-space-in-it-at-all")
            publisher.says(workers=[a_worker("a"), long, a_worker("rtx", host="h" * 80)])
            sees(page, "#freshness b", "LIVE")
            playwright.expect(page.locator("#worker-box tbody tr")).to_have_count(3)
            assert page.evaluate(f"{SCROLLED}.scrollWidth <= {SCROLLED}.clientWidth")
            for button in page.locator("#worker-box .kick").all():
                box = button.bounding_box()
                assert box is not None
                assert box["x"] + box["width"] <= PHONE["width"]
                assert box["height"] >= 32, "a finger hits it"
            page.locator("#worker-box .kick").nth(1).click()
            box = page.locator("#ask").bounding_box()
            assert box is not None
            assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
            back = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            red = int(re.findall(r"\d+", back)[0])
            assert (red < 60) == (scheme == "dark")


class TestOthers:
    @pytest.mark.usefixtures("impatient")
    def test_dashboard_is_gone(self, opened: Callable[..., Page], publisher: Publisher) -> None:
        with dashboard_server.serving(publisher.address) as site:
            page = opened(site.with_token(), "ERR_|network error|Failed to fetch")
            publisher.says()
            sees(page, "#freshness b", "LIVE")
        sees(page, "#notice", "does not answer")
        sees(page, "#freshness b", "STALE")
        assert page.locator("#pause").is_disabled()

    def test_recorded_run_is_played(self, opened: Callable[..., Page], tmp_path: Path) -> None:
        with serving(replay=read_history(write_run(tmp_path, rounds=30))) as site:
            page = opened(f"{site.address}/")
            sees(page, "#freshness b", "REPLAY")
            sees(page, "#moment-at", "after the start")
            sees(page, "#events-list", "all is well")
            slider = page.get_by_label("Moment of the run")
            slider.focus()
            page.keyboard.press("Home")
            for _ in range(6):
                page.keyboard.press("ArrowRight")
            sees(page, "#moment-at", "00:04:00 after the start")
            sees(page, "#control-reason", "This is a recorded run")
            reads(page, "#plot-loss", "5", "3.95")
            page.keyboard.press("End")
            sees(page, "#moment-at", "00:20:02 after the start")
