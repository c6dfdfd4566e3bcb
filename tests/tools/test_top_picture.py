"""What the full screen is drawn from, piece by piece: no terminal, no event loop."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from diloco_protocol.feed import Worker
from diloco_tools.monitor.feed.series import RunSeries
from diloco_tools.top.drawing.full_screen import Picture
from diloco_tools.top.drawing.keys import KEYS, footer, keys_for
from diloco_tools.top.drawing.notation import Glyphs
from diloco_tools.top.drawing.scene import ORDERS, Said, View
from diloco_tools.top.drawing.sheet import Sheet, beside
from kit.feed_snapshots import worker
from kit.strange_feeds import strange_feeds
from kit.top_screen import document, snapshot
from kit.top_screen import full_screen as drawn

UTF8, ASCII = Glyphs.for_encoding("utf-8"), Glyphs.ascii()


def text_of(made: Picture) -> str:
    return "\n".join(line.plain for line in made.lines)


class TestPicture:
    @pytest.mark.parametrize("size", [(80, 24), (80, 31), (100, 32), (140, 40), (240, 70)])
    def test_fills_every_window_exactly(self, size: tuple[int, int]) -> None:
        for many in (0, 1, 5, 40):
            crew = [worker(f"w{n}") for n in range(many)]
            for said in ("", "It was done.", "word " * 60):
                news = document(1, workers=crew)
                lines = drawn(news, *size, said=Said(said)).lines
                assert len(lines) == size[1]
                assert max(line.cell_len for line in lines) <= size[0]
                assert "q Quit" in lines[-1].plain

    def test_more_room_shows_more(self) -> None:
        crew = [worker(f"w{n:02}") for n in range(40)]
        shown = [drawn(document(1, workers=crew), 140, height).shown for height in (24, 40, 70)]
        assert shown == sorted(set(shown))
        wide = text_of(drawn(document(1), 150, 40))
        for title in ("STATE", "SPEED", "SYNC", "SENT", "GOT", "PUSHES", "REJ", "STEP", "TOKENS"):
            assert title in wide

    def test_line_tells_its_worker(self) -> None:
        made = drawn(document(1))
        by_line = {n: made.worker_at(n) for n in range(24)}
        named = {n: name for n, name in by_line.items() if name is not None}
        assert list(named.values()) == ["a100-0", "a100-1", "mac-mini", "rtx-home", "xeon"]
        for n, name in named.items():
            assert name in made.lines[n].plain

    @given(
        news=strange_feeds(),
        size=st.sampled_from([(20, 5), (80, 24), (100, 33), (140, 40)]),
        glyphs=st.sampled_from([UTF8, ASCII, Glyphs.for_encoding("latin-1")]),
        view=st.builds(View, order=st.integers(0, len(ORDERS) - 1), reverse=st.booleans()),
    )
    def test_whatever_the_feed_says_fits(
        self, news: dict[str, Any], size: tuple[int, int], glyphs: Glyphs, view: View
    ) -> None:
        lines = drawn(news, *size, glyphs=glyphs, view=view).lines
        assert len(lines) == size[1]
        assert max(line.cell_len for line in lines) <= max(size[0], 80)
        "\n".join(line.plain for line in lines).encode(glyphs.encoding)
        assert all(line.plain.isprintable() for line in lines)


class TestTable:
    def test_a_long_name_leaves_room_for_all_that_is_essential(self) -> None:
        crew = [worker("mac-mini-of-the-second-floor", host="mac.second.floor.example.org")]
        text = text_of(drawn(document(1, workers=crew)))
        titles = r"WORKER +HEALTH +HOST .*ROUND +INNER/H +ST/S .*LOSS +BEAT .*OLD +TX/S +RX/S"
        assert re.search(titles, text)
        assert re.search(r"mac\S*…\S*floor", text)

    def test_mark_goes_to_the_neighbour_of_a_worker_that_left(self) -> None:
        view = View(marked="b")
        crew = [Worker(name) for name in "abc"]
        assert view.settle(view.rows(crew), 5) == 1
        assert view.settle(view.rows([crew[0], crew[2]]), 5) == 1
        assert view.marked == "c"
        assert view.settle(view.rows([crew[0]]), 5) == 0
        assert view.marked == "a"
        assert view.settle([], 5) == -1
        assert view.marked is None

    def test_window_follows_the_mark(self) -> None:
        view = View()
        rows = [Worker(f"w{n}") for n in range(10)]
        view.settle(rows, 3)
        for by, offset in ((2, 0), (1, 1), (6, 7), (-1, 7), (-2, 6), (-9, 0)):
            view.move(by, rows)
            view.settle(rows, 3)
            assert view.offset == offset, (by, view.marked)

    def test_orders(self) -> None:
        crew = [
            Worker("a", health="ok", round=5, steps_per_s=2.0, loss=1.0, beat_age_s=1.0),
            Worker("b", health="lost", round=None, steps_per_s=None, loss=math.nan, staleness=2),
            Worker("c", health="odd", round=4, steps_per_s=1.0, loss=2.0, bytes_up=9, host="A"),
            Worker("d", health="slow", round=4, steps_per_s=3.0, loss=None, beat_age_s=9.0),
        ]
        found = ["".join(w.id for w in View(order=n).rows(crew)) for n in range(len(ORDERS))]
        assert found == ["abcd", "bdca", "abdc", "bcda", "bcad", "cabd", "dabc", "bacd", "cabd"]


class TestNotation:
    def test_sparkline_spans_its_values(self) -> None:
        assert UTF8.chart([1, 2, 3, 4, 5, 6, 7, 8], 8)[0] == "▁▂▃▄▅▆▇█"
        assert UTF8.chart([1, 2, 3, 4, 5, 6, 7, 8], 3)[0] == "▁▅█"
        assert ASCII.chart([0, 1], 4)[0] == "_#  "
        assert UTF8.chart([5.0, 5.0], 3)[0] == "▄▄ "
        assert UTF8.chart([1.0, None, math.nan, 2.0], 4)[0] == "▁  █"
        assert UTF8.chart([0.0, 0.0], 2)[0] == "▁▁"
        assert UTF8.chart([], 3)[0] == "   "
        assert UTF8.chart([-1.7e308, 1.7e308], 2)[0] == "▁█"
        assert UTF8.chart([0.0, 5e-324], 2)[0] == "▅▅", "no room between the two"

    def test_curve_of_several_lines_stacks(self) -> None:
        assert UTF8.chart([0, 7, 8, 15], 4, 2) == ["  ▁█", "▁███"]
        assert UTF8.chart([0.0, None], 3, 2) == ["   ", "▁  "]

    def test_values_beyond_a_scale_leave_a_sign(self) -> None:
        assert UTF8.chart([99.0, 1.0, 8.0, -99.0], 4, 1, (1.0, 8.0)) == ["↑▁█↓"]
        assert UTF8.chart([99.0, 0.0, 15.0], 3, 2, (0.0, 15.0)) == ["↑ █", "█▁█"]
        assert ASCII.chart([1e308, 0.0, 1.0, -1e308], 4, 1, (0.0, 1.0)) == ["^_#v"]

    @pytest.mark.parametrize("glyphs", [UTF8, ASCII])
    def test_first_round_does_not_flatten_the_curve(self, glyphs: Glyphs) -> None:
        """A loss of 10.8, and then the ones that people want to see."""
        losses = [10.8, 5.5] + [3.0 - 0.02 * n for n in range(10)]
        series = RunSeries()
        for number, loss in enumerate(losses, start=1):
            closed = {"number": number, "seconds": 40.0, "loss": loss}
            series.update(snapshot(number, last_round=closed), float(number))
        news = document(99, last_round=closed)
        small = text_of(drawn(news, 80, 24, glyphs=glyphs, series=series))
        curve = re.search(r"loss [\d.]+ (\S+)", small)
        assert curve is not None
        assert curve[1].startswith(glyphs.above * 2), (
            "the first two are off the scale, and it says so"
        )
        assert len(set(curve[1][-6:])) >= 4, "the others are told apart"
        large = text_of(drawn(news, 140, 40, glyphs=glyphs, series=series))
        assert f"loss 2.820  2.820 to 3.000{glyphs.above}" in large

    def test_chosen_ascii_has_no_other_sign(self) -> None:
        text = text_of(drawn(document(1), 140, 40, glyphs=ASCII))
        assert text.isascii()


class TestLines:
    def test_parts_fit_or_a_sign_stands_for_them(self) -> None:
        parts = [Text("one"), Text("two"), Text("three")]
        shown = [Sheet(width, UTF8).row("row", parts).plain for width in (26, 24, 19, 15)]
        assert shown == [
            "row       one  two  three",
            "row       one  two …",
            "row       one …",
            "row       one …",
        ]

    def test_ends_stand_apart_and_the_right_one_is_whole(self) -> None:
        for width in range(8, 30):
            line = Sheet(width, UTF8).apart(Text("a long beginning"), Text("the end")).plain
            assert cell_len(line) == width
            assert line.endswith("the end")

    def test_blocks_stand_side_by_side(self) -> None:
        left, right = [Text("a"), Text("bb")], [Text("ccc")]
        lines = beside([(left, 3), (right, 3)])
        assert [line.plain for line in lines] == ["a    ccc", "bb"]


class TestKeys:
    @pytest.mark.parametrize("readonly", [False, True])
    @pytest.mark.parametrize("replay", [False, True])
    @pytest.mark.parametrize("glyphs", [UTF8, ASCII])
    def test_footer_fits_80_columns(self, readonly: bool, replay: bool, glyphs: Glyphs) -> None:
        keys = keys_for(readonly=readonly, replay=replay)
        for width in (80, 100, 140):
            for paused in (False, True):
                line = footer(keys, width, glyphs, paused=paused, frozen=paused)
                assert line.cell_len <= width
        assert ("Kick" in line.plain) is not (readonly or replay)

    def test_no_key_means_two_things(self) -> None:
        for replay in (False, True):
            keys = keys_for(readonly=False, replay=replay)
            names = [name for key in keys for name in key.names.split(",")]
            assert len(names) == len(set(names))
        steering = {"kick", "save", "rate", "pause", "shutdown", "freeze"}
        assert {key.action for key in KEYS} >= steering
