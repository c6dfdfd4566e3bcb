"""Workers that died or never came: the run is degraded, and displays keep the dead. Core to displays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco_broker import Broker
from diloco_broker.cli.app import app
from diloco_broker.cli.status_text import as_text
from diloco_protocol.feed import parse_snapshot
from diloco_protocol.messages import Leave
from diloco_protocol.monitor.verdict import Verdict, verdict_on
from kit.core_harness import Puppet, Stage, a_round, a_run, a_stage
from kit.exporter_scrapes import exported
from kit.feed_snapshots import frame
from kit.restarts import a_saved_run, next_life
from kit.top_screen import LARGE, shown
from kit.top_text import drawn
from kit.whole_run import make_config

DAY_S = 86_400


def verdict(stage: Stage) -> Verdict:
    return verdict_on(parse_snapshot(frame(stage.shown())))


def fails(last: Puppet) -> None:
    last.sends(Leave(last.token(), "its training ended with an error"))


@pytest.mark.parametrize("options", [{}, {"mode": "async"}, {"quorum": 1}], ids=str)
@pytest.mark.parametrize("goes", [Puppet.dies, fails], ids=["killed", "failed"])
def test_run_is_degraded_until_a_dead_worker_is_back(
    options: dict[str, Any], goes: Callable[[Puppet], None]
) -> None:
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


def test_who_left_properly_or_was_kicked_is_not_missed() -> None:
    stage, (_, b, _) = a_run("a", "b", "c")
    b.leaves()
    assert verdict(stage).word == "healthy"
    stage.kicks("c")
    assert verdict(stage).word == "healthy"


def test_another_worker_takes_the_place_of_a_dead_one() -> None:
    stage, (_, b) = a_run("a", "b")
    b.dies()
    stage.worker("c").joins()
    assert verdict(stage).word == "healthy"
    assert stage.shown()["dead"] == []


def test_operator_kicks_a_dead_worker_to_say_that_it_will_not_come_back() -> None:
    stage, (_, b) = a_run("a", "b")
    b.dies()
    assert stage.kicks("b").ok
    assert verdict(stage).word == "healthy"
    assert not stage.kicks("b").ok


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
    stage.now += 2 * DAY_S
    a.beats(3)
    stage.passes(1.0)
    assert stage.shown()["dead"] == []


# Who comes back, and whose place another worker takes.


def test_worker_that_left_and_rejoins_does_not_replace_a_dead_one() -> None:
    stage, (a, b) = a_run("a", "b")
    a.dies()
    b.leaves()
    stage.worker("b").joins()
    found = verdict(stage)
    assert found.word == "degraded" and "a is dead" in found.reasons[0]
    assert stage.shown()["counts"]["due"] == 2
    stage.worker("a").joins()
    assert verdict(stage).word == "healthy"


def test_worker_that_leaves_to_join_anew_does_not_replace_a_dead_one() -> None:
    """It had not trained in this session, so nothing says that it died."""
    stage, (a, b) = a_run("a", "b")
    a.dies()
    b.leaves()
    again = stage.worker("b").joins()
    again.sends(Leave(again.token(), "to join anew"))
    assert stage.shown()["counts"]["due"] == 2
    stage.worker("b").joins()
    assert "a is dead" in verdict(stage).reasons[0]


def test_restart_before_round_one_is_waiting_once_the_dead_worker_is_back() -> None:
    stage = a_stage(workers=3)
    _, b = stage.joined("a", "b")
    b.dies()
    assert verdict(stage).word == "degraded"
    stage.worker("b").joins()
    assert verdict(stage).word == "waiting"


# After a restart of the broker.


def test_worker_that_left_before_a_restart_is_not_missed_after_it() -> None:
    crashed = a_saved_run("a", "b", rounds=1, min_workers=1)
    crashed.puppets["b"].leaves()
    a_round([crashed.puppets["a"]], 1)
    stage, (a,) = next_life(crashed, "a")
    stage.passes(0.2)
    a_round([a], 2)
    assert verdict(stage).word == "healthy"
    stage.worker("b").joins()
    assert stage.shown()["counts"]["due"] == 2


def test_worker_that_died_before_a_restart_takes_its_own_place_after_it() -> None:
    crashed = a_saved_run("a", "b", "c", rounds=1, min_workers=1)
    crashed.puppets["b"].leaves()
    crashed.puppets["c"].dies()
    a_round([crashed.puppets["a"]], 1)
    stage, _ = next_life(crashed, "a", "c")
    stage.passes(0.2)
    assert verdict(stage).word == "healthy"


# The exit code.


def test_exit_code_of_status_says_that_the_run_is_degraded() -> None:
    with Broker(make_config(workers=1)) as broker:
        ask = ["status", "--address", broker.address]
        assert CliRunner().invoke(app, ask).exit_code == 0, (
            "a run that has not begun is not degraded"
        )
        assert CliRunner().invoke(app, ["pause", "--address", broker.address]).exit_code == 0
        assert CliRunner().invoke(app, ask).exit_code == 1
