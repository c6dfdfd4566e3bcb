"""The full screen of diloco-top: what it shows, how old it says that it is, what its keys do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from textual.widgets import Input

from diloco_protocol.feed import FeedError, parse_snapshot
from diloco_tools.top import palette
from diloco_tools.top.drawing.keys import keys_for
from diloco_tools.top.drawing.notation import Glyphs
from kit.feed_snapshots import status, worker
from kit.top_screen import ESSENTIAL, LARGE, SIZES, SMALL, Stage, matches, snapshot

SIZE_NAMES = ["80x24", "140x40"]
both = pytest.mark.parametrize("size", SIZES, ids=SIZE_NAMES)


@both
def test_picture_is_the_stored_one(size: tuple[int, int]) -> None:
    async def script(stage: Stage) -> None:
        await stage.waits(0.4)
        lines = stage.lines()
        assert len(lines) == size[1]
        assert max(len(line) for line in lines) <= size[0]
        matches(f"top_{size[0]}x{size[1]}.txt", lines)

    Stage().play(script, size)


@both
def test_picture_of_an_asynchronous_run_with_fragments_is_the_stored_one(
    size: tuple[int, int],
) -> None:
    async def script(stage: Stage) -> None:
        parts = [
            {"fragment": n, "version": 60 - n, "gradients": 60 - n, "buffered": n % 4}
            for n in range(6)
        ]
        news = snapshot(
            42,
            mode="async",
            fragments=parts,
            fragment_sync_delay=5,
            fragment_update_alpha=0.5,
            reducer={"staged": True, "submissions": 2, "waiting": 1},
        )
        await stage.hears(news, after_s=1.0)
        matches(f"top_async_{size[0]}x{size[1]}.txt", stage.lines())

    Stage().play(script, size)


def test_picture_in_ascii_is_the_stored_one() -> None:
    async def script(stage: Stage) -> None:
        matches("top_ascii_80x24.txt", stage.lines())
        await stage.press("question_mark")
        assert stage.text().isascii()
        await stage.press("escape", "k")
        assert stage.text().isascii()
        assert "Kick a100-0" in stage.text()

    Stage(glyphs=Glyphs.ascii()).play(script)


@both
def test_everything_essential_is_on_the_screen(size: tuple[int, int]) -> None:
    async def script(stage: Stage) -> None:
        text = stage.text()
        for shown in (
            "tcp://10.0.0.1:8513",
            "run 3fa2c1d0  151M  sync",
            "● LIVE",
            "412 open 12s  2/4 arrived █████░░░░░  missing rtx-home, xeon",
            "4 alive  2 participating  3 averaged  2 wanted  1 died",
            "dn paper  lr 0.7  momentum 0.9  every 500 steps",
            "v411 buffer 3/4",
            "loss 2.446",
            "round 41s",
            "net 142 MB/s",
            "up 2h  turn 4.8 ms  cpu 12%  rss 310 MB  saved round 411 13s ago",
            "3 rejected: 2 late, 1 non finite  1 malformed",
            "DEGRADED  mac-mini is lost, last heard 41 s ago",
            "○ lost",
            "◐ slow",
            "96/320",
            "15 MB",
            "mac-mini (attic) is lost",
        ):
            assert shown in text, shown
        header = next(line for line in stage.lines() if "WORKER" in line)
        assert [title for title in ESSENTIAL if title not in header.split()] == []
        for key in ("k ", "s ", "l ", "p ", "S ", "o ", "/ ", "f ", "? ", "q "):
            assert f" {key}" in stage.lines()[-1]

    Stage().play(script, size)


class TestFreshness:
    def test_header_turns_and_ages_go_on(self) -> None:
        async def script(stage: Stage) -> None:
            assert "● LIVE 0.0s" in stage.lines()[0]
            assert stage.header_colour() is None
            await stage.waits(2.9)
            assert "● LIVE 2.9s" in stage.lines()[0]
            await stage.waits(1.1)
            assert "◐ LATE 4.0s" in stage.lines()[0]
            assert stage.header_colour() == palette.THEME.warning
            assert "412 open 16s" in stage.text()
            await stage.waits(26.0)
            assert "○ STALE 30s" in stage.lines()[0]
            assert stage.header_colour() == palette.THEME.error
            assert "the broker has sent nothing for 30 s" in stage.text()
            assert "412 open 42s" in stage.text()
            assert re.search(r"mac-mini .* 71s ", stage.text())
            await stage.hears(snapshot(72))
            assert "● LIVE 0.0s" in stage.lines()[0]
            assert stage.header_colour() is None

        Stage().play(script)

    def test_missed_snapshots_and_restarts_are_shown(self) -> None:
        async def script(stage: Stage) -> None:
            assert "missed" not in stage.lines()[0]
            await stage.hears(snapshot(45), after_s=4.0)
            assert "3 missed" in stage.lines()[0]
            await stage.hears(snapshot(1, epoch="cd34"), after_s=4.0)
            assert "1 restart  3 missed" in stage.lines()[0]

        Stage().play(script)

    @both
    def test_without_a_feed_the_screen_says_what_to_do(self, size: tuple[int, int]) -> None:
        async def script(stage: Stage) -> None:
            assert "○ STALE" in stage.lines()[0]
            assert "Start diloco-broker serve" in stage.flat()
            assert "q Quit" in stage.lines()[-1]
            for key in ("down", "enter", "f", "o", "k"):
                await stage.press(key)
            await stage.hears(snapshot(1))
            assert "● LIVE" in stage.lines()[0]

        Stage().play(script, size, fill=False)

    def test_complaint_about_the_feed_is_a_sentence(self) -> None:
        async def script(stage: Stage) -> None:
            stage.app._heard_complaint(FeedError("the broker publishes feed version 2"))
            await stage.sees("the broker publishes feed version 2")
            await stage.waits(31.0)
            assert "feed version 2" not in stage.text()

        Stage().play(script)


class TestTable:
    @both
    def test_arrows_mark_a_worker_and_the_mark_stays_with_it(self, size: tuple[int, int]) -> None:
        async def script(stage: Stage) -> None:
            assert ">a100-0" in stage.text()
            await stage.press("down", "down")
            assert ">mac-mini" in stage.text()
            await stage.press("up")
            assert ">a100-1" in stage.text()
            await stage.press("pagedown")
            assert ">xeon" in stage.text()
            await stage.press("pageup", "down")
            assert ">a100-1" in stage.text()
            rest = [w for w in status()["workers"] if w["id"] != "a100-1"]
            await stage.hears(snapshot(42, workers=rest), after_s=1.0)
            assert "a100-1" not in stage.workers()
            assert ">" in stage.text()

        Stage().play(script, size)

    @both
    def test_sorts(self, size: tuple[int, int]) -> None:
        async def script(stage: Stage) -> None:
            assert stage.workers() == ["a100-0", "a100-1", "mac-mini", "rtx-home", "xeon"]
            assert stage.text().count("by id") == 1
            await stage.press("o")
            assert stage.workers()[:2] == ["mac-mini", "rtx-home"]
            assert "by health" in stage.text()
            await stage.press("O")
            assert stage.workers()[-1] == "mac-mini"
            await stage.press("o", "o", "o")
            assert "by speed, slowest first" in stage.text()
            assert stage.workers()[0] == "xeon"
            for _ in range(5):
                await stage.press("o")
            assert "by id" in stage.text()

        Stage().play(script, size)

    @both
    def test_filters_while_typing(self, size: tuple[int, int]) -> None:
        async def script(stage: Stage) -> None:
            await stage.press("slash")
            assert "filter" in stage.lines()[-1]
            assert "q Quit" in stage.lines()[-2], "keys are still there, above the filter"
            await stage.types("CELL")
            assert stage.workers() == ["a100-0", "a100-1"]
            assert "2 of 5 workers have 'CELL'" in stage.text()
            await stage.press("enter")
            assert stage.workers() == ["a100-0", "a100-1"]
            assert "q Quit" in stage.lines()[-1]
            await stage.press("slash", *"lost", "enter")
            assert stage.workers() == ["mac-mini"]
            await stage.press("slash", *"zz", "enter")
            assert "no worker has 'zz' in it" in stage.text()
            await stage.press("k")
            assert "There is no worker to kick" in stage.text()
            await stage.press("slash", "escape")
            assert len(stage.workers()) == 5
            assert not stage.app.query_one(Input).has_focus

        Stage().play(script, size)

    @both
    def test_freeze_holds_the_picture_and_says_so(self, size: tuple[int, int]) -> None:
        async def script(stage: Stage) -> None:
            await stage.press("f")
            await stage.hears(snapshot(42, workers=[]), after_s=1.0)
            assert len(stage.workers()) == 5
            assert "FROZEN 1.0s" in stage.lines()[0]
            assert "● LIVE 0.0s" in stage.lines()[0]
            await stage.waits(12.0)
            assert "○ STALE 12s" in stage.lines()[0]
            assert "412 open 12s" in stage.text(), "its ages stand still"
            await stage.press("o")
            assert stage.workers()[0] == "mac-mini", "what is frozen may be looked through"
            await stage.press("f")
            assert stage.workers() == []
            assert "FROZEN" not in stage.text()

        Stage().play(script, size)

    def test_many_workers_scroll_with_the_mark(self) -> None:
        async def script(stage: Stage) -> None:
            crew = [worker(f"w{n:03}") for n in range(200)]
            await stage.hears(snapshot(42, workers=crew), after_s=1.0)
            assert ">w000" in stage.text()
            assert "1-8 of 200, by id" in stage.text()
            await stage.press(*["pagedown"] * 5, "down")
            assert ">w051" in stage.text()
            assert "45-52 of 200" in stage.text()
            assert "mac-mini (attic)" in stage.text(), "events keep their place"

        Stage().play(script)

    def test_mouse_marks_a_worker(self) -> None:
        async def script(stage: Stage) -> None:
            line = next(n for n, line in enumerate(stage.lines()) if "rtx-home ◐" in line)
            await stage.pilot.click("Canvas", offset=(5, line))
            assert ">rtx-home" in stage.text()
            await stage.pilot.click("Canvas", offset=(5, 0))
            assert ">rtx-home" in stage.text()

        Stage().play(script)


class TestPages:
    @both
    @pytest.mark.parametrize("back", ["escape", "q", "question_mark"])
    def test_help_lists_every_key(self, size: tuple[int, int], back: str) -> None:
        async def script(stage: Stage) -> None:
            await stage.press("question_mark")
            for key in keys_for(readonly=False, replay=False):
                assert not key.sign or f" {key.sign}  {key.told}" in stage.text()
            assert "LATE to 10 s" in stage.text()
            matches(f"top_help_{size[0]}x{size[1]}.txt", stage.lines())
            await stage.press(back)
            assert "remove the marked worker" not in stage.text()
            assert stage.app.is_running

        Stage().play(script, size)

    @both
    def test_details_of_the_marked_worker(self, size: tuple[int, int]) -> None:
        async def script(stage: Stage) -> None:
            crew = [worker("odd", extra={"gpu": "RTX 4090", "note": "[bold]x"}, loss=None)]
            await stage.hears(snapshot(42, workers=crew), after_s=1.0)
            await stage.press("enter")
            for shown in (
                "Worker odd",
                "host-of-odd, 4242",
                "RTX 4090",
                "[bold]x",
                "411, 0 rejected",
            ):
                assert shown in stage.text()
            await stage.press("escape")
            assert "RTX 4090" not in stage.text()

        Stage().play(script, size)

    @pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
    def test_quits(self, key: str) -> None:
        async def script(stage: Stage) -> None:
            await stage.press(key)
            assert not stage.app.is_running

        Stage().play(script)

    def test_ctrl_c_quits_out_of_a_dialog(self) -> None:
        async def script(stage: Stage) -> None:
            await stage.press("l", "ctrl+c")
            assert not stage.app.is_running

        Stage().play(script)


def test_small_window_says_what_it_needs() -> None:
    async def script(stage: Stage) -> None:
        assert "60x12 is too small: diloco-top needs 80x24" in stage.text()
        await stage.pilot.resize_terminal(80, 24)
        await stage.until(lambda: len(stage.lines()) == 24)
        await stage.sees("q Quit")
        assert "too small" not in stage.text()

    Stage().play(script, (60, 12))


def test_names_of_strangers_are_only_text() -> None:
    async def script(stage: Stage) -> None:
        name = "a\x1b[2J[red]\nb"
        events: list[dict[str, Any]] = [
            {"sequence": 1, "text": "x\r\x1b]0;y\x07", "level": "error"}
        ]
        news = snapshot(42, workers=[worker(name, host="\x1b[1m", state="\x07")], events=events)
        await stage.hears(news, after_s=1.0)
        await stage.press("k")
        assert "\x1b" not in stage.text()
        assert "a?[2J[red]?b" in stage.text()
        await stage.press("n", "enter")
        assert "\x1b" not in stage.text()

    Stage().play(script)


def test_bare_snapshot_is_drawn() -> None:
    async def script(stage: Stage) -> None:
        await stage.hears(parse_snapshot(b'status {"feed": 1, "sequence": 1, "epoch": "a0"}'))
        assert "no run yet" in stage.text()
        assert "no workers yet" in stage.text()

    Stage().play(script, fill=False)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=SIZE_NAMES)
def test_failing_checkpoint_is_red(size: tuple[int, int]) -> None:
    async def script(stage: Stage) -> None:
        saved = {"folder": "/d", "round": 400, "age_s": 70.0, "error": "No space left on device"}
        await stage.hears(snapshot(42, checkpoint=saved), after_s=1.0)
        assert "NOT SAVED: No space left" in stage.text()
        assert "no checkpoint can be written" in stage.text()
        await stage.hears(snapshot(43, checkpoint=None), after_s=1.0)
        assert "no save folder" in stage.text()

    Stage().play(script, size)
