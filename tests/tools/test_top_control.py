"""Steering from the full screen: what is asked before, what is sent, and what changes the table."""

import threading

import pytest

from diloco_protocol.clients import Answer
from diloco_protocol.monitor.fields import confirmed_by
from diloco_tools.monitor.orders import kick, orders, wrong
from kit.feed_snapshots import worker
from kit.top_screen import CREW, ScreenPilot, screen, snapshot

CONTROL = "tcp://127.0.0.1:8512"  # the feed of the pilot names it


@pytest.mark.parametrize(
    ("opened", "title", "ways"),
    [
        # Enter and x are no answer.
        (("k", "enter", "x"), "Kick a100-0", [("n",), ("escape",), ("q",)]),
        (("l", *"0.5"), "Outer learning rate", [("escape",)]),
        (("S", *"3fa2c1d0"), "End the run?", [("escape",)]),
    ],
)
async def test_dialog_may_be_left_at_any_point_and_sends_nothing(
    pilot: ScreenPilot, opened: tuple[str, ...], title: str, ways: list[tuple[str, ...]]
) -> None:
    for keys in ways:
        await pilot.press(*opened)
        assert title in pilot.text()
        await pilot.press(*keys)
        assert title not in pilot.text()
    assert pilot.app.is_running
    assert not pilot.broker.requests


class TestKick:
    async def test_states_the_consequence_and_sends_the_kick(self, pilot: ScreenPilot) -> None:
        """The table changes only when the feed says so."""
        pilot.broker.answer = Answer(True, "rtx-home was removed.")
        await pilot.press("down", "down", "down", "k")
        assert pilot.shows(
            "Kick rtx-home on desk?",
            "does not rejoin by itself.",
            "Its 212 steps since its last push are lost.",
            "3 workers remain.",
        )
        assert not pilot.broker.requests
        await pilot.press("y")
        await pilot.sees("rtx-home was removed.")
        assert pilot.broker.requests == [(CONTROL, "kick", {"worker": "rtx-home"})]
        await pilot.waits(0.5)
        await pilot.hears(snapshot(42), after_s=0.5)
        assert "rtx-home" in pilot.workers(), "the feed still has it"
        rest = [each for each in CREW if each["id"] != "rtx-home"]
        await pilot.hears(snapshot(43, workers=rest), after_s=1.0)
        assert pilot.workers() == ["a100-0", "a100-1", "mac-mini", "xeon"]

    async def test_kicks_whom_it_names_though_the_table_moves(self, pilot: ScreenPilot) -> None:
        await pilot.press("k")
        await pilot.hears(snapshot(42, workers=list(CREW[1:])), after_s=1.0)
        await pilot.press("y")
        await pilot.until(lambda: bool(pilot.broker.requests))
        assert pilot.broker.requests[0][2] == {"worker": "a100-0"}

    def test_warns_when_the_round_would_wait(self) -> None:
        floor = {"number": 1, "floor": 2, "expected": ["a", "b"]}
        news = snapshot(1, counts={"alive": 2}, round=floor)
        said = kick(news.workers[0], news).text
        assert "1 worker remains. The round needs 2: the run will wait for workers" in said
        lost = next(w for w in news.workers if w.health == "lost")
        assert "2 workers remain." in kick(lost, news).text


class TestSave:
    async def test_saves_and_says_what_the_broker_said(self, pilot: ScreenPilot) -> None:
        pilot.broker.answer = Answer(False, "word " * 40 + "end")
        await pilot.press("s")
        await pilot.sees("word end")
        assert pilot.flat().count("word ") == 40, "a long answer is shown whole"
        assert "q Quit" in pilot.lines()[-1]
        assert pilot.broker.requests == [(CONTROL, "save", {})]


class TestOuterLearningRate:
    async def test_old_and_new_are_shown_before_it_is_sent(self, pilot: ScreenPilot) -> None:
        pilot.broker.answer = Answer(True, "Outer learning rate 0.7 -> 0.5 from version 413.")
        await pilot.press("l")
        assert pilot.shows("Outer learning rate", "Currently 0.7.", "0.7 → ?")
        await pilot.press(*"0.5")
        assert not pilot.broker.requests
        await pilot.press("enter")
        await pilot.sees("Outer learning rate 0.7 -> 0.5 from version 413.")
        assert pilot.broker.requests == [(CONTROL, "set", {"outer_lr": 0.5})]
        assert "lr 0.7," in pilot.text(), "the feed has not said so yet"

    async def test_what_is_no_rate_goes_nowhere(self, pilot: ScreenPilot) -> None:
        for typed in ("", "x", "0", "-1", "nan", "inf", "1e999"):
            assert wrong(orders(snapshot())["lr"], typed)
        await pilot.press("l", *"-1", "enter")
        assert "'-1' is not a number above 0" in pilot.text()
        await pilot.press("escape")
        assert not pilot.broker.requests


class TestPause:
    async def test_pause_is_asked_and_resume_is_not(self, pilot: ScreenPilot) -> None:
        await pilot.press("p")
        assert "Pause the run?" in pilot.text()
        assert "wait there" in pilot.flat()
        await pilot.press("n")
        assert not pilot.broker.requests
        await pilot.press("p", "y")
        await pilot.sees("It was done.")
        assert pilot.broker.requests == [(CONTROL, "pause", {})]
        news = snapshot(42, state="paused", paused_for_s=5.0)
        await pilot.hears(news, after_s=1.0)
        assert "paused for 5.0 s" in pilot.text()
        assert "the run is paused" in pilot.text()
        await pilot.press("p")
        await pilot.until(lambda: len(pilot.broker.requests) == 2)
        assert pilot.broker.requests[1] == (CONTROL, "resume", {})


class TestShutdown:
    async def test_wants_the_name_of_the_run(self, pilot: ScreenPilot) -> None:
        await pilot.press("S", "escape", "ctrl+x")
        assert pilot.shows("End the run?", "saves to /data/run", "Type 3fa2c1d0 and press")
        await pilot.press(*"yes", "enter")
        assert "not sent" in pilot.text()
        assert not pilot.broker.requests
        await pilot.press(*["backspace"] * 3, *"3fa2c1d0", "enter")
        await pilot.sees("It was done.")
        assert pilot.broker.requests == [(CONTROL, "shutdown", {})]

    def test_says_what_is_kept_and_has_a_word_to_type_without_a_run(self) -> None:
        for news, said in (
            (snapshot(1, checkpoint=None), "saves NOTHING"),
            (snapshot(1, checkpoint={"folder": "/x"}), "saves to /x,"),
            (None, "if it has a save folder"),
        ):
            assert said in orders(news)["shutdown"].text
        words = [confirmed_by(news) for news in (snapshot(1, run=None), None)]
        assert words == ["shutdown", "shutdown"]


class TestNoControl:
    @screen({"readonly": True})
    async def test_readonly_changes_nothing_and_says_so(self, pilot: ScreenPilot) -> None:
        assert "readonly" in pilot.lines()[0]
        assert "Kick" not in pilot.text() and "Shutdown" not in pilot.text()
        await pilot.steers_nothing("--readonly")

    @screen({"fill": False})
    async def test_without_a_known_address_it_says_so(self, pilot: ScreenPilot) -> None:
        await pilot.steers_nothing("give --server ADDR")


class TestRequests:
    async def test_the_screen_goes_on_while_the_broker_thinks(self, pilot: ScreenPilot) -> None:
        pilot.broker.is_free.clear()
        await pilot.press("s")
        await pilot.sees("save: waiting for tcp://127.0.0.1:8512")
        await pilot.hears(snapshot(42, workers=[worker("xeon")]), after_s=1.0)
        assert pilot.workers() == ["xeon"]
        await pilot.press("s")
        assert "Still waiting for the answer to save" in pilot.text()
        assert len(pilot.broker.requests) == 1
        pilot.broker.is_free.set()
        await pilot.sees("It was done.")
        await pilot.press("s")
        await pilot.until(lambda: len(pilot.broker.requests) == 2)

    def test_quitting_does_not_wait_for_an_answer(self) -> None:
        pilot = ScreenPilot()
        pilot.broker.is_free.clear()

        async def script() -> None:
            await pilot.press("s", "q")
            assert not pilot.app.is_running

        try:
            pilot.play(script)
        finally:
            pilot.broker.is_free.set()
        for thread in threading.enumerate():
            if thread.name == "control":
                thread.join(20)

    @screen({"control": "tcp://tunnel:9"})
    async def test_another_control_address_may_be_given(self, pilot: ScreenPilot) -> None:
        await pilot.press("s")
        await pilot.until(lambda: bool(pilot.broker.requests))
        assert pilot.broker.requests[0][0] == "tcp://tunnel:9"
