"""The verdict on a run that lacks workers: not begun, ended or degraded; from core to displays."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco_broker import Broker
from diloco_broker.cli.app import app
from diloco_broker.cli.status_text import as_text
from diloco_protocol.feed import parse_snapshot
from diloco_protocol.messages import Leave
from diloco_protocol.monitor.verdict import Verdict
from diloco_tools.monitor.feed.model import FeedModel
from kit.core_harness import Puppet, Stage, a_round, a_run, a_stage
from kit.exporter_scrapes import exported
from kit.feed_snapshots import Publisher, frame, status
from kit.restarts import a_saved_run, next_incarnation
from kit.top_screen import LARGE, shown
from kit.top_text import drawn, top_of
from kit.whole_run import make_config


def verdict_on(news: dict[str, Any], after_s: float = 0.0) -> Verdict:
    model = FeedModel()
    model.update(parse_snapshot(frame(news)), 100.0)
    return model.verdict(100.0 + after_s)


def verdict(stage: Stage) -> Verdict:
    return verdict_on(stage.shown())


def of(stage: Stage) -> tuple[str, str]:
    """The verdict in one word, and what the run waits for."""
    return verdict(stage).word, stage.shown()["waiting_for"] or ""


@pytest.mark.parametrize("options", [{}, {"mode": "async"}], ids=["sync", "async"])
def test_run_is_ended_from_the_last_leave_to_the_next_join(options: dict[str, Any]) -> None:
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


def fails(last: Puppet) -> None:
    last.sends(Leave(last.token(), "its training ended with an error"))


@pytest.mark.parametrize(
    ("goes", "how"),
    [
        (Puppet.dies, "its connection broke and it did not reconnect"),
        (fails, "its training ended with an error"),
        (lambda last: last.stage.kicks("b"), "an operator removed it"),
    ],
    ids=["died", "failed", "kicked"],
)
def test_unfinished_last_worker_degrades(goes: Callable[[Puppet], object], how: str) -> None:
    stage, (a, b) = a_run("a", "b")
    a.leaves()
    goes(b)
    word, waits = of(stage)
    assert word == "degraded" and waits.endswith(how)


def test_how_the_others_went_does_not_matter_unless_the_run_is_below_its_floor() -> None:
    stage, (a, b) = a_run("a", "b")
    b.dies()
    a.leaves()
    assert of(stage)[0] == "ended"
    stage, (a, _) = a_run("a", "b")
    stage.kicks("b")
    fails(a)
    assert of(stage)[0] == "degraded"
    stage, (_, b) = a_run("a", "b", min_workers=2)
    b.leaves()
    assert of(stage)[0] == "degraded"


def test_run_that_has_not_begun_waits_and_is_degraded_while_a_worker_is_dead() -> None:
    stage = a_stage(workers=2)
    assert of(stage) == ("waiting", "for workers to join; round one needs 2")
    (a,) = stage.joined("a")
    word, waits = of(stage)
    assert word == "waiting" and "needs 2" in waits
    a.leaves()
    assert of(stage)[0] == "waiting", "no round was made, so nothing has ended"
    stage.joined("b")[0].dies()
    assert of(stage)[0] == "degraded"
    stage.worker("b").joins()
    assert of(stage)[0] == "waiting"


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
        for text in (drawn(news, encoding=encoding), shown(news, encoding=encoding)):
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
    ("news", "made"),
    [
        ({"totals": {"rounds": 1}}, ", after 1 round"),
        ({"totals": {}}, ""),
        ({"mode": "async", "totals": {"contributions": 9}}, ", after 9 pushes"),
    ],
)
def test_end_says_what_was_made(news: dict[str, Any], made: str) -> None:
    assert verdict_on(ENDED | news).reasons == (f"all workers have left{made}",)


# Workers that died or never came.


@pytest.mark.parametrize("options", [{}, {"mode": "async"}, {"quorum": 1}], ids=str)
@pytest.mark.parametrize("goes", [Puppet.dies, fails], ids=["killed", "failed"])
def test_death_degrades_the_run(options: dict[str, Any], goes: Callable[[Puppet], None]) -> None:
    stage, (_, b) = a_run("a", "b", **options)
    assert verdict(stage).word == "healthy"
    goes(b)
    found = verdict(stage)
    assert found.word == "degraded"
    assert len(found.reasons) == 1 and "b is dead" in found.reasons[0]
    stage.worker("b").joins()
    assert verdict(stage).word == "healthy"


def test_every_display_keeps_a_dead_worker_and_agrees_that_the_run_is_degraded() -> None:
    stage, (_, b) = a_run("a", "b")
    b.dies()
    news = stage.shown()
    for text in (as_text(news), drawn(news), shown(news, LARGE)):
        assert "DEGRADED" in text
        rows = [line.split() for line in text.splitlines()]
        assert any("b" in row and "dead" in row for row in rows), text
    seen = exported(news)
    assert seen["diloco_run_healthy", ()] == 0
    assert (seen["diloco_workers_alive", ()], seen["diloco_workers_due", ()]) == (1, 2)
    assert seen["diloco_workers", ("dead",)] == 1


def test_kicked_worker_is_not_missed_whether_it_was_alive_or_dead() -> None:
    stage, (_, b, _) = a_run("a", "b", "c")
    assert stage.kicks("c").ok
    assert verdict(stage).word == "healthy"
    b.dies()
    assert verdict(stage).word == "degraded"
    assert stage.kicks("b").ok
    assert verdict(stage).word == "healthy"
    assert not stage.kicks("b").ok


def test_new_worker_takes_the_place_of_a_dead_one() -> None:
    stage, (_, b) = a_run("a", "b")
    b.dies()
    stage.worker("c").joins()
    assert verdict(stage).word == "healthy"
    assert stage.shown()["dead"] == []


def test_run_that_goes_on_with_fewer_workers_than_it_was_told_is_degraded() -> None:
    stage, _ = a_run("a", "b", mode="async", workers=3)
    found = verdict(stage)
    assert found.word == "degraded" and found.reasons[0].startswith("2 of 3 workers")
    assert stage.asks("set", workers=2).ok
    assert verdict(stage).word == "healthy"


def test_dead_worker_is_not_missing_once_the_run_is_over() -> None:
    stage, (a, b, c) = a_run("a", "b", "c", max_rounds=2)
    c.dies()
    assert verdict(stage).word == "degraded"
    for number, puppet in enumerate((a, b)):
        puppet.pushes(100 + number)
    assert stage.shown()["end"]["is_over"]
    a.leaves()
    assert verdict(stage).word == "healthy"


@pytest.mark.slow
def test_deaths_on_record_are_bounded_in_number_and_time() -> None:
    stage, (a, *others) = a_run(*(f"w{number:03}" for number in range(130)))
    for each in others:
        each.dies()
        a.beats(2)
    dead = [each["id"] for each in stage.shown()["dead"]]
    assert dead == [each.worker_id for each in others[-100:]]
    stage.now += 2 * 86_400  # days
    a.beats(3)
    stage.passes(1.0)
    assert stage.shown()["dead"] == []


def test_worker_that_left_and_rejoins_does_not_replace_a_dead_one() -> None:
    stage, (a, b) = a_run("a", "b")
    a.dies()
    b.leaves()
    again = stage.worker("b").joins()
    found = verdict(stage)
    assert found.word == "degraded" and "a is dead" in found.reasons[0]
    assert stage.shown()["counts"]["due"] == 2
    again.sends(Leave(again.token(), "to join anew"))  # it has not trained in this session
    assert stage.shown()["counts"]["due"] == 2
    stage.worker("b").joins()
    assert "a is dead" in verdict(stage).reasons[0]
    stage.worker("a").joins()
    assert verdict(stage).word == "healthy"


# After a restart of the broker.


def test_restart_misses_only_workers_that_have_not_left() -> None:
    crashed = a_saved_run("a", "b", "c", rounds=1, min_workers=1)
    crashed.puppets["b"].leaves()
    crashed.puppets["c"].dies()
    a_round([crashed.puppets["a"]], 1)
    stage, (a, c) = next_incarnation(crashed, "a", "c")
    stage.passes(0.2)
    assert verdict(stage).word == "healthy", "c has its own place again"
    a_round([a, c], 2)
    assert verdict(stage).word == "healthy"
    stage.worker("b").joins()
    assert stage.shown()["counts"]["due"] == 3


def test_exit_code_of_status_says_that_the_run_is_degraded() -> None:
    with Broker(make_config(workers=1)) as broker:
        ask = ["status", "--address", broker.address]
        assert CliRunner().invoke(app, ask).exit_code == 0, "not begun is not degraded"
        assert CliRunner().invoke(app, ["pause", "--address", broker.address]).exit_code == 0
        assert CliRunner().invoke(app, ask).exit_code == 1
