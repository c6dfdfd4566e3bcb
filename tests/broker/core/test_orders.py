"""Orders of an operator to all workers: who is told, who has answered, and when they are cleared."""

from __future__ import annotations

from diloco_broker.core.rules.orders import SAVE_WITHIN_S, STOP_WITHIN_S
from diloco_broker.core.state.orders import MOST_NAMES
from diloco_protocol.messages import Heartbeat, Notice
from kit.core_harness import Puppet, Stage, a_run


def saves(stage: Stage, worker: Puppet) -> None:
    number = worker.got(Notice).round
    worker.sends(Heartbeat(worker.token(), 1, saved=number))


def test_each_worker_is_asked_to_save_and_its_reply_is_shown() -> None:
    stage, (a, b) = a_run("a", "b")
    asked = stage.asks("save_all")
    assert list(asked.data["waiting"]) == ["a", "b"]
    assert a.notices[-1] == b.notices[-1] == "save_all"
    saves(stage, a)
    b.leaves()
    shown = stage.asks("save_all", order=asked.data["order"])
    assert [list(shown.data[each]) for each in ("saved", "left", "waiting")] == [["a"], ["b"], []]
    assert a.notices.count("save_all") == 1


def test_who_comes_late_is_told_while_an_order_is_pending_and_not_afterwards() -> None:
    stage, (a, b) = a_run("a", "b")
    stage.asks("save_all")
    saves(stage, a)
    late = stage.joined("c")[0]
    assert late.notices[-1] == "save_all"
    saves(stage, b)
    saves(stage, late)
    assert "save_all" not in stage.joined("d")[0].notices


def test_an_order_that_nobody_answers_is_given_up() -> None:
    stage, _ = a_run("a", heartbeat_timeout=0.0, stall_timeout=0.0)
    stage.asks("save_all")
    stage.passes(SAVE_WITHIN_S + 1.0)
    assert "save_all" not in stage.joined("b")[0].notices


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


def test_a_worker_that_waits_for_a_round_that_never_closes_is_told_once_more() -> None:
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


def test_names_of_those_who_come_and_go_are_bounded() -> None:
    stage, _ = a_run("a", heartbeat_timeout=0.0, stall_timeout=0.0)
    stage.asks("stop_all")
    for number in range(MOST_NAMES + 5):
        stage.joined(f"w{number}")[0].leaves()
    assert len(stage.asks("stop_all", order=1).data["left"]) == MOST_NAMES
