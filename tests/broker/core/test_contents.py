"""Pushes of relays: what is in them counts once, whole or not at all, and shows as many workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco_broker.core.versions.forgotten import Forgotten
from diloco_broker.storage.audit_log import AuditLog
from diloco_protocol.messages import Error, Heartbeat, Released, Standing
from diloco_protocol.version import ABSENT_REMEMBERED, PUSHES_REMEMBERED, Counted, Ledger
from kit.core_harness import Puppet, Stage, a_stage


def sites(*relays: str, direct: tuple[str, ...] = (), **fields: Any) -> tuple[Stage, list[Puppet]]:
    """A run with these relays, each with two workers behind it, and workers that came directly."""
    stage = a_stage(workers=len(relays) + len(direct), relays=True, **fields)
    puppets = [stage.worker(name) for name in (*direct, *relays)]
    for puppet in puppets:
        puppet.joins(workers=2 if puppet.worker_id in relays else None)
    stage.provide()
    for puppet in puppets:
        puppet.pulls()
    return stage, puppets


def later(*relays: str, direct: tuple[str, ...] = (), **fields: Any) -> tuple[Stage, list[Puppet]]:
    """The same past round one, which waits for everybody; in it each pushed 900, 901, ..."""
    stage, puppets = sites(*relays, direct=direct, **fields)
    for number, puppet in enumerate(puppets, start=900):
        contents = {f"behind-{puppet.worker_id}": number} if puppet.worker_id in relays else None
        puppet.pushes(number, contents=contents)
    for puppet in puppets:
        puppet.pulls()
    assert stage.counters == [1]
    return stage, puppets


def pushes_for(relay: Puppet, push_id: int, **contents: int) -> None:
    relay.pushes(push_id, weight=float(len(contents)), contents=contents, workers=len(contents))


def named(stage: Stage) -> dict[str, list[int]]:
    """The push ids of the ledger, by worker."""
    return {name: [each.push_id for each in pushes] for name, pushes in stage.ledger.pushes.items()}


def test_ledger_names_what_is_in_the_push_of_a_relay() -> None:
    stage, (c, north) = sites("north", direct=("c",))
    c.pushes(1)
    pushes_for(north, 2, a=10, b=11)
    assert named(stage) == {"c": [1], "a": [10], "b": [11], "north": [2]}
    ledger = stage.ledger
    assert all(ledger.names_whole(*each) for each in (("a", 10), ("b", 11), ("north", 2)))


def test_relay_weighs_and_shows_as_many_workers_as_stand_behind_it() -> None:
    stage, (c, north) = sites("north", direct=("c",))
    assert stage.shown()["counts"] == {"alive": 3, "participating": 0, "averaged": 0, "due": 3}
    pushes_for(north, 2, a=10, b=11)
    assert stage.shown()["counts"] == {"alive": 3, "participating": 2, "averaged": 0, "due": 3}
    c.pushes(1)
    c.pulls()
    assert stage.shown()["counts"]["averaged"] == 3
    assert stage.shown()["totals"]["contributions"] == 3
    assert stage.reports[-1].weight == 3.0
    assert c.got(Released).averaged == 3
    told = {each["id"]: each["workers"] for each in stage.shown()["workers"]}
    assert told == {"c": None, "north": 2}


def test_heartbeats_of_a_relay_say_how_many_are_alive_behind_it() -> None:
    stage, (north,) = sites("north")
    for workers, shown in ((0, 0), (5, 5), (10**12, stage.config.max_workers)):
        north.sends(_beat(north, workers))
        assert stage.shown()["counts"]["alive"] == shown


def _beat(relay: Puppet, workers: int) -> Any:
    return Heartbeat(relay.token(), 1, workers=workers)


def test_push_of_a_relay_counts_whole_or_not_at_all() -> None:
    stage, (c, north) = later("north", direct=("c",), chunks=3)
    north.offers(2, contents={"a": 10, "b": 11}, workers=2)
    north.delivers([0, 1])
    north.dies()
    c.pushes(1)
    assert stage.counters == [2]
    assert named(stage)["c"][-1] == 1
    assert not {"a", "b"} & named(stage).keys()
    assert all(("north", 2) not in each for each in stage.counted())


def test_relay_that_comes_back_goes_on_with_its_push() -> None:
    stage, (c, north) = sites("north", direct=("c",), chunks=3)
    contents = {"a": 10, "b": 11}
    north.offers(2, contents=contents, workers=2)
    north.delivers([0])
    north.joins(workers=2)
    grant = north.offers(2, contents=contents, workers=2)
    assert grant.standing is Standing.RESUME
    north.completes(1, 2)
    c.pushes(1)
    assert named(stage)["north"] == [2]
    assert north.offers(2, contents=contents, workers=2).standing is Standing.COUNTED


# The same push a second time.


def test_relay_that_lost_its_memory_does_not_count_a_push_again_that_waits_for_its_round() -> None:
    stage, (c, north) = later("north", direct=("c",))
    pushes_for(north, 2, a=10, b=11)
    north.dies()
    again = stage.worker("north").joins(workers=2)
    again.begins(3, contents={"a": 10, "d": 12}, workers=2)
    assert again.error().code == "contained"
    assert not again.error().retry
    c.pushes(1)
    assert stage.counters == [2], "the round does not wait for what was refused"
    assert named(stage)["a"] == [10]
    assert "d" not in named(stage)
    pushes_for(again, 4, d=12)
    c.pulls()
    c.pushes(5)
    assert named(stage)["d"] == [12]


def test_unfinished_push_of_a_relay_gives_way_to_its_next_with_the_same_contents() -> None:
    stage, (c, north) = sites("north", direct=("c",), chunks=3)
    north.offers(2, contents={"a": 10}, workers=1)
    north.delivers([0])
    pushes_for(north, 3, a=10, b=11)
    c.pushes(1)
    assert named(stage)["north"] == [3]


@pytest.mark.parametrize("is_whole", [True, False])
def test_worker_that_moves_to_another_relay_counts_once(is_whole: bool) -> None:
    stage, (north, south) = later("north", "south", chunks=3)
    north.offers(2, contents={"a": 10}, workers=1)
    north.completes() if is_whole else north.delivers([0])
    south.begins(3, contents={"a": 10, "b": 11}, workers=2)
    assert south.error().code == "contained"
    if is_whole:
        assert stage.counters == [2], "north's is the whole round"
    else:
        north.dies()
    pushes_for(south, 4, b=11, **({} if is_whole else {"a": 10}))
    if is_whole:
        pushes_for(north, 5, c=12)
    assert named(stage)["a"] == [10]
    assert named(stage)["b"] == [11]


def test_worker_that_leaves_its_relay_for_the_broker_counts_once() -> None:
    stage, (a, north) = later("north", direct=("a",))
    pushes_for(north, 2, a=10, b=11)
    assert stage.counters == [1], "the round waits for a itself"
    a.begins(10)
    assert a.error().code == "under_way"
    assert a.error().retry
    assert stage.counters == [2]
    assert a.offers(10).standing is Standing.COUNTED


def test_worker_that_leaves_the_broker_for_a_relay_counts_once() -> None:
    stage, (c, a, north) = later("north", direct=("c", "a"))
    a.pushes(10)
    north.begins(2, contents={"a": 10, "b": 11}, workers=2)
    assert north.error().code == "contained"
    c.pushes(1)
    assert stage.counters == [2]
    assert named(stage)["a"] == [901, 10]
    assert "b" not in named(stage)


def test_push_that_was_put_off_is_under_way_too() -> None:
    _, (_c, north, south) = sites("north", "south", direct=("c",))
    pushes_for(north, 2, a=10)
    waits = north.offers(3, contents={"a": 20}, workers=1)
    assert waits.standing is Standing.WAIT
    south.begins(4, contents={"a": 20}, workers=1)
    assert south.error().code == "contained"


# What the ledger has forgotten.


def cut_off_for_long(**fields: Any) -> tuple[Stage, Puppet, Puppet]:
    """A relay was cut off with a push in flight; its worker a has moved, and counted on without it."""
    stage, (c, north) = later("north", direct=("c",), **fields)
    north.offers(50, contents={"a": 10, "b": 11}, workers=2)
    north.loses_connection()
    stage.passes_with(100, "c")
    a = stage.worker("a").joins()
    a.pulls()
    for number in (10, *range(100, 109)):
        c.pushes(1000 + number)
        a.pushes(number)
        c.pulls()
        a.pulls()
    assert 10 not in named(stage)["a"]
    return stage, c, north


def test_relay_that_was_cut_off_for_long_does_not_count_what_has_been_forgotten() -> None:
    stage, c, north = cut_off_for_long()
    again = stage.worker("north").joins(workers=2)
    again.begins(50, base=north.base, contents={"a": 10, "b": 11}, workers=2)
    assert again.error().code == "stale"
    again.pulls()
    pushes_for(again, 51, b=201)
    c.pushes(2000)
    assert named(stage)["b"] == [201]
    assert named(stage)["a"][-1] == 108


def test_nobody_is_taken_for_forgotten_who_was_only_slow() -> None:
    """With its own few pushes, however many versions the others have made since its base."""
    stage, (c, north) = later("north", direct=("c",), quorum=1)
    for number in range(PUSHES_REMEMBERED + 2):
        for turn in range(PUSHES_REMEMBERED + 2):
            c.pushes(1000 + 100 * number + turn)
            c.pulls()
        pushes_for(north, 10 + number, a=10 + number)
        c.pushes(1000 + 100 * number + 50)
        c.pulls()
        assert not north.all(Error)
        assert named(stage)["a"][-1] == 10 + number
        north.pulls()


def test_push_is_as_old_as_its_own_base_and_not_as_the_oldest_beside_it() -> None:
    stage, _, north = cut_off_for_long()
    again = stage.worker("north").joins(workers=2)
    newest = stage.version().counter
    contents = {"a": 200, "b": 11}
    again.begins(50, base=north.base, contents=contents, workers=2, bases={"a": newest, "b": 1})
    assert not again.all(Error)


def test_hub_that_was_started_again_supposes_the_worst_of_what_it_has_not_seen() -> None:
    forgotten = Forgotten()
    forgotten.see(20, Ledger({"a": tuple(map(Counted, range(PUSHES_REMEMBERED)))}))
    bases = {"a": 11, "b": 11}
    assert forgotten.may_name(bases, has_rounds=True) == ["a"]
    assert not forgotten.may_name({"a": 12}, has_rounds=True)
    assert not forgotten.may_name(bases, has_rounds=False)


# What nobody may say.


@pytest.mark.parametrize(
    "fields",
    [
        {"contents": None},
        {"contents": {}, "workers": 0},
        {"contents": {"a": 10}, "workers": 2},
        {"contents": {"a": 10}, "workers": 0},
        {"contents": {"": 10}},
        {"contents": {"a\n": 10}},
        {"contents": {"a" * 65: 10}},
        {"contents": {"a": -1}},
        {"contents": {"a": 1 << 64}},
        {"contents": {"a": 10}, "bases": {"b": 1}},
        {"contents": {"north": 5}},
        {"contents": {f"w{number}": number for number in range(20)}, "workers": 20},
    ],
)
def test_contents_that_cannot_be_are_refused_and_change_nothing(fields: Mapping[str, Any]) -> None:
    stage, (north,) = sites("north", max_workers=10)
    north.begins(2, **fields)
    assert north.error().code == "bad_push"
    assert not list(stage.state.submissions)
    assert stage.state.members.known == {"north"}


def test_relay_that_names_many_takes_no_room_from_one_that_was_there_before() -> None:
    stage, (north, south) = sites("north", "south", max_workers=10)
    pushes_for(south, 1, a=1)
    pushes_for(north, 2, **{f"made-up-{number}": number for number in range(7)})
    assert stage.counters == [1]
    south.pulls()
    south.begins(3, contents={"a": 3}, workers=1)
    assert not south.all(Error)
    south.begins(4, contents={"a": 4, "b": 4}, workers=2)
    assert south.error().code == "bad_push"


@pytest.mark.parametrize("fields", [{"contents": {"b": 10}}, {"workers": 2}])
def test_worker_cannot_speak_for_others(fields: Mapping[str, Any]) -> None:
    _, (a, _) = sites("north", direct=("a",))
    a.begins(1, **fields)
    assert a.error().code == "bad_push"


def test_relay_is_refused_where_pushes_count_in_part() -> None:
    stage = a_stage(workers=1)
    north = stage.worker("north").joins(workers=2)
    assert north.error().code == "not_allowed"
    assert "--relays" in north.error().text


def test_ledger_stays_small_whatever_relays_name() -> None:
    stage, (north,) = sites("north", max_workers=10)
    for number in range(400):
        pushes_for(north, number, **{f"w{number}": number, "a": number})
        north.pulls()
    assert len(named(stage)) <= ABSENT_REMEMBERED + 3
    assert len(named(stage)["a"]) == PUSHES_REMEMBERED


def test_workers_behind_relays_are_remembered_as_long_as_these_are_here() -> None:
    stage, (north, south) = sites("north", "south")
    for number in range(200):
        pushes_for(south, 1000 + number, **{f"s{number}": number})
        pushes_for(north, number, a=number)
        north.pulls()
    assert named(stage)["a"][-1] == 199


def test_audit_log_follows_pushes_through_relays(tmp_path: Path) -> None:
    stage, (north,) = sites("north")
    pushes_for(north, 2, a=10, b=11)
    log = AuditLog(tmp_path / "audit", "e")
    log.add(stage.audits[-1])
    log.close()
    (push,) = json.loads((tmp_path / "audit").read_text())["pushes"]
    assert push["contents"] == {"a": f"{10:016x}", "b": f"{11:016x}"}
    assert not north.all(Error)
