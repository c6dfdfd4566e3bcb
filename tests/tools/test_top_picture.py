"""What the full screen is drawn from: order of the table, signs, curves, any feed at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from diloco_protocol.feed import Worker
from diloco_tools.monitor.terminal.keys import KEYS, keys_for
from diloco_tools.monitor.terminal.scene import ORDERS, View
from diloco_tools.monitor.terminal.text import clipped
from kit.feed_snapshots import worker
from kit.strange_feeds import strange_feeds
from kit.top_screen import LARGE, SMALL, ScreenPilot, document, screen, shown, snapshot


@pytest.mark.parametrize(
    ("size", "many"), [((80, 24), 0), ((80, 24), 40), ((80, 31), 1), ((240, 70), 40)]
)
def test_window_is_filled_exactly(size: tuple[int, int], many: int) -> None:
    lines = shown(document(1, workers=[worker(f"w{n}") for n in range(many)]), size).splitlines()
    assert len(lines) == size[1]
    assert max(map(cell_len, lines)) <= size[0]
    assert "q Quit" in lines[-1]


def test_more_room_shows_more() -> None:
    wide = shown(document(1), (180, 40))
    for title in ("STATE", "SYNCED", "UP", "DOWN", "PUSHES", "REJ", "STEPS", "TOKENS"):
        assert title in wide
    small = shown(document(1), (80, 24))
    for title in ("WORKER", "HEALTH", "HOST", "ROUND", "INNER", "SPEED", "LOSS", "HEARD", "STALE"):
        assert title in small
    assert "TOKENS" not in small


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


def test_orders() -> None:
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


@pytest.mark.parametrize("options", [{}, {"readonly": True}, {"encoding": "ascii"}])
def test_footer_fits_80_columns(options: dict[str, Any]) -> None:
    last = shown(document(1), **options).splitlines()[-1]
    assert "q Quit" in last
    assert ("Kick" in last) is not options.get("readonly", False)


def test_no_key_means_two_things() -> None:
    for replay in (False, True):
        found = [name for key in keys_for(readonly=False, replay=replay)
                 for name in key.key.split(",")]  # fmt: skip
        twice = {name for name in found if found.count(name) > 1}
        assert not twice
    steering = {f"order('{name}')" for name in ("kick", "save", "lr", "pause", "shutdown")}
    assert {key.action for key in KEYS} >= steering
