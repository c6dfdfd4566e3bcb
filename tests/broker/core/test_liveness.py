"""Signs of life in the core alone: silence, broken connections, training loops that stand still."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_broker.core.events import Received, Tick
from diloco_broker.core.feed import EventLog, LoopFigures, snapshot
from diloco_broker.core.rules.liveness import PROBES_A_TICK
from diloco_protocol.messages import Chunk, Control, Notice, Purpose, Push, Rejoin, Result, Welcome
from kit.core_harness import Puppet, Stage, a_stage
from kit.noted_tensors import Payload


def a_run(*worker_ids: str, rounds: int = 1, **options: Any) -> tuple[Stage, list[Puppet]]:
    """Workers past round one."""
    options = {"workers": len(worker_ids), "chunks": 2, "stall_timeout": 60.0, **options}
    stage = a_stage(**options)
    puppets = stage.joined(*worker_ids)
    for number in range(rounds):
        for place, puppet in enumerate(puppets, start=1):
            puppet.pushes(10 * number + place)
    return stage, puppets


class Beating:
    """Workers that send heartbeats every 10 s; those that train make a step in between."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.steps: dict[str, int] = {}

    def goes_on(self, seconds: float, **states: str) -> None:
        """`a="training"` trains, `b="standing"` says that it does; other states are told as such."""
        for _ in range(round(seconds / 10)):
            self.stage.passes(10.0)
            for name, state in states.items():
                self.beats(name, state)

    def beats(self, name: str, state: str = "training") -> None:
        member = self.stage.state.members.named(name)
        puppet = Puppet(self.stage, name, member.session, member.control, member.bulk)
        self.steps[name] = self.steps.get(name, 0) + (state == "training")
        puppet.beats(self.steps[name], "training" if state == "standing" else state)


def feed(stage: Stage) -> dict[str, Any]:
    figures = LoopFigures("tcp://127.0.0.1:1", 0.0, 0.0, 0)
    return snapshot(stage.state, EventLog(), figures, 1, stage.now)


def probed(stage: Stage, puppets: list[Puppet]) -> list[int]:
    """How often each was sent a word."""
    return [sum(notice.what == "alive" for notice in puppet.all(Notice)) for puppet in puppets]


# Training loops that stand still.


def test_round_closes_when_the_worker_it_waits_for_stands_still() -> None:
    stage, (a, _) = a_run("a", "b")
    beating = Beating(stage)
    beating.goes_on(20, a="training", b="training")
    a.pushes(11)
    beating.goes_on(60, a="waiting", b="standing")
    assert stage.version().counter == 1
    beating.goes_on(10, a="waiting", b="standing")
    assert stage.version().counter == 2, "at once, with the heartbeat that shows it"
    assert stage.said("b has stood at step 2 for 70 s")
    assert "b" in stage.state.members
    assert stage.expected == {"a"}
    assert [w["health"] for w in feed(stage)["workers"]] == ["ok", "stalled"]


@pytest.mark.parametrize("state", ["waiting", "pushing"])
def test_worker_that_does_not_train_does_not_stand_still(state: str) -> None:
    stage, _ = a_run("a", "b")
    beating = Beating(stage)
    beating.goes_on(20, a="training", b="training")
    beating.goes_on(600, a="training", b=state)
    assert stage.expected == {"a", "b"}
    beating.goes_on(60, a="training", b="standing")
    assert stage.expected == {"a", "b"}, "it counts from when it was to train again"
    beating.goes_on(10, a="training", b="standing")
    assert stage.expected == {"a"}


@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True}, {"quorum": 1, "grace": 1.0}], ids=str
)
def test_push_of_a_worker_that_stood_still_counts(options: dict[str, Any]) -> None:
    stage, _ = a_run("a", "b", **options)
    beating = Beating(stage)
    beating.goes_on(80, a="training", b="standing")
    assert stage.expected == {"a"}
    stage.pushes(b=12, a=11)
    stage.passes(2.0)
    assert stage.version().counter == 2
    assert stage.state.last_report.averaged == 2


def test_push_of_a_worker_that_stands_still_is_waited_for_once_it_has_begun() -> None:
    stage, (a, b) = a_run("a", "b")
    Beating(stage).goes_on(80, a="training", b="standing")
    b.begins(12)
    a.pushes(11)
    assert stage.version().counter == 1
    b.delivers([0, 1])
    assert stage.version().counter == 2


def test_worker_that_goes_on_is_expected_from_the_next_round() -> None:
    stage, (a, b) = a_run("a", "b")
    beating = Beating(stage)
    beating.goes_on(80, a="training", b="standing")
    beating.beats("b")
    assert stage.said("b trains again")
    assert stage.expected == {"a"}, "this one closes without it"
    a.pushes(11)
    assert stage.expected == {"a", "b"}
    a.pushes(21)
    assert stage.version().counter == 2
    b.pushes(22)
    assert stage.version().counter == 3


def test_push_shows_that_a_worker_goes_on() -> None:
    """It is expected from the next round, though its next heartbeat may be half a minute away."""
    stage, _ = a_run("a", "b")
    Beating(stage).goes_on(80, a="training", b="standing")
    stage.pushes(b=12, a=11)
    assert stage.expected == {"a", "b"}


def test_worker_that_stands_still_while_a_round_is_closing_is_not_expected_in_the_next() -> None:
    stage, (a, b) = a_run("a", "b")
    beating = Beating(stage)
    a.begins(11)
    b.begins(12)
    assert stage.round.phase.value == "closing"
    beating.goes_on(80, a="pushing", b="standing")
    a.delivers([0, 1])
    b.delivers([0, 1])
    assert stage.version().counter == 2
    assert stage.expected == {"a"}


def test_floor_holds_and_the_run_says_that_it_waits() -> None:
    stage, (a, b) = a_run("a", "b", min_workers=2)
    beating = Beating(stage)
    beating.goes_on(20, a="training", b="training")
    a.pushes(11)
    beating.goes_on(200, a="waiting", b="standing")
    assert stage.version().counter == 1
    assert (feed(stage)["state"], feed(stage)["round"]["floor"]) == ("waiting", 2)
    text = feed(stage)["waiting_for"]
    assert "of which 1 stands still" in text
    assert "the round needs 2" in text
    b.pushes(12)
    assert stage.version().counter == 2


def test_newcomer_is_expected_at_once_in_the_place_of_one_that_stands_still() -> None:
    stage, (a, _) = a_run("a", "b", min_workers=2)
    beating = Beating(stage)
    beating.goes_on(80, a="training", b="standing")
    a.pushes(11)
    c = stage.worker("c").joins()
    assert stage.expected == {"a", "c"}
    assert c.got(Welcome).first_round == 1
    c.pulls()
    c.pushes(13)
    assert stage.version().counter == 2


def test_worker_that_goes_on_below_the_floor_is_expected_at_once() -> None:
    stage, _ = a_run("a", "b", min_workers=2)
    beating = Beating(stage)
    beating.goes_on(80, a="training", b="standing")
    assert stage.expected == {"a"}
    beating.beats("b")
    assert stage.expected == {"a", "b"}
    stage.pushes(b=12, a=11)
    assert stage.version().counter == 2


def test_round_one_waits_for_a_worker_that_stands_still() -> None:
    stage, (a, b) = a_run("a", "b", rounds=0)
    a.pushes(1)
    Beating(stage).goes_on(300, a="waiting", b="standing")
    assert stage.version().counter == 0
    b.pushes(2)
    assert stage.version().counter == 1


def test_reconnection_is_no_step() -> None:
    stage, (_, b) = a_run("a", "b")
    beating = Beating(stage)
    beating.goes_on(80, a="training", b="standing")
    b.loses_connection()
    b.joins()
    assert stage.expected == {"a"}
    beating.goes_on(20, a="training", b="standing")
    assert stage.expected == {"a"}


def test_worker_without_heartbeats_never_stands_still() -> None:
    stage, (a, b) = a_run("a", "b", heartbeat_timeout=0.0)
    stage.passes(10_000.0)
    assert stage.expected == {"a", "b"}
    a.pushes(11)
    assert stage.version().counter == 1
    b.pushes(12)
    assert stage.version().counter == 2


def test_zero_is_no_limit() -> None:
    stage, _ = a_run("a", "b", stall_timeout=0.0)
    Beating(stage).goes_on(3000, a="training", b="standing")
    assert stage.expected == {"a", "b"}


def test_all_workers_standing_still_leave_a_round_that_closes_with_whoever_pushes() -> None:
    stage, (a, b) = a_run("a", "b")
    Beating(stage).goes_on(80, a="standing", b="standing")
    assert stage.expected == set()
    assert stage.version().counter == 1, "a round without a contribution does not close"
    a.pushes(11)
    assert stage.version().counter == 2
    b.pushes(12, base=stage.version())
    assert stage.version().counter == 2, "a has shown that it goes on, and is waited for"
    a.pushes(13, base=stage.version())
    assert stage.version().counter == 3


# Silence.


def test_silent_worker_counts_as_dead_after_the_time_out_and_the_round_closes() -> None:
    stage, (a, _) = a_run("a", "b", heartbeat_timeout=30.0)
    a.pushes(11)
    for _ in range(3):
        stage.passes(9.9)
        a.beats()
    assert stage.version().counter == 1
    stage.passes(0.6)
    assert stage.version().counter == 2
    assert stage.said("b counts as dead: nothing was heard from it for 30 s")
    assert stage.state.totals.deaths == 1


def test_zero_is_no_time_out() -> None:
    stage, _ = a_run("a", "b", heartbeat_timeout=0.0)
    stage.passes(100_000.0)
    assert len(stage.state.members) == 2


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"mode": "async"}], ids=str)
def test_progress_of_an_upload_is_a_sign_of_life(options: dict[str, Any]) -> None:
    stage = a_stage(1, 30, heartbeat_timeout=10.0, **options)
    (a,) = stage.joined("a")
    a.begins(1)
    for index in range(30):
        stage.passes(9.0)
        a.delivers([index])
    a.commits()
    assert stage.version().counter == 1
    assert stage.state.totals.deaths == 0


def test_donation_is_a_sign_of_life() -> None:
    stage = a_stage(1, 5, heartbeat_timeout=10.0)
    a = stage.worker("a").joins()
    a.sends(Push(a.token(), 7, 0, 5, "fp32", purpose=Purpose.DONATION))
    for index in range(5):
        stage.passes(9.0)
        chunk = Chunk(0, index, session=a.session, push_id=7)
        a.sends(chunk, Payload(16), on=a.bulk)
    assert stage.version().counter == 0


# Broken connections.


def test_closed_connection_makes_the_broker_look_for_whose_it_was() -> None:
    stage, puppets = a_run("a", "b", "c")
    stage.passes(0.1)
    stage.gone |= {puppets[1].control, puppets[1].bulk}
    before = probed(stage, puppets)
    stage.happens(Tick(lost=True))
    after = probed(stage, puppets)
    assert [x - y for x, y in zip(after, before, strict=True)] == [1, 0, 1]
    assert stage.state.members.named("b").liveness.disconnected_at == stage.now
    stage.passes(0.9)
    assert "b" in stage.state.members
    stage.passes(0.3)
    assert "b" not in stage.state.members


def test_closed_connection_closes_the_round_of_the_others_after_the_grace() -> None:
    stage, (a, _) = a_run("a", "b")
    a.pushes(11)
    stage.gone |= {Puppet(stage, "b").control, stage.state.members.named("b").control}
    stage.happens(Tick(lost=True))
    stage.passes(1.2)
    assert stage.version().counter == 2


def test_everybody_is_probed_once_so_many_a_tick() -> None:
    names = [f"w{number}" for number in range(2 * PROBES_A_TICK + 5)]
    stage, puppets = a_run(*names, rounds=0, chunks=1)
    first = probed(stage, puppets)
    counts = []
    for lost in (True, False, False, False):
        before = sum(probed(stage, puppets))
        stage.happens(Tick(lost))
        counts.append(sum(probed(stage, puppets)) - before)
    assert counts == [PROBES_A_TICK, PROBES_A_TICK, 5, 0]
    assert {x - y for x, y in zip(probed(stage, puppets), first, strict=True)} == {1}


def test_connections_that_close_all_the_time_keep_nobody_from_being_probed() -> None:
    names = [f"w{number}" for number in range(2 * PROBES_A_TICK)]
    stage, puppets = a_run(*names, rounds=0, chunks=1)
    first = probed(stage, puppets)
    for _ in range(2):
        stage.happens(Tick(lost=True))
    assert min(x - y for x, y in zip(probed(stage, puppets), first, strict=True)) == 1


def test_worker_that_comes_back_within_the_grace_keeps_its_place() -> None:
    stage, (a, b) = a_run("a", "b")
    b.loses_connection()
    stage.passes(0.8)
    b.joins()
    stage.passes(5.0)
    assert stage.expected == {"a", "b"}
    a.pushes(11)
    assert stage.version().counter == 1


# Removed by an operator.


def test_worker_that_is_kicked_is_told_and_not_waited_for() -> None:
    stage, (a, b) = a_run("a", "b")
    a.pushes(11)
    assert stage.kicks("b").ok
    assert b.got(Notice).what == "kicked"
    assert stage.version().counter == 2
    assert stage.expected == {"a"}
    assert stage.logs.count("an operator: b removed from the run.") == 1
    b.beats()
    assert b.last(Rejoin) is not None


@pytest.mark.parametrize("name", ["nobody", 7, None, ["a"]])
def test_unknown_worker_cannot_be_kicked(name: object) -> None:
    stage, _ = a_run("a", "b")
    desk = stage.route()
    stage.happens(Received(desk, Control("kick", 3, {"worker": name})))
    result = stage.inbox[desk][-1]
    assert isinstance(result, Result)
    assert (result.request, result.ok) == (3, False)
    assert "here: a, b" in result.text
    assert len(stage.state.members) == 2


def test_kick_without_a_name_says_who_is_here() -> None:
    stage, _ = a_run("a", "b")
    desk = stage.route()
    stage.happens(Received(desk, Control("kick", 3)))
    result = stage.inbox[desk][-1]
    assert isinstance(result, Result)
    assert (result.ok, "here: a, b" in result.text) == (False, True)


def test_next_worker_is_asked_when_the_donor_is_kicked() -> None:
    stage = a_stage(workers=2, chunks=2)
    a, b = stage.worker("a").joins(), stage.worker("b").joins()
    a.donates(0, [0])
    assert stage.kicks("a").ok
    assert b.asked_for == [0]
    stage.provide()
    assert stage.version().counter == 0


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
def test_whole_contribution_of_a_kicked_worker_counts(options: dict[str, Any]) -> None:
    stage, (a, b, _) = a_run("a", "b", "c", **options)
    b.pushes(12)
    stage.kicks("b")
    a.pushes(11)
    stage.kicks("c")
    assert stage.version().counter == 2
    assert [chunk["b", 12] for chunk in stage.counted()] == [1, 1]


def test_part_of_a_contribution_of_a_kicked_worker_holds_nobody_up() -> None:
    stage, (a, b) = a_run("a", "b")
    a.pushes(11)
    b.begins(12)
    assert stage.round.phase.value == "closing"
    b.delivers([0])
    assert stage.kicks("b").ok
    assert stage.version().counter == 2


def test_kick_in_the_middle_of_an_asynchronous_submission_frees_its_slot() -> None:
    stage, (a, b) = a_run("a", "b", mode="async", staging_slots=1)
    a.begins(11)
    a.delivers([0])
    b.begins(12)
    assert stage.state.submissions.queue
    assert stage.kicks("a").ok
    b.delivers([0, 1])
    b.commits()
    assert stage.state.versions[0].ledger.names_whole("b", 12)
