"""A past run in the full screen, and printed: `diloco-top --replay`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_tools.monitor.feed.replay import Moment
from diloco_tools.monitor.terminal.scene import SPEEDS, Player
from kit.past_runs import closed, line, start, write
from kit.top_screen import Clock, ScreenPilot, snapshot
from kit.top_text import top

BEGAN = 1_790_000_000.0


def moments(count: int = 50) -> list[Moment]:
    """A round every forty seconds."""
    return [
        Moment(BEGAN + 40 * n, replace(snapshot(n + 1), uptime_s=40.0 * n)) for n in range(count)
    ]


def history(folder: Path) -> Path:
    """Six rounds, and the end."""
    rounds = [closed(BEGAN + 40 * n, n - 1, "a100-0", loss=3.1 - n / 10) for n in range(1, 7)]
    ended = line("stop", BEGAN + 300, text="SIGTERM")
    return write(folder / "history.jsonl", start(BEGAN), *rounds, ended)


class TestPlayer:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def player(self, clock: Clock) -> Player:
        return Player(moments(), clock)

    def test_plays_as_time_passes_and_stops_at_the_end(self, player: Player, clock: Clock) -> None:
        assert player.speed == 5
        began = clock.now
        for after_s, index, playing in (
            (0.0, 0, True),
            (0.1, 0, True),
            (1.0, 5, True),
            (1.3, 6, True),
            (60.0, 49, False),
        ):
            clock.now = began + after_s
            player.tick()
            assert (player.index, player.playing) == (index, playing)
        player.toggle()
        assert (player.index, player.playing) == (0, True), "at the end, from the beginning"

    def test_stops_goes_on_and_steps(self, player: Player, clock: Clock) -> None:
        player.toggle()
        clock.now += 100.0
        player.tick()
        assert player.index == 0
        for by, index in ((3, 3), (-1, 2), (-10, 0)):
            player.step(by)
            assert player.index == index
        player.last()
        assert player.index == 49
        player.first()
        player.toggle()
        clock.now += 0.2
        player.tick()
        assert player.index == 1

    @pytest.mark.parametrize(("by", "bound"), [(1, SPEEDS[-1]), (-1, SPEEDS[0])])
    def test_speeds_have_bounds(self, player: Player, by: int, bound: int) -> None:
        for _ in range(20):
            player.faster(by)
        assert player.speed == bound

    def test_curves_are_the_same_from_either_side(self, clock: Clock) -> None:
        forth, back = Player(moments(), clock), Player(moments(), clock)
        for _ in range(30):
            forth.step(1)
            forth.scene("")
        back.last()
        back.scene("")
        back.step(-19)
        scenes = [player.scene("") for player in (forth, back)]
        for scene in scenes:
            rounds = [closed.number for _, closed in scene.series.rounds]
            assert scene.model.snapshot == forth.moments[30].snapshot
            assert rounds == [371 + n for n in range(31)]
            assert scene.series.cpu is not None


class TestScreen:
    @pytest.fixture
    def pilot(self, request: pytest.FixtureRequest) -> ScreenPilot:
        options = {"fill": False, "address": "run/history.jsonl", **getattr(request, "param", {})}
        clock = Clock()
        return ScreenPilot(**options, clock=clock, player=Player(moments(), clock))

    async def test_keys_go_through_the_history(self, pilot: ScreenPilot) -> None:
        for keys, head in (
            ((), "run 3fa2c1d0  151M  sync"),
            ((), "REPLAY 21 Sep 2026 14:13:20 UTC  1/50 ▶ x5"),
            (("space",), "1/50 stopped"),
            (("right", "right"), "REPLAY 21 Sep 2026 14:14:40 UTC  3/50 stopped"),
            (("left",), "2/50"),
            (("shift+right",), "12/50"),
            (("shift+left", "end"), "50/50"),
        ):
            await pilot.press(*keys)
            assert head in pilot.lines()[0]
        await pilot.press("home")
        assert "1/50" in pilot.lines()[0]
        await pilot.press("plus", "minus", "minus", "space")
        assert "▶ x2" in pilot.lines()[0]
        pilot.clock.now += 2.0
        await pilot.until(lambda: "5/50" in pilot.lines()[0])

    async def test_nothing_can_be_steered(self, pilot: ScreenPilot) -> None:
        assert "Kick" not in pilot.text()
        await pilot.steers_nothing("A history cannot be steered.")


class TestPrinted:
    def test_once_prints_the_end(self, tmp_path: Path) -> None:
        path = history(tmp_path)
        result = top("--replay", str(path))
        assert "round 5" in result.stdout
        assert "loss 2.500" in result.stdout
        assert "The broker stopped: SIGTERM" in result.stdout
        assert "history.jsonl  run 3fa2c1d0  1k  sync" in result.stdout

    def test_json_follow_prints_every_moment(self, tmp_path: Path) -> None:
        result = top("--replay", str(history(tmp_path)), "--json", "--follow")
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        assert len(lines) == 8
        rounds = [line["last_round"]["number"] for line in lines if line.get("last_round")]
        assert rounds == [0, 1, 2, 3, 4, 5, 5]
        assert all("monitor" in line for line in lines)

    def test_invalid_history_exits_with_2(self, tmp_path: Path) -> None:
        result = top("--replay", str(tmp_path / "history.jsonl"))
        assert result.exit_code == 2
        (sentence,) = result.stderr.splitlines()
        assert "history.jsonl" in sentence
