"""Who is behind relays: shown as they tell it, bounded, and reached by what an operator asks."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from diloco_broker.core import events
from diloco_broker.core.events import Parent
from diloco_broker.core.operations import orders
from diloco_broker.core.operations.status import MOST_LISTED, round_line
from diloco_broker.core.sites import listing
from diloco_protocol.messages import (
    MOST_BEHIND,
    MOST_LEVELS,
    Behind,
    Error,
    Heartbeat,
    Notice,
    Reply,
    decode,
    encode,
)
from kit.core_harness import FIGURES, Puppet, Stage, a_run, a_stage


def a_tree(**workers: int) -> tuple[Stage, list[Puppet]]:
    """A hub with these relays, and so many workers behind each."""
    stage = a_stage(workers=len(workers), relays=True)
    puppets = [stage.worker(name).joins(workers=number) for name, number in workers.items()]
    stage.provide()
    return stage, puppets


def tells(relay: Puppet, *behind: Behind, replies: tuple[Reply, ...] | None = None) -> None:
    number = sum(each.workers is None for each in behind)
    beat = Heartbeat(relay.token(), 1, workers=number, behind=behind, replies=replies)
    relay.sends(decode(encode(beat)))


def row(stage: Stage, name: str) -> dict[str, Any]:
    (found,) = (each for each in stage.shown()["workers"] if each["id"] == name)
    assert isinstance(found, dict)
    return found


def shown(stage: Stage, relay: str) -> dict[str, dict[str, Any]]:
    return {each["worker_id"]: each for each in row(stage, relay)["behind"]}


def test_feed_shows_who_is_behind_a_relay_with_ages_that_go_on() -> None:
    stage, (north,) = a_tree(north=2)
    a = Behind("a", state="training", step=7, steps_per_s=2.5, loss=1.5, beat_age_s=3.0)
    tells(north, a, Behind("b", health="lost", sync_age_s=20.0))
    stage.passes(5.0)
    found = shown(stage, "north")
    assert (found["a"]["step"], found["a"]["loss"], found["a"]["beat_age_s"]) == (7, 1.5, 8.0)
    assert (found["b"]["health"], found["b"]["sync_age_s"]) == ("lost", 25.0)


def test_list_of_a_site_has_each_worker_and_those_behind_its_relays() -> None:
    stage, (deep,) = a_tree(deep=2)
    stage.joined("z")
    tells(deep, Behind("x", step=5), Behind("y"))
    assert [(e.worker_id, e.level, e.workers) for e in listing.listed(stage.state)] == [
        ("deep", 0, 2),
        ("x", 1, None),
        ("y", 1, None),
        ("z", 0, None),
    ]
    assert listing.listed(stage.state)[1].step == 5


def test_list_has_room_for_those_that_are_not_well() -> None:
    names = [f"w{number:03}" for number in range(MOST_BEHIND + 2)]
    stage, puppets = a_run(*names, rounds=0, max_workers=200)
    puppets[-1].loses_connection()
    stage.happens(events.PeerGone(stage.state.members.named(names[-1]).control))
    found = listing.listed(stage.state)
    assert len(found) == MOST_BEHIND
    assert found[-1].health == "lost"


@pytest.mark.parametrize(
    "told",
    [
        Behind("a", level=99, step=-5, beat_age_s=-1.0, steps_per_s=0.0),
        Behind("a", beat_age_s=math.nan, loss=math.nan, inner_age_s=math.inf),
        Behind("a", health="x" * 500, state="y" * 500, host="z" * 500),
    ],
)
def test_odd_entries_are_brought_into_range(told: Behind) -> None:
    stage, (north,) = a_tree(north=1)
    tells(north, told)
    found = shown(stage, "north")["a"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["level"] == 0
    assert found["step"] >= 0
    assert found["beat_age_s"] >= 0
    assert max(len(found[each]) for each in ("health", "state", "host")) <= listing.LONGEST_HOST


def test_levels_go_down_one_at_a_time_and_not_for_ever() -> None:
    stage, (north,) = a_tree(north=1)
    tells(north, *(Behind(f"r{n}", level=3 * n, workers=1) for n in range(12)))
    levels = [each["level"] for each in row(stage, "north")["behind"]]
    assert levels == [min(n, MOST_LEVELS) for n in range(12)]


def test_a_loss_that_is_not_finite_is_said_behind_relays_too() -> None:
    stage, (north,) = a_tree(north=1)
    tells(north, Behind("a", loss=math.nan))
    assert shown(stage, "north")["a"]["loss_is_finite"] is False


def test_lists_are_bounded_whatever_relays_tell() -> None:
    stage, relays = a_tree(**{f"r{number}": 1 for number in range(20)})
    for relay in relays:
        tells(relay, *(Behind(f"{relay.worker_id}-{n}") for n in range(3 * MOST_BEHIND)))
        assert len(stage.state.members.named(relay.worker_id).listed) == MOST_BEHIND
    assert sum(len(each["behind"]) for each in stage.shown()["workers"]) == MOST_LISTED


def test_a_worker_that_is_no_relay_has_nobody_behind_it() -> None:
    stage, (a,) = a_run("a")
    tells(a, Behind("x"))
    assert row(stage, "a")["behind"] == []


# What an operator asks.


def test_order_waits_for_those_behind_a_relay_by_their_names() -> None:
    stage, (north,) = a_tree(north=2)
    (c,) = stage.joined("c")
    asked = stage.asks("save_all")
    number = asked.data["order"]
    tells(north, replies=(Reply("save_all", number, ("a", "b")),))
    assert list(stage.asks("save_all", order=number).data["waiting"]) == ["a", "b", "c"]
    tells(north, replies=(Reply("save_all", number, ("b",), saved=("a",)),))
    c.sends(Heartbeat(c.token(), 1, saved=number))
    assert stage.shown()["orders"] == [
        {"action": "save_all", "waiting": ["b"], "saved": 2, "left": 0}
    ]
    tells(north, replies=(Reply("save_all", number, (), saved=("a",), left=("b",)),))
    found = stage.asks("save_all", order=number).data
    assert [list(found[each]) for each in ("saved", "left", "waiting")] == [["a", "c"], ["b"], []]


def test_reply_to_another_order_counts_for_nothing() -> None:
    stage, (north,) = a_tree(north=1)
    number = stage.asks("save_all").data["order"]
    tells(north, replies=(Reply("save_all", number + 1, ()), Reply("odd", number, ())))
    assert list(stage.asks("save_all", order=number).data["waiting"]) == ["north"]


def test_relay_that_is_gone_is_not_waited_for() -> None:
    stage, (north,) = a_tree(north=2)
    number = stage.asks("stop_all").data["order"]
    tells(north, replies=(Reply("stop_all", number, ("a", "b")),))
    north.leaves()
    found = stage.asks("stop_all", order=number).data
    assert (list(found["left"]), list(found["waiting"])) == (["north"], [])


def test_kick_of_a_worker_behind_a_relay_goes_to_the_relay() -> None:
    stage, (north, south) = a_tree(north=1, south=1)
    tells(north, Behind("a"))
    tells(south, Behind("b"))
    assert stage.kicks("b").ok
    assert south.got(Notice).worker_id == "b"
    assert "kick" not in north.notices
    assert not stage.kicks("nobody").ok


def test_history_counts_workers_and_says_whose_a_push_is() -> None:
    stage, (north,) = a_tree(north=3)
    north.pulls()
    north.pushes(5, contents={"a": 1, "b": 2, "c": 3}, workers=3)
    line = round_line(stage.state, stage.reports[-1], FIGURES)
    assert (line["alive"], line["averaged"]) == (3, 3)
    assert [(each["id"], each["workers"]) for each in line["workers"]] == [("north", 3)]


def test_site_that_was_given_up_is_missing_until_it_is_back() -> None:
    stage, (north, south) = a_tree(north=3, south=0)
    north.dies()
    south.dies()
    stage.passes(20.0)
    (away,) = stage.shown()["sites_away"]
    assert (away["name"], away["workers"], away["away_s"] > 10.0) == ("north", 3, True)
    stage.worker("north").joins(workers=3)
    assert stage.shown()["sites_away"] == []


def test_site_is_not_missing_any_more_once_its_workers_are_elsewhere() -> None:
    stage, (north, south) = a_tree(north=2, south=0)
    tells(north, Behind("a"), Behind("b"))
    north.dies()
    stage.passes(20.0)
    tells(south, Behind("a"))
    assert [each["name"] for each in stage.shown()["sites_away"]] == ["north"], "b is missing"
    stage.worker("b").joins()
    assert stage.shown()["sites_away"] == []


# At the relay: what its parent tells it.


def hears(stage: Stage, what: str, **fields: Any) -> None:
    stage.happens(events.Told(Notice(what, **fields)))


def a_site(*names: str) -> tuple[Stage, list[Puppet]]:
    return a_run(*names, relays=True)


def test_order_of_the_parent_goes_to_all_and_their_answers_are_its_reply() -> None:
    stage, (a, b) = a_site("a", "b")
    hears(stage, "save_all", round=77)
    assert a.got(Notice).round == b.got(Notice).round == 77
    a.sends(Heartbeat(a.token(), 1, saved=77))
    hears(stage, "save_all", round=77)  # it is told again after the way was broken
    (reply,) = orders.replies(stage.state)
    assert reply == Reply("save_all", 77, waiting=("b",), saved=("a",))
    assert a.notices.count("save_all") == 1


def test_kick_of_the_parent_removes_the_worker_or_goes_further_down() -> None:
    stage, (a, _) = a_site("a", "b")
    deep = stage.worker("deep").joins(workers=1)
    tells(deep, Behind("x"))
    hears(stage, "kick", worker_id="a")
    assert a.notices[-1] == "kicked"
    assert "a" not in stage.here
    hears(stage, "kick", worker_id="x")
    assert deep.got(Notice).worker_id == "x"
    hears(stage, "kick", worker_id="gone")
    assert stage.said("'gone'")


def test_run_that_is_over_at_the_hub_is_over_at_the_site() -> None:
    stage, (a, b) = a_site("a", "b")
    a.begins(50)
    hears(stage, "last_round", text="Round 3 is the last one.", round=3)
    hears(stage, "over", text="The run is over: --max-rounds is 4.")
    assert a.notices[-2:] == b.notices[-2:] == ["last_round", "over"]
    assert a.got(Error).push_id == 50
    a.leaves()
    b.leaves()
    stage.passes(1.0)
    (end,) = stage.ends
    assert (end.reason, end.is_complete) == ("--max-rounds is 4", True)


@pytest.mark.parametrize(
    "settings",
    [
        {"outer_lr": 0.5},
        {"sync_every": 5, "grace": 1.0},
        {"max_rounds": 5},
    ],
)
def test_what_is_the_runs_is_not_set_at_a_relay(settings: dict[str, Any]) -> None:
    stage, _ = a_site("a", "b")
    stage.state.parent = Parent("tcp://hub:8512", "north")
    answer = stage.asks("set", **settings)
    assert not answer.ok
    assert stage.asks("set", min_workers=1, workers=2).ok
    assert "tcp://hub:8512" in stage.asks("save").text
    assert stage.shown()["outer"]["optimizer"] == "the parent's"


def test_site_whose_parent_is_away_says_so_and_for_how_long() -> None:
    stage, _ = a_site("a", "b")
    stage.state.parent = Parent("tcp://hub:8512", "north", lost_at=stage.now - 40.0)
    found = stage.shown()
    assert (found["state"], found["parent"]["lost_s"]) == ("waiting", 40.0)
