"""What an operator may change while a run goes on, and ask of all workers: the core alone."""

from typing import Any

import pytest

from diloco_broker.core import state
from diloco_broker.core.events import OuterGroups, Stop, Surroundings
from diloco_broker.core.operations.orders import SAVE_WITHIN_S, STOP_WITHIN_S
from diloco_broker.core.rounds.round import Phase
from diloco_protocol.feed import OuterGroup
from diloco_protocol.messages import Error, Heartbeat, Notice, Welcome
from kit.core_harness import Puppet, Stage, a_run, a_stage, alone
from kit.restarts import a_saved_run, next_incarnation


def closing() -> tuple[Stage, Puppet]:
    """Round zero of one worker, of which nothing has been stepped yet."""
    stage = a_stage(workers=1, chunks=3, by_hand=True)
    worker = stage.worker("a").joins()
    worker.seeds()
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
    assert "version 2" in result.text
    assert result.data["changes"] == [{"name": "outer_lr", "before": 0.7, "after": 0.5}]
    assert [config.outer_lr for config in stage.tensors.tunes] == [0.5]
    (act,) = stage.acts
    assert (act.who, act.what, act.before, act.after) == ("ann@desk", "set outer_lr", 0.7, 0.5)
    assert stage.asks("set", outer_lr=0.5).ok
    assert stage.acts == [act], "an unchanged setting is not an action"


def test_version_that_is_being_made_is_finished_with_the_old_setting() -> None:
    stage, _ = closing()
    assert stage.tensors.queue, "some of its chunks have not been stepped yet"
    result = stage.asks("set", outer_lr=0.5)
    assert "version 2" in result.text
    assert not stage.tensors.tunes
    assert stage.shown()["outer"]["lr"] == 0.7
    (change,) = stage.asks("set", outer_lr=0.25).data["changes"]
    assert (change["before"], change["after"]) == (0.5, 0.25)
    assert stage.asks("set", outer_momentum=0.8).ok
    stage.work()
    (config,) = stage.tensors.tunes
    assert (config.outer_lr, config.outer_momentum) == (0.25, 0.8)
    assert stage.shown()["outer"]["lr"] == 0.25


REFUSED: dict[str, list[Any]] = {
    "outer_lr": [-1.0, 1e308, float("nan"), "fast", True],
    "sync_every": [10**9, 2.5],
    "workers": [10**9, 0, [1]],
    "min_workers": [2],
    "outer_lr_schedule": ["linear:10:0", 10],
    "outer_momentum_warmup": ["linear:10:1", ["constant"]],
    "outer_momentum": [1.0],
    "save_every": [0, 2],
    "grace": [1.0],
    "quorum": [1],
    "mode": ["async"],
    "num_fragments": [3],
}


@pytest.mark.parametrize(
    "arguments", [{}, *({name: value} for name in REFUSED for value in REFUSED[name])], ids=str
)
def test_refused_setting_changes_nothing(arguments: dict[str, Any]) -> None:
    stage, _ = a_run("a")
    before = stage.shown()
    result = stage.asks("set", **{"outer_momentum": 0.5, **arguments} if arguments else {})
    assert not result.ok
    assert stage.shown() == before, "all of it, or nothing"
    assert not stage.tensors.tunes
    assert not stage.acts


def test_schedules_are_set_like_any_setting_and_count_from_the_beginning_of_the_run() -> None:
    stage, _ = a_run("a")
    for gradient in (2, 3):
        stage.pushes(a=gradient)
    before = stage.shown()["fragments"][0]
    assert (before["gradients"], before["lr"]) == (3, 0.7)
    assert before["momentum"] == pytest.approx(0.5 + 0.4 * 3 / 200), "the usual warm-up"
    texts = {"outer_lr_schedule": "linear:6:0.5", "outer_momentum_warmup": "linear:6"}
    assert stage.asks("set", **texts, outer_momentum=0.8).ok
    assert stage.tensors.tunes[-1].outer_schedule.factor(6) == 0.5
    shown = stage.shown()
    assert (shown["outer"]["lr"], shown["outer"]["momentum"]) == (0.7, 0.8), "as they were given"
    now = shown["fragments"][0]
    assert (now["lr"], now["momentum"]) == (pytest.approx(0.7 * 0.75), pytest.approx(0.4))


def test_torch_optimizer_takes_a_schedule_of_its_learning_rate_and_no_warm_up() -> None:
    stage, _ = a_run("a")
    stage.happens(Surroundings(has_own_optimizer=True))
    stage.happens(OuterGroups((OuterGroup(0.1, 0.9), OuterGroup(0.1, 0.5))))
    assert not stage.asks("set", outer_momentum_warmup="linear:10").ok
    assert stage.asks("set", outer_lr_schedule="linear:1:0.5").ok
    shown = stage.shown()
    assert (shown["fragments"][0]["lr"], shown["fragments"][0]["momentum"]) == (0.05, None)


@pytest.mark.parametrize(("momentum", "ok"), [(0.9, True), (None, False)])
def test_torch_optimizer_without_a_momentum_refuses_one(momentum: float | None, ok: bool) -> None:
    stage, _ = a_run("a")
    stage.happens(Surroundings(has_own_optimizer=True))
    stage.happens(OuterGroups((OuterGroup(0.1, 0.9), OuterGroup(0.1, momentum))))
    assert stage.asks("set", outer_momentum=0.5).ok is ok
    assert stage.asks("set", outer_lr=0.5).ok
    assert [group["lr"] for group in stage.shown()["outer"]["groups"]] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("names", "options", "lower"),
    [
        ("ab", {"workers": 3, "rounds": 0}, {"workers": 2}),
        ("abc", {"quorum": 3}, {"quorum": 2}),
        ("abc", {"min_workers": 3}, {"min_workers": 2}),
    ],
    ids=str,
)
def test_lower_limit_lets_the_open_round_close(
    names: str, options: dict[str, Any], lower: dict[str, int]
) -> None:
    stage, puppets = a_run(*names, **options)
    if "min_workers" in lower:
        puppets[-1].dies()
    before = stage.version().counter
    stage.pushes(a=11, b=12)
    assert stage.version().counter == before, "it waits for a third"
    assert stage.asks("set", **lower).ok
    stage.passes(0.2)
    assert stage.version().counter == before + 1


def test_grace_can_be_set_and_the_quorum_taken_away() -> None:
    stage, (a, b) = a_run("a", "b", quorum=1, deterministic=True)
    assert stage.asks("set", grace=5.0).ok
    a.pushes(11)
    stage.passes(4.0)
    assert stage.version().counter == 1
    assert stage.asks("set", quorum=0, grace=0).ok
    stage.passes(60.0)
    assert stage.version().counter == 1, "now all workers are waited for"
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


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"mode": "async"}], ids=str)
def test_paused_run_makes_no_version_and_loses_nothing(options: dict[str, Any]) -> None:
    stage, _ = a_run("a", "b", **options)
    before = stage.version().counter
    for action in ("resume", "pause", "pause"):
        assert stage.asks(action).ok
    stage.pushes(a=11, b=12)
    stage.passes(60.0)
    assert stage.version().counter == before
    assert stage.asks("resume").ok
    assert stage.version().counter > before
    # In asynchronous mode each is a version of its own; either way both are in, once.
    for index in range(2):
        counts = stage.counted()[index]
        assert counts["a", 11] == counts["b", 12] == 1
    assert [act.what for act in stage.acts] == ["pause", "resume"]


def test_version_that_is_being_made_is_released_though_the_run_is_paused() -> None:
    stage, worker = closing()
    assert stage.asks("pause").ok
    stage.work()
    assert stage.version().counter == 1
    worker.pushes(2)
    stage.work()
    assert stage.version().counter == 1


@pytest.mark.parametrize("restarting", [False, True])
def test_shutdown_names_its_operator_and_whether_the_run_is_over(restarting: bool) -> None:
    stage, (a,) = a_run("a")
    what = "restarting" if restarting else "shutdown"
    for odd in (1, "yes", None, [True]):
        assert not stage.asks("shutdown", restarting=odd).ok
    assert stage.asks("shutdown", who="ann@desk", **({"restarting": True} if restarting else {})).ok
    (end,) = stage.ends
    assert "ann@desk" in end.reason and end.restarting is restarting
    assert stage.acts[-1].what == ("restart" if restarting else "shutdown")
    assert what not in a.notices, "the loop stops in its own way"
    stage.happens(Stop(end.reason, restarting))
    assert a.notices[-1] == what
    assert stage.asks("shutdown", restarting=restarting).ok
    assert not stage.asks("shutdown", restarting=not restarting).ok
    assert stage.ends == [end]


def test_name_of_an_operator_is_short() -> None:
    stage, _ = a_run("a")
    stage.asks("pause", who="y" * 500)
    (act,) = stage.acts
    assert act.who == "y" * 100


def test_more_workers_needed_makes_a_late_joiner_expected_in_the_open_round() -> None:
    """It was to begin with the next one; else the round would wait for a worker that never joins."""
    stage = a_stage(workers=2, num_fragments=2, sync_every=8)
    stage.joined("a", "b")
    c = stage.worker("c").joins()
    c.pulls()
    assert stage.round.number == 0
    assert "c" not in stage.expected
    assert stage.asks("set", workers=3).ok
    assert stage.expected == {"a", "b", "c"}


def test_new_h_reaches_all_workers_and_later_joiners() -> None:
    stage = a_stage(workers=2, sync_every=100)
    stage.worker("own").joins(wants={"sync_every": 40})
    a = stage.worker("a").joins()
    stage.provide()
    result = stage.asks("set", sync_every=60)
    assert result.ok and "own" in result.text
    told = [notice.sync_every for notice in a.all(Notice) if notice.what == "sync_every"]
    assert told == [60]
    welcome = stage.worker("late").joins().last(Welcome)
    assert welcome is not None and welcome.config.sync_every == 60
    assert stage.column("sync_every") == {"own": 40, "a": 60, "late": 60}
    stage.asks("set", sync_every=20)
    assert stage.column("sync_every")["own"] == 20, "the others would wait for it"


def test_worker_whose_h_became_the_larger_one_may_come_back() -> None:
    stage, a = alone(sync_every=100)
    a.loses_connection()
    a.joins(wants={"sync_every": 80})
    stage.asks("set", sync_every=50)
    a.loses_connection()
    a.joins(wants={"sync_every": 80})
    assert a.last(Error) is None
    assert stage.column("sync_every") == {"a": 50}


def test_floor_that_is_raised_holds_from_the_open_round_on() -> None:
    stage = a_stage(workers=2)
    a, b = stage.joined("a", "b")
    stage.pushes(a=1, b=2)
    b.leaves()
    assert stage.asks("set", min_workers=2).ok
    a.pushes(11)
    assert stage.version().counter == 1
    b = stage.worker("b").joins()
    b.pushes(12, base=stage.version())
    assert stage.version().counter == 2


# Orders to all workers: who is told, who has answered, and when they are cleared.


def saves(stage: Stage, worker: Puppet) -> None:
    number = worker.got(Notice).round
    worker.sends(Heartbeat(worker.token(), 1, saved=number))


def test_each_worker_is_asked_to_save_and_its_reply_is_shown() -> None:
    stage, (a, b) = a_run("a", "b")
    asked = stage.asks("save_all")
    assert list(asked.data["waiting"]) == ["a", "b"]
    assert a.notices[-1] == b.notices[-1] == "save_all"
    saves(stage, a)
    late = stage.joined("c")[0]
    assert late.notices[-1] == "save_all"
    b.leaves()
    saves(stage, late)
    shown = stage.asks("save_all", order=asked.data["order"])
    told = [list(shown.data[each]) for each in ("saved", "left", "waiting")]
    assert told == [["a", "c"], ["b"], []]
    assert a.notices.count("save_all") == 1
    assert "save_all" not in stage.joined("d")[0].notices, "it is over"


def test_workers_that_are_told_to_stop_leave_and_the_broker_stays() -> None:
    stage, workers = a_run("a", "b")
    asked = stage.asks("stop_all")
    assert [worker.notices[-1] for worker in workers] == ["stop_all", "stop_all"]
    for worker in workers:
        worker.leaves()
    shown = stage.asks("stop_all", order=asked.data["order"])
    assert (list(shown.data["left"]), list(shown.data["waiting"])) == (["a", "b"], [])
    assert not stage.ends
    assert "stop_all" not in stage.joined("c")[0].notices


def test_worker_stuck_in_a_round_is_told_to_stop_again() -> None:
    stage, (a, b) = a_run("a", "b", min_workers=2, heartbeat_timeout=0.0, stall_timeout=0.0)
    a.pushes(81)
    stage.asks("stop_all")
    b.leaves()
    stage.passes(STOP_WITHIN_S - 1.0)
    assert a.notices[-1] != "shutdown"
    stage.passes(2.0)
    stage.passes(2.0)
    assert a.notices.count("shutdown") == 1
    assert "stop_all" not in stage.joined("c")[0].notices
    assert not stage.ends


def test_names_of_workers_that_left_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MOST_NAMES", 3)
    stage, _ = a_run("a", heartbeat_timeout=0.0, stall_timeout=0.0)
    stage.asks("stop_all")
    for number in range(5):
        stage.joined(f"w{number}")[0].leaves()
    assert len(stage.asks("stop_all", order=1).data["left"]) == 3


def test_order_reaches_workers_that_return_after_a_restart() -> None:
    crashed = a_saved_run("a", "b", rounds=1)
    stage, (a,) = next_incarnation(crashed, "a")
    asked = stage.asks("save_all")
    assert list(asked.data["waiting"]) == ["a", "b"]
    saves(stage, a)
    b = stage.worker("b").comes_with(crashed.holdings())
    assert b.notices.count("save_all") == 1
    saves(stage, b)
    assert list(stage.asks("save_all", order=asked.data["order"]).data["saved"]) == ["a", "b"]
    assert a.notices.count("save_all") == 1


def test_order_expires_without_a_worker_that_did_not_return() -> None:
    crashed = a_saved_run("a", "b", rounds=1, heartbeat_timeout=0.0, stall_timeout=0.0)
    stage, (a,) = next_incarnation(crashed, "a")
    asked = stage.asks("save_all")
    saves(stage, a)
    stage.passes(SAVE_WITHIN_S + 1.0)
    assert list(stage.asks("save_all", order=asked.data["order"]).data["waiting"]) == ["b"]
    assert "save_all" not in stage.joined("c")[0].notices


def test_order_of_an_earlier_incarnation_is_forgotten() -> None:
    crashed = a_saved_run("a", rounds=1)
    number = crashed.asks("save_all").data["order"]
    stage, (a,) = next_incarnation(crashed, "a")
    answer = stage.asks("save_all", order=number)
    assert not answer.ok
    assert "save_all" not in a.notices
    asked = stage.asks("save_all")
    a.sends(Heartbeat(a.token(), 1, saved=number))  # it has carried out the one of that incarnation
    assert list(stage.asks("save_all", order=asked.data["order"]).data["waiting"]) == ["a"]
    a.sends(Heartbeat(a.token(), 1, saved=asked.data["order"]))
    assert list(stage.asks("save_all", order=asked.data["order"]).data["saved"]) == ["a"]
