"""A run without workers: it has not begun, has ended, or its workers have died. Core to displays."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from diloco_broker.cli.status_text import as_text
from diloco_protocol.feed import parse_snapshot
from diloco_protocol.messages import Leave
from diloco_protocol.monitor.verdict import Verdict
from diloco_tools.monitor.feed.model import FeedModel
from kit.core_harness import Puppet, Stage, a_run, a_stage
from kit.exporter_scrapes import exported
from kit.feed_snapshots import Publisher, frame, status
from kit.top_screen import shown as screen_of
from kit.top_text import drawn, top_of

MODES = pytest.mark.parametrize("options", [{}, {"mode": "async"}], ids=["sync", "async"])


def verdict_on(news: dict[str, Any], after_s: float = 0.0) -> Verdict:
    model = FeedModel()
    model.update(parse_snapshot(frame(news)), 100.0)
    return model.verdict(100.0 + after_s)


def of(stage: Stage) -> tuple[str, str]:
    """The verdict's word on what the broker says now, and what it waits for."""
    said = stage.shown()
    return verdict_on(said).word, said["waiting_for"] or ""


@MODES
def test_run_has_ended_once_all_workers_are_done_until_somebody_joins(
    options: dict[str, Any],
) -> None:
    stage, (a, b) = a_run("a", "b", **options)
    a.leaves()
    assert of(stage)[0] == "healthy"
    b.leaves()
    assert of(stage) == ("ended", "for workers to join: all have left")
    assert stage.shown()["ended"] is True
    assert stage.shown()["state"] == "waiting", "as it always was: others may join"
    stage.worker("c").joins()
    assert of(stage)[0] == "healthy"
    assert stage.shown()["ended"] is False


def fails(stage: Stage, last: Puppet) -> None:
    last.sends(Leave(last.token(), "its training ended with an error"))


WENT: dict[str, Callable[[Stage, Puppet], object]] = {
    "its connection broke and it did not reconnect": lambda stage, last: last.dies(),
    "its training ended with an error": fails,
    "an operator removed it": lambda stage, last: stage.kicks("b"),
}


@pytest.mark.parametrize("how", WENT)
def test_run_whose_last_worker_did_not_finish_is_degraded(how: str) -> None:
    stage, (a, b) = a_run("a", "b")
    a.leaves()
    WENT[how](stage, b)
    word, waits = of(stage)
    assert word == "degraded" and waits.endswith(how)


def test_how_the_others_went_does_not_matter_unless_the_run_is_below_its_floor() -> None:
    stage, (a, b) = a_run("a", "b")
    b.dies()
    a.leaves()
    assert of(stage)[0] == "ended"
    stage, (a, _) = a_run("a", "b")
    stage.kicks("b")
    fails(stage, a)
    assert of(stage)[0] == "degraded"
    stage, (_, b) = a_run("a", "b", min_workers=2)
    b.leaves()
    assert of(stage)[0] == "degraded"


def test_run_that_has_not_begun_waits_and_is_degraded_once_its_workers_die() -> None:
    stage = a_stage(workers=2)
    assert of(stage) == ("waiting", "for workers to join; round one needs 2")
    (a,) = stage.joined("a")
    word, waits = of(stage)
    assert word == "waiting" and "needs 2" in waits
    a.leaves()
    assert of(stage)[0] == "waiting", "no round was made, so nothing has ended"
    stage.joined("b")[0].dies()
    assert of(stage)[0] == "degraded"


def test_broker_that_has_ended_with_its_run_is_no_end_of_a_run() -> None:
    news = status(state="waiting", ended=True, waiting_for="for workers to join: all have left")
    assert verdict_on(news).word == "ended"
    assert verdict_on(news, after_s=30.0).word == "degraded", "the broker is silent"
    full = {"folder": "run", "round": 3, "age_s": 7.0, "error": "No space left on device"}
    assert verdict_on(news | {"checkpoint": full}).word == "degraded"


ENDED = status(
    state="waiting",
    ended=True,
    waiting_for="for workers to join: all have left",
    workers=[],
    counts={"alive": 0, "participating": 0, "averaged": 3},
    checkpoint=None,
)
NOT_BEGUN = status(
    state="waiting",
    waiting_for="for workers to join; round one needs 2",
    workers=[],
    counts={},
    fragments=[],
    totals={},
    last_round=None,
    round={"number": 0, "floor": 2},
)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_displays_say_the_word(encoding: str) -> None:
    for news, word, sentence in (
        (ENDED, "ENDED", "all workers have left, after 411 rounds"),
        (NOT_BEGUN, "WAITING", "the run waits for workers to join; round one needs 2"),
    ):
        shown = (
            drawn(news, encoding=encoding),
            screen_of(news, encoding=encoding),
        )
        for text in shown:
            assert f"{word}  {sentence}" in text
            assert "DEGRADED" not in text and "HEALTHY" not in text
    assert "state       ended: all workers have left" in as_text(ENDED)


def test_ended_run_alarms_nobody_who_scrapes_it() -> None:
    seen = exported(ENDED)
    assert (seen["diloco_run_ended", ()], seen["diloco_run_healthy", ()]) == (1, 1)
    seen = exported(NOT_BEGUN)
    assert (seen["diloco_run_ended", ()], seen["diloco_run_healthy", ()]) == (0, 0)


def test_exit_code_is_0_once_all_have_left_and_1_before_it_begins(publisher: Publisher) -> None:
    result = top_of(publisher, ENDED, "--json")
    said = json.loads(result.stdout)["monitor"]
    assert (result.exit_code, said["verdict"]) == (0, "ended")
    assert said["reasons"] == ["all workers have left, after 411 rounds"]
    result = top_of(publisher, NOT_BEGUN, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["monitor"]["verdict"] == "waiting"


@pytest.mark.parametrize(
    ("news", "sentence"),
    [
        ({"totals": {"rounds": 1}}, "all workers have left, after 1 round"),
        ({"totals": {}}, "all workers have left"),
        (
            {"mode": "async", "totals": {"contributions": 9}},
            "all workers have left, after 9 pushes",
        ),
    ],
)
def test_end_says_what_was_made(news: dict[str, Any], sentence: str) -> None:
    assert verdict_on(ENDED | news).reasons == (sentence,)
