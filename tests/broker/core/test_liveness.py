"""Whom a broker waits for: workers that are silent, gone or removed, or whose training stands still."""

from typing import Any

import pytest

from diloco_broker.core.events import Tick
from diloco_broker.core.members.liveness import PROBES_A_TICK
from diloco_protocol.messages import Notice, Rejoin
from kit.core_harness import Puppet, Stage, a_run, a_stage, alone
from kit.heartbeats import Beating


def standing(**options: Any) -> tuple[Stage, Puppet, Puppet, Beating]:
    """Past round one b has stood still for 80 s, and a trains."""
    stage, (a, b) = a_run("a", "b", **{"stall_timeout": 60.0, **options})
    beating = Beating(stage)
    beating.goes_on(80, a="training", b="standing")
    return stage, a, b, beating


def probes(puppets: list[Puppet]) -> list[int]:
    """How often each was probed."""
    return [sum(notice.what == "alive" for notice in puppet.all(Notice)) for puppet in puppets]


def test_round_closes_when_the_worker_it_waits_for_stands_still() -> None:
    stage, (a, _) = a_run("a", "b", stall_timeout=60.0)
    beating = Beating(stage)
    beating.goes_on(20, a="training", b="training")
    a.pushes(11)
    beating.goes_on(60, a="waiting", b="standing")
    assert stage.version().counter == 1
    beating.goes_on(10, a="waiting", b="standing")
    assert stage.version().counter == 2, "at once, with the heartbeat that shows it"
    assert stage.said("b", "70 s")
    assert "b" in stage.here
    assert stage.expected == {"a"}
    assert [w["health"] for w in stage.shown()["workers"]] == ["ok", "stalled"]


@pytest.mark.parametrize("state", ["waiting", "pushing"])
def test_worker_that_does_not_train_does_not_stand_still(state: str) -> None:
    stage, _ = a_run("a", "b", stall_timeout=60.0)
    beating = Beating(stage)
    beating.goes_on(20, a="training", b="training")
    beating.goes_on(200, a="training", b=state)
    beating.goes_on(60, a="training", b="standing")
    assert stage.expected == {"a", "b"}, "it counts from when it was to train again"
    beating.goes_on(10, a="training", b="standing")
    assert stage.expected == {"a"}


@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True}, {"quorum": 1, "grace": 1.0}], ids=str
)
def test_push_of_a_stalled_worker_counts_and_shows_that_it_goes_on(options: dict[str, Any]) -> None:
    """It is expected from the next round, though its next heartbeat may be half a minute away."""
    stage, *_ = standing(**options)
    assert stage.expected == {"a"}
    stage.pushes(b=12, a=11)
    stage.passes(2.0)
    assert stage.version().counter == 2
    assert stage.reports[-1].averaged == 2
    assert stage.expected == {"a", "b"}


def test_push_of_a_worker_that_stands_still_is_waited_for_once_it_has_begun() -> None:
    stage, a, b, _ = standing()
    b.begins(12)
    a.pushes(11)
    assert stage.version().counter == 1
    b.delivers([0, 1])
    assert stage.version().counter == 2


def test_worker_that_goes_on_is_expected_from_the_next_round() -> None:
    stage, a, b, beating = standing()
    beating.beats("b")
    assert stage.said("b resumed training")
    assert stage.expected == {"a"}, "this one closes without it"
    a.pushes(11)
    assert stage.expected == {"a", "b"}
    a.pushes(21)
    assert stage.version().counter == 2
    b.pushes(22)
    assert stage.version().counter == 3


def test_floor_holds_and_the_run_says_that_it_waits() -> None:
    stage, _, b, beating = standing(min_workers=2)
    stage.pushes(a=11)
    beating.goes_on(140, a="waiting", b="standing")
    assert stage.version().counter == 1
    shown = stage.shown()
    assert (shown["state"], shown["round"]["floor"]) == ("waiting", 2)
    b.pushes(12)
    assert stage.version().counter == 2


@pytest.mark.parametrize("end", ["leaves", "dies", "stands still"])
def test_worker_whose_round_needs_another_hears_of_it_once(end: str) -> None:
    stage = a_stage(workers=3, stall_timeout=60.0)
    a, b, c = stage.joined("a", "b", "c")
    a.pushes(1)
    if end == "stands still":
        Beating(stage).goes_on(100, a="waiting", b="training", c="standing")
        c.leaves()
    else:
        getattr(c, end)()
    b.leaves()
    (told,) = [each.text for each in a.all(Notice) if each.what == "waiting"]
    assert "3 workers" in told
    assert stage.asks("set", workers=1).ok
    assert stage.version().counter == 1


def test_round_one_waits_for_a_worker_that_stands_still() -> None:
    stage, *_ = standing(rounds=0)
    stage.pushes(a=1)
    Beating(stage).goes_on(200, a="waiting", b="standing")
    assert stage.version().counter == 0
    stage.pushes(b=2)
    assert stage.version().counter == 1


def test_reconnection_is_not_progress() -> None:
    stage, _, b, beating = standing()
    b.loses_connection()
    b.joins()
    assert stage.expected == {"a"}
    beating.goes_on(20, a="training", b="standing")
    assert stage.expected == {"a"}


@pytest.mark.parametrize("stall_timeout", [60.0, 0.0])
def test_worker_without_heartbeats_or_timeouts_is_never_silent_nor_stands_still(
    stall_timeout: float,
) -> None:
    stage, _ = a_run("a", "b", heartbeat_timeout=0.0, stall_timeout=stall_timeout)
    if not stall_timeout:
        Beating(stage).goes_on(300, a="training", b="standing")
    stage.passes(100_000.0)
    assert stage.expected == {"a", "b"}
    assert len(stage.here) == 2
    stage.pushes(a=11)
    assert stage.version().counter == 1
    stage.pushes(b=12)
    assert stage.version().counter == 2


def test_round_of_stalled_workers_closes_with_the_first_push() -> None:
    stage, (a, b) = a_run("a", "b", stall_timeout=60.0)
    Beating(stage).goes_on(80, a="standing", b="standing")
    assert stage.expected == set()
    assert stage.version().counter == 1, "a round without a contribution does not close"
    a.pushes(11)
    assert stage.version().counter == 2
    b.pushes(12, base=stage.version())
    assert stage.version().counter == 2, "a has shown that it goes on, and is waited for"
    a.pushes(13, base=stage.version())
    assert stage.version().counter == 3


def test_silent_worker_counts_as_dead_after_the_time_out_and_the_round_closes() -> None:
    stage, (a, b) = a_run("a", "b", heartbeat_timeout=30.0)
    a.pushes(11)
    for _ in range(3):
        stage.passes(9.9)
        a.beats()
    assert stage.version().counter == 1
    stage.passes(0.6)
    assert stage.version().counter == 2
    assert stage.shown()["totals"]["deaths"] == 1
    b.beats()
    assert b.last(Rejoin) is not None


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"mode": "async"}], ids=str)
def test_progress_of_an_upload_is_a_sign_of_life(options: dict[str, Any]) -> None:
    stage, a = alone(chunks=30, heartbeat_timeout=10.0, **options)
    a.begins(1)
    for index in range(30):
        stage.passes(9.0)
        a.delivers([index])
    a.commits()
    assert stage.version().counter == 1
    assert stage.shown()["totals"]["deaths"] == 0


def test_seeding_is_a_sign_of_life() -> None:
    stage = a_stage(1, 5, heartbeat_timeout=10.0)
    a = stage.worker("a").joins()
    a.seeds(indexes=[])
    for index in range(5):
        stage.passes(9.0)
        a.delivers([index])
    assert stage.version().counter == 0


def test_closed_connection_triggers_probes() -> None:
    stage, puppets = a_run("a", "b", "c")
    stage.passes(0.1)
    puppets[0].pushes(11)
    puppets[2].pushes(13)
    stage.gone |= {puppets[1].control, puppets[1].bulk}
    before = probes(puppets)
    stage.happens(Tick(lost=True))
    assert [x - y for x, y in zip(probes(puppets), before, strict=True)] == [1, 0, 1]
    assert stage.state.members.named("b").liveness.disconnected_at == stage.now
    stage.passes(0.9)
    assert "b" in stage.here
    assert stage.version().counter == 1
    stage.passes(0.3)
    assert "b" not in stage.here
    assert stage.version().counter == 2, "the round of the others closes"


def test_probes_are_bounded_per_tick_and_reach_every_worker() -> None:
    names = [f"w{number}" for number in range(2 * PROBES_A_TICK + 5)]
    stage, puppets = a_run(*names, rounds=0, chunks=1)
    for losses in ((True, False, False, False), (True, True, True, False)):
        first, counts = probes(puppets), []
        for lost in losses:
            before = sum(probes(puppets))
            stage.happens(Tick(lost))
            counts.append(sum(probes(puppets)) - before)
        times = {x - y for x, y in zip(probes(puppets), first, strict=True)}
        if sum(losses) == 1:
            assert (counts, times) == ([PROBES_A_TICK, PROBES_A_TICK, 5, 0], {1})
        assert max(counts) == PROBES_A_TICK and min(times) >= 1


@pytest.mark.parametrize(("grace", "away"), [(1.0, 0.8), (5.0, 4.0)])
def test_worker_that_comes_back_within_the_grace_keeps_its_place(grace: float, away: float) -> None:
    stage, (a, b) = a_run("a", "b", disconnect_grace=grace)
    b.loses_connection()
    stage.passes(away)
    b.joins()
    stage.passes(5.0)
    assert stage.expected == {"a", "b"}
    assert stage.shown()["totals"]["deaths"] == 0
    a.pushes(11)
    assert stage.version().counter == 1


def test_worker_that_is_kicked_is_told_and_not_waited_for() -> None:
    stage, (a, b) = a_run("a", "b")
    a.pushes(11)
    for unknown in ({}, *({"worker": name} for name in ("absent", 7, None, ["a"]))):
        assert not stage.asks("kick", **unknown).ok
    assert stage.here == {"a", "b"}
    assert stage.kicks("b").ok
    assert b.got(Notice).what == "kicked"
    assert stage.version().counter == 2
    assert stage.expected == {"a"}
    b.beats()
    assert b.last(Rejoin) is not None
