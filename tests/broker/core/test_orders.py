"""Orders of an operator to all workers: who is told, who has answered, and when they are cleared."""

from __future__ import annotations

from diloco_broker.core.operations.orders import SAVE_WITHIN_S, STOP_WITHIN_S
from diloco_broker.core.state import MOST_NAMES
from diloco_protocol.messages import Heartbeat, Notice
from kit.core_harness import Puppet, Stage, a_run
from kit.restarts import a_saved_run, next_life


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


def test_an_order_reaches_workers_that_are_on_their_way_back_to_a_restarted_broker() -> None:
    crashed = a_saved_run("a", "b", rounds=1)
    stage, (a,) = next_life(crashed, "a")
    asked = stage.asks("save_all")
    assert list(asked.data["waiting"]) == ["a", "b"]
    saves(stage, a)
    b = stage.worker("b").comes_with(crashed.holdings())
    assert b.notices.count("save_all") == 1
    saves(stage, b)
    assert list(stage.asks("save_all", order=asked.data["order"]).data["saved"]) == ["a", "b"]
    assert a.notices.count("save_all") == 1


def test_a_worker_that_did_not_come_back_is_named_and_not_waited_for_for_ever() -> None:
    crashed = a_saved_run("a", "b", rounds=1, heartbeat_timeout=0.0, stall_timeout=0.0)
    stage, (a,) = next_life(crashed, "a")
    asked = stage.asks("save_all")
    saves(stage, a)
    stage.passes(SAVE_WITHIN_S + 1.0)
    assert list(stage.asks("save_all", order=asked.data["order"]).data["waiting"]) == ["b"]


def test_an_order_of_an_earlier_life_of_the_broker_is_neither_given_again_nor_said_to_be_done() -> (
    None
):
    crashed = a_saved_run("a", rounds=1)
    number = crashed.asks("save_all").data["order"]
    stage, (a,) = next_life(crashed, "a")
    answer = stage.asks("save_all", order=number)
    assert not answer.ok
    assert "save_all" not in a.notices
    asked = stage.asks("save_all")
    a.sends(Heartbeat(a.token(), 1, saved=number))  # it has carried out the one of that life
    assert list(stage.asks("save_all", order=asked.data["order"]).data["waiting"]) == ["a"]
    a.sends(Heartbeat(a.token(), 1, saved=asked.data["order"]))
    assert list(stage.asks("save_all", order=asked.data["order"]).data["saved"]) == ["a"]
