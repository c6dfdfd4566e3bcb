"""The full screen of diloco-top: what it shows, how old it says that it is, what its keys do."""

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.widgets import Input

from diloco_protocol.feed import FeedError, Worker
from diloco_tools.monitor.terminal.application import KEYS, keys_for
from diloco_tools.monitor.terminal.scene import ORDERS, View
from diloco_tools.monitor.terminal.text import clipped
from kit.feed_snapshots import status, worker
from kit.strange_feeds import strange_feeds
from kit.top_screen import LARGE, SMALL, ScreenPilot, both, document, screen, shown, snapshot


@both
async def test_picture_is_the_stored_one(pilot: ScreenPilot) -> None:
    await pilot.waits(0.4)
    lines = pilot.lines()
    assert len(lines) == pilot.size[1]
    assert max(len(line) for line in lines) <= pilot.size[0]
    pilot.matches("top")


@both
async def test_picture_of_an_asynchronous_run_is_the_stored_one(pilot: ScreenPilot) -> None:
    parts = [
        {"fragment": n, "version": 60 - n, "gradients": 60 - n, "buffered": n % 4} for n in range(6)
    ]
    news = snapshot(
        42,
        mode="async",
        fragments=parts,
        fragment_sync_delay=5,
        fragment_update_alpha=0.5,
        reducer={"staged": True, "submissions": 2, "waiting": 1},
    )
    await pilot.hears(news, after_s=1.0)
    pilot.matches("top_async")


@screen({"encoding": "ascii"})
async def test_picture_in_ascii_is_the_stored_one(pilot: ScreenPilot) -> None:
    pilot.matches("top_ascii")
    await pilot.press("question_mark")
    assert pilot.text().isascii()
    await pilot.press("escape", "k")
    assert pilot.text().isascii()
    assert "Kick a100-0" in pilot.text()


class TestFreshness:
    async def test_header_turns_and_ages_go_on(self, pilot: ScreenPilot) -> None:
        assert "● LIVE 0.0 s" in pilot.lines()[0]
        assert not pilot.header_is("late") and not pilot.header_is("stale")
        await pilot.waits(2.9)
        assert "● LIVE 2.9 s" in pilot.lines()[0]
        await pilot.waits(1.1)
        assert "◐ LATE 4.0 s" in pilot.lines()[0]
        assert pilot.header_is("late")
        assert "412 open for 16 s" in pilot.text()
        await pilot.waits(26.0)
        assert "○ STALE 30 s" in pilot.lines()[0]
        assert pilot.header_is("stale")
        (said,) = (each.style for each in pilot.strips()[0] if "STALE" in each.text)
        assert said is not None and said.color != said.bgcolor, "red on red is not read"
        assert pilot.shows("the broker has sent nothing for 30 s", "412 open for 42 s")
        assert re.search(r"mac-mini .* 71 s ", pilot.text())
        await pilot.hears(snapshot(72))
        assert "● LIVE 0.0 s" in pilot.lines()[0]
        assert not pilot.header_is("late") and not pilot.header_is("stale")

    async def test_missed_snapshots_and_restarts_are_shown(self, pilot: ScreenPilot) -> None:
        assert "missed" not in pilot.lines()[0]
        await pilot.hears(snapshot(45), after_s=4.0)
        assert "3 missed" in pilot.lines()[0]
        await pilot.hears(snapshot(1, epoch="cd34"), after_s=4.0)
        assert "1 restart  3 missed" in pilot.lines()[0]

    @screen({"fill": False})
    async def test_without_a_feed_the_screen_says_what_to_do(self, pilot: ScreenPilot) -> None:
        assert "○ STALE" in pilot.lines()[0]
        assert "Start diloco-broker serve" in pilot.flat()
        assert "q Quit" in pilot.lines()[-1]
        for key in ("down", "enter", "o", "k"):
            await pilot.press(key)
        await pilot.hears(snapshot(1))
        assert "● LIVE" in pilot.lines()[0]

    async def test_complaint_about_the_feed_is_a_sentence(self, pilot: ScreenPilot) -> None:
        pilot.app.cannot_read(FeedError("the broker publishes feed version 2"))
        await pilot.sees("the broker publishes feed version 2")
        await pilot.waits(31.0)
        assert "feed version 2" not in pilot.text()


class TestTable:
    async def test_arrows_mark_a_worker_for_good(self, pilot: ScreenPilot) -> None:
        for keys, marked in (
            ((), "a100-0"),
            (("down", "down"), "mac-mini"),
            (("up",), "a100-1"),
            (("pagedown",), "xeon"),
            (("pageup", "down"), "a100-1"),
        ):
            await pilot.press(*keys)
            assert pilot.marked() == marked
        rest = [w for w in status()["workers"] if w["id"] != "a100-1"]
        await pilot.hears(snapshot(42, workers=rest), after_s=1.0)
        assert "a100-1" not in pilot.workers()
        assert pilot.marked() == "rtx", "the worker that took its place"

    async def test_sorts(self, pilot: ScreenPilot) -> None:
        assert pilot.workers() == ["a100-0", "a100-1", "mac-mini", "rtx-home", "xeon"]
        assert pilot.text().count("by worker") == 1
        await pilot.press("o")
        assert pilot.workers()[:2] == ["mac-mini", "rtx-home"]
        assert "by health" in pilot.text()
        await pilot.press("O")
        assert pilot.workers()[-1] == "mac-mini"
        await pilot.press("o", "o", "o")
        assert "by speed" in pilot.text()
        assert pilot.workers()[0] == "xeon"
        for _ in range(5):
            await pilot.press("o")
        assert "by worker" in pilot.text()

    @pytest.mark.slow
    async def test_filters_while_typing(self, pilot: ScreenPilot) -> None:
        await pilot.press("slash")
        assert "filter" in pilot.text()
        await pilot.press(*"CELL")
        assert pilot.workers() == ["a100-0", "a100-1"]
        assert "2 of 5 workers match 'CELL'" in pilot.text()
        await pilot.press("enter")
        assert pilot.workers() == ["a100-0", "a100-1"]
        assert "q Quit" in pilot.lines()[-1]
        await pilot.press("slash", *"lost", "enter")
        assert pilot.workers() == ["mac-mini"]
        await pilot.press("slash", *"zz", "enter")
        assert "none of 5 workers match 'zz'" in pilot.text()
        await pilot.press("k")
        assert "No worker is marked" in pilot.text()
        await pilot.press("slash", "escape")
        assert len(pilot.workers()) == 5
        assert not pilot.app.query_one(Input).has_focus

    async def test_many_workers_scroll_with_the_mark(self, pilot: ScreenPilot) -> None:
        crew = [worker(f"w{n:03}") for n in range(200)]
        await pilot.hears(snapshot(42, workers=crew), after_s=1.0)
        assert pilot.shows("w000", "200 workers, by worker")
        await pilot.press(*["pagedown"] * 5, "down")
        assert pilot.marked() == "w051" and "w051" in pilot.text()
        assert "mac-mini (attic)" in pilot.text(), "events keep their place"


class TestPages:
    @both
    async def test_help_lists_every_key(self, pilot: ScreenPilot) -> None:
        await pilot.press("question_mark")
        shown = pilot.text()
        for key in keys_for(readonly=False, replay=False):
            assert not key.tooltip or f" {key.key_display}  {key.tooltip}" in shown

    @pytest.mark.parametrize("back", ["escape", "q", "question_mark"])
    async def test_help_is_left(self, pilot: ScreenPilot, back: str) -> None:
        await pilot.press("question_mark")
        assert "remove the marked worker" in pilot.text()
        await pilot.press(back)
        assert "remove the marked worker" not in pilot.text()
        assert pilot.app.is_running

    async def test_details_of_the_marked_worker(self, pilot: ScreenPilot) -> None:
        crew = [worker("odd", extra={"gpu": "RTX 4090", "note": "[bold]x"}, loss=None)]
        await pilot.hears(snapshot(42, workers=crew), after_s=1.0)
        await pilot.press("enter")
        assert pilot.shows("Worker odd", "host-of-odd", "4242", "RTX 4090", "[bold]x", "Staleness")
        await pilot.press("escape")
        assert "RTX 4090" not in pilot.text()

    @pytest.mark.parametrize("keys", [("q",), ("ctrl+c",), ("ctrl+q",), ("l", "ctrl+c")])
    async def test_quits_from_anywhere(self, pilot: ScreenPilot, keys: tuple[str, ...]) -> None:
        await pilot.press(*keys)
        assert not pilot.app.is_running


@screen({"size": (60, 12)})
async def test_small_window_says_what_it_needs(pilot: ScreenPilot) -> None:
    assert "60x12 is too small: diloco-top needs 80x24" in pilot.text()
    await pilot.pilot.resize_terminal(80, 24)
    await pilot.until(lambda: len(pilot.lines()) == 24)
    await pilot.sees("q Quit")
    assert "too small" not in pilot.text()


# What the full screen is drawn from: order of the table, signs, curves, any feed at all.


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(news=strange_feeds(), size=st.sampled_from([(20, 5), SMALL, LARGE]))
def test_any_feed_is_drawn(news: dict[str, Any], size: tuple[int, int]) -> None:
    """`test_top_once` has more of them, without a screen."""
    text = shown(news, size, ("o",))
    assert "\x1b" not in text
    assert max(map(cell_len, text.splitlines())) <= size[0]


def test_long_name_is_cut_in_the_middle() -> None:
    crew = [worker("mac-mini-of-the-second-floor", host="mac.second.floor.example.org")]
    assert "…" in shown(document(1, workers=crew))
    for cells in range(1, 20):
        assert cell_len(clipped("東京の大きな計算機です", cells)) <= cells
    assert clipped("abcdefgh", 5) == "ab…gh"
    assert clipped("abcdefgh", 8) == "abcdefgh"


def test_tables_are_sorted_by_each_column() -> None:
    crew = [
        Worker("a", health="ok", round=5, steps_per_s=2.0, loss=1.0, beat_age_s=1.0),
        Worker("b", health="lost", round=None, steps_per_s=None, loss=math.nan, staleness=2),
        Worker("c", health="odd", round=4, steps_per_s=1.0, loss=2.0, bytes_up=9, host="A"),
        Worker("d", health="slow", round=4, steps_per_s=3.0, loss=None, beat_age_s=9.0),
    ]
    found = ["".join(w.id for w in View(order=n).rows(crew)) for n in range(len(ORDERS))]
    assert found == ["abcd", "bdca", "abdc", "cdab", "cadb", "acbd", "bcad", "acdb", "abdc"]
    backwards = View(order=5, reverse=True).rows(crew)
    assert [w.id for w in backwards][:2] == ["c", "a"], "unknown ones are last, either way"


@screen({"size": LARGE, "fill": False})
async def test_first_round_does_not_flatten_the_curve(pilot: ScreenPilot) -> None:
    """A loss of 10.8, and then the ones that people want to see."""
    losses = [10.8, 5.5] + [3.0 - 0.02 * n for n in range(10)]
    for number, loss in enumerate(losses, start=500):
        closed = {"number": number, "seconds": 40.0, "loss": loss}
        await pilot.hears(snapshot(number, last_round=closed), after_s=1.0)
    assert "loss 2.820  2.820 to" in pilot.text()
    assert "↑" in pilot.text(), "the first two are off the scale, and it says so"


def test_no_key_means_two_things() -> None:
    for replay in (False, True):
        found = [name for key in keys_for(readonly=False, replay=replay)
                 for name in key.key.split(",")]  # fmt: skip
        twice = {name for name in found if found.count(name) > 1}
        assert not twice
    steering = {f"order('{name}')" for name in ("kick", "save", "lr", "pause", "shutdown")}
    assert {key.action for key in KEYS} >= steering
