"""What an operator may change while a run goes on, and from which version it holds: the core alone."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_broker.core.effects import End
from diloco_broker.core.events import Stop
from diloco_broker.core.state.update import Phase
from diloco_protocol.feed import OuterGroup
from diloco_protocol.messages import Notice
from kit.core_harness import Puppet, Stage, a_run, a_stage


def closing() -> tuple[Stage, Puppet]:
    """Round zero of one worker, of which nothing has been stepped yet."""
    stage = a_stage(workers=1, chunks=3, by_hand=True)
    worker = stage.worker("a").joins()
    worker.donates()
    stage.work()
    worker.pulls()
    worker.pushes(1)
    while stage.round.phase is Phase.OPEN:
        stage.work(1)
    return stage, worker


def test_set_says_what_changes_and_from_which_version() -> None:
    stage, _ = a_run("a")
    assert stage.version().counter == 1
    result = stage.asks("set", outer_lr=0.5, who="ann@desk")
    assert result.ok
    assert "Outer learning rate 0.7 -> 0.5 from version 2." in result.text
    assert result.data["changes"] == [{"name": "outer_lr", "before": 0.7, "after": 0.5}]
    assert [config.outer_lr for config in stage.tensors.tunes] == [0.5]
    (act,) = stage.acts
    assert (act.who, act.what, act.before, act.after) == ("ann@desk", "set outer_lr", 0.7, 0.5)
    assert stage.logs[-1] == "ann@desk (unproven): outer learning rate 0.7 -> 0.5 from version 2."


def test_version_that_is_being_made_is_finished_with_the_old_setting() -> None:
    stage, _ = closing()
    assert stage.tensors.queue, "some of its chunks have not been stepped yet"
    result = stage.asks("set", outer_lr=0.5)
    assert "from version 2" in result.text
    assert not stage.tensors.tunes
    assert stage.state.config.outer_lr == 0.7
    stage.work()
    assert [config.outer_lr for config in stage.tensors.tunes] == [0.5]
    assert stage.state.config.outer_lr == 0.5


def test_changes_asked_for_while_a_version_is_made_add_up() -> None:
    stage, _ = closing()
    assert stage.asks("set", outer_lr=0.5).ok
    assert "0.5 -> 0.25" in stage.asks("set", outer_lr=0.25).text
    assert stage.asks("set", outer_momentum=0.8).ok
    stage.work()
    (config,) = stage.tensors.tunes
    assert (config.outer_lr, config.outer_momentum) == (0.25, 0.8)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"outer_lr": -1.0}, "--outer-lr is -1.0; it must be above 0, at most 10."),
        ({"outer_lr": 1e308}, "--outer-lr is 1e+308; it must be above 0, at most 10."),
        ({"sync_every": 10**9}, "--sync-every is 1000000000; it must be a whole number, from 1 to"),
        (
            {"workers": 10**9},
            "--workers is 1000000000; it must be a whole number, from 1 to 10000.",
        ),
        ({"outer_lr": float("nan")}, "--outer-lr is nan"),
        ({"outer_lr": "fast"}, "--outer-lr is fast"),
        ({"outer_lr": True}, "--outer-lr is True"),
        ({"outer_lr_schedule": "linear:10:0"}, "--outer-lr-schedule is linear:10:0; it must be"),
        ({"outer_lr_schedule": 10}, "--outer-lr-schedule is 10; it must be constant, linear:R[:F]"),
        ({"outer_momentum_warmup": "linear:10:1"}, "--outer-momentum-warmup is linear:10:1; it"),
        ({"outer_momentum_warmup": ["constant"]}, "--outer-momentum-warmup is ['constant']; it"),
        ({"outer_momentum": 1.0}, "--outer-momentum is 1.0; it must be in [0, 1)."),
        ({"workers": 0}, "--workers is 0"),
        ({"workers": [1]}, "--workers is [1]"),
        ({"save_every": 0}, "--save-every is 0"),
        ({"save_every": 2}, "saves nothing"),
        ({"grace": 1.0}, "--grace is 1.0; it must be left out, or --quorum given"),
        ({"sync_every": 2.5}, "--sync-every is 2.5; it must be a whole number"),
        ({"quorum": 1}, "settled at the start"),
        ({"mode": "async"}, "no setting named 'mode'"),
        ({"num_fragments": 3}, "what can be set while the run goes on: outer_lr"),
        ({}, "nothing to set"),
    ],
    ids=str,
)
def test_what_cannot_be_set_gets_a_sentence_and_changes_nothing(
    arguments: dict[str, Any], sentence: str
) -> None:
    stage, _ = a_run("a")
    before = stage.state.config
    result = stage.asks("set", **{"outer_momentum": 0.5, **arguments} if arguments else {})
    assert not result.ok
    assert sentence in result.text
    assert stage.state.config == before, "all of it, or nothing"
    assert not stage.tensors.tunes
    assert not stage.acts


def test_setting_what_is_set_already_is_no_action() -> None:
    stage, _ = a_run("a")
    result = stage.asks("set", outer_lr=0.7)
    assert (result.ok, "it is set to that already" in result.text) == (True, True)
    assert not stage.acts


def test_schedules_are_set_like_any_setting_and_count_from_the_beginning_of_the_run() -> None:
    stage, _ = a_run("a")
    for gradient in (2, 3):
        stage.pushes(a=gradient)
    before = stage.shown()["fragments"][0]
    assert (before["gradients"], before["lr"]) == (3, 0.7)
    assert before["momentum"] == pytest.approx(0.5 + 0.4 * 3 / 200), "the usual warm-up"
    texts = {"outer_lr_schedule": "linear:6:0.5", "outer_momentum_warmup": "linear:6"}
    result = stage.asks("set", **texts, outer_momentum=0.8)
    assert "outer learning rate's schedule constant -> linear:6:0.5" in result.text.lower()
    assert stage.tensors.tunes[-1].outer_schedule.factor(6) == 0.5
    shown = stage.shown()
    assert (shown["outer"]["lr"], shown["outer"]["momentum"]) == (0.7, 0.8), "as they were given"
    now = shown["fragments"][0]
    assert (now["lr"], now["momentum"]) == (pytest.approx(0.7 * 0.75), pytest.approx(0.4))


def test_torch_optimizer_takes_a_schedule_of_its_learning_rate_and_no_warm_up() -> None:
    stage, _ = a_run("a")
    stage.state.has_own_optimizer = True
    stage.state.outer_groups = (OuterGroup(0.1, 0.9), OuterGroup(0.1, 0.5))
    result = stage.asks("set", outer_momentum_warmup="linear:10")
    assert (result.ok, "has no warm-up" in result.text) == (False, True)
    assert stage.asks("set", outer_lr_schedule="linear:1:0.5").ok
    shown = stage.shown()
    assert (shown["fragments"][0]["lr"], shown["fragments"][0]["momentum"]) == (0.05, None)


@pytest.mark.parametrize(("momentum", "ok"), [(0.9, True), (None, False)])
def test_torch_optimizer_without_a_momentum_refuses_one(momentum: float | None, ok: bool) -> None:
    stage, _ = a_run("a")
    stage.state.has_own_optimizer = True
    stage.state.outer_groups = (OuterGroup(0.1, 0.9), OuterGroup(0.1, momentum))
    result = stage.asks("set", outer_momentum=0.5)
    assert (result.ok, "no outer momentum: 1 of its 2 groups" in result.text) == (ok, not ok)
    assert stage.asks("set", outer_lr=0.5).ok
    assert [group.lr for group in stage.state.outer_groups] == [0.5, 0.5]


def test_fewer_workers_let_round_one_begin_to_close() -> None:
    stage = a_stage(workers=3, chunks=2)
    stage.joined("a", "b")
    stage.pushes(a=1, b=2)
    assert stage.version().counter == 0, "it waits for a third"
    assert stage.asks("set", workers=2).ok
    assert stage.version().counter == 1


def test_smaller_quorum_ends_a_wait() -> None:
    stage, _ = a_run("a", "b", "c", quorum=3)
    stage.pushes(a=11, b=12)
    assert stage.version().counter == 1
    assert stage.asks("set", quorum=2).ok
    stage.passes(0.2)
    assert stage.version().counter == 2


def test_grace_can_be_set_and_the_quorum_taken_away() -> None:
    stage, (a, b) = a_run("a", "b", quorum=1, deterministic=True)
    assert stage.asks("set", grace=5.0).ok
    a.pushes(11)
    stage.passes(4.0)
    assert stage.version().counter == 1
    assert stage.asks("set", quorum=0, grace=0).ok
    assert stage.state.config.quorum is None
    stage.passes(60.0)
    assert stage.version().counter == 1, "now everybody is waited for"
    b.pushes(12)
    assert stage.version().counter == 2


def test_workers_of_an_asynchronous_run_do_not_change_the_size_of_a_buffer() -> None:
    """With two gradients in the buffer a new N would divide them by what they were not."""
    stage = a_stage(workers=4, mode="async", outer="dn")
    (a,) = stage.joined("a")
    a.pushes(1)
    assert stage.asks("set", workers=2).ok
    (config,) = stage.tensors.tunes
    assert (config.workers, config.dn_size) == (2, 4)


def test_save_every_can_be_set() -> None:
    stage, (a,) = a_run("a", save_dir="x", save_every=100)
    saved = len(stage.saves)
    a.pushes(11)
    assert len(stage.saves) == saved
    assert stage.asks("set", save_every=1).ok
    a.pushes(12)
    assert len(stage.saves) == saved + 1


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"mode": "async"}], ids=str)
def test_paused_run_makes_no_version_and_loses_nothing(options: dict[str, Any]) -> None:
    stage, _ = a_run("a", "b", **options)
    before = stage.version().counter
    result = stage.asks("pause")
    assert result.ok
    assert "workers train to their next boundary and wait there" in result.text
    stage.pushes(a=11, b=12)
    stage.passes(60.0)
    assert stage.version().counter == before
    result = stage.asks("resume")
    assert "paused for 60 s" in result.text
    assert stage.version().counter > before
    # In asynchronous mode each is a version of its own; either way both are in, once.
    for index in range(2):
        counts = stage.counted()[index]
        assert counts["a", 11] == counts["b", 12] == 1
    assert [act.what for act in stage.acts] == ["pause", "resume"]


def test_version_that_is_being_made_is_released_though_the_run_is_paused() -> None:
    stage, worker = closing()
    assert "Round 0 is being finished" in stage.asks("pause").text
    stage.work()
    assert stage.version().counter == 1
    worker.pushes(2)
    stage.work()
    assert stage.version().counter == 1


def test_death_in_a_pause_is_seen_and_changes_nothing_else() -> None:
    stage, (a, b) = a_run("a", "b", disconnect_grace=0.0)
    stage.asks("pause")
    a.pushes(11)
    b.dies()
    stage.passes(1.0)
    assert [m.worker_id for m in stage.state.members] == ["a"]
    assert stage.version().counter == 1
    stage.asks("resume")
    assert stage.version().counter == 2


def test_a_broker_that_stops_warns_that_its_pause_ends() -> None:
    stage, _ = a_run("a", "b")
    stage.asks("pause")
    stage.happens(Stop("SIGTERM", restarting=True))
    assert stage.said("pause ends")


def test_pausing_twice_and_resuming_twice_say_so() -> None:
    stage, _ = a_run("a")
    assert "not paused" in stage.asks("resume").text
    stage.asks("pause")
    assert "paused already" in stage.asks("pause").text
    stage.asks("resume")
    assert "not paused" in stage.asks("resume").text


@pytest.mark.parametrize("restarting", [False, True])
def test_shutdown_is_handed_on_with_who_asked_and_whether_the_run_is_over(restarting: bool) -> None:
    stage, (a,) = a_run("a")
    result = stage.asks("shutdown", who="ann@desk", **({"restarting": True} if restarting else {}))
    assert (result.ok, stage.ends) == (True, [End("ann@desk (unproven) asked for it", restarting)])
    assert "saves nothing" in result.text
    assert ("The run is over" in result.text) is not restarting
    assert stage.acts[-1].what == ("restart" if restarting else "shutdown")
    notices = {"shutdown", "restarting"}
    assert not [n for n in a.all(Notice) if n.what in notices], "the loop stops in its own way"


@pytest.mark.parametrize("restarting", [False, True])
def test_workers_are_told_whether_the_broker_is_coming_back(restarting: bool) -> None:
    stage, (a,) = a_run("a")
    stage.happens(Stop("it received SIGTERM", restarting))
    notice = a.got(Notice)
    wanted = "The broker restarts" if restarting else "The run is over"
    assert notice == Notice(
        "restarting" if restarting else "shutdown", f"{wanted}: it received SIGTERM."
    )
    late = stage.worker("b").joins()
    assert (late.error().code, late.error().retry) == ("stopping", True)
    assert stage.asks("shutdown", restarting=restarting).ok
    other = stage.asks("shutdown", restarting=not restarting)
    assert not other.ok
    assert "is stopping already" in other.text
    assert not stage.ends


@pytest.mark.parametrize("odd", [1, "yes", None, [True]])
def test_shutdown_that_does_not_say_which_is_refused(odd: object) -> None:
    stage, _ = a_run("a")
    result = stage.asks("shutdown", restarting=odd)
    assert (result.ok, stage.ends) == (False, [])
    assert "must be true or false" in result.text


def test_unknown_action_names_those_there_are() -> None:
    stage, _ = a_run("a")
    result = stage.asks("reboot")
    assert not result.ok
    assert "set, pause, resume, shutdown, save_all and stop_all" in result.text


def test_name_of_an_operator_is_short() -> None:
    stage, _ = a_run("a")
    stage.asks("pause", who="y" * 500)
    (act,) = stage.acts
    assert act.who == "y" * 100


def test_round_that_has_ended_is_reported_with_its_workers() -> None:
    stage, _ = a_run("a", "b")
    stage.pushes(a=11, b=12)
    report = stage.reports[-1]
    assert (report.number, report.fragment, report.version, report.averaged) == (1, 0, 2, 2)
    assert sorted(report.workers) == ["a", "b"]
    assert stage.state.totals.contributions == 4
    assert stage.state.versions[0].contributions == 4


def test_refused_work_is_counted_by_its_reason() -> None:
    stage, (a,) = a_run("a")
    a.begins(11, fragment=7)
    assert sum(stage.state.refused.values()) == stage.state.totals.rejected == 1
    (rejection,) = stage.state.rejections
    assert (rejection.worker_id, rejection.code) == ("a", next(iter(stage.state.refused)))


def test_more_workers_needed_makes_a_late_joiner_expected_in_the_open_round() -> None:
    """It was to begin with the next one; the round would else wait for somebody who never comes."""
    stage = a_stage(workers=2, num_fragments=2, sync_every=8)
    stage.joined("a", "b")
    c = stage.worker("c").joins()
    c.pulls()
    assert stage.round.number == 0
    assert "c" not in stage.expected
    assert stage.asks("set", workers=3).ok
    assert stage.expected == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "Round one is over: later ones wait for all workers of the run"),
        ({"mode": "async", "outer": "dn"}, "The buffer of the outer optimizer goes on taking 2"),
    ],
    ids=str,
)
def test_what_workers_do_not_change_is_said(options: dict[str, Any], sentence: str) -> None:
    stage, _ = a_run("a", "b", **options)
    assert sentence in stage.asks("set", workers=5).text
