"""Relays in displays: each worker stands below its relay, counts as one, and a relay as none."""

from __future__ import annotations

import json
from typing import Any

from diloco_broker.cli.status_text import as_text
from diloco_protocol.feed import Snapshot, parse_snapshot
from diloco_protocol.monitor import tree
from diloco_tools.monitor.feed.model import FeedModel
from diloco_tools.monitor.orders import kick
from diloco_tools.monitor.terminal.scene import View
from kit.feed_snapshots import frame, status, worker
from kit.top_text import drawn


def behind(name: str, level: int = 0, **keys: Any) -> dict[str, Any]:
    told = {"state": "training", "health": "ok", "step": 700, "inner_step": 20, "sync_every": 100}
    return {"worker_id": name, "level": level, "beat_age_s": 2.0, **told, **keys}


NORTH = worker(
    "north",
    workers=4,
    behind=[
        behind("a", host="desk-a"),
        behind("cellar", workers=2, state="waiting"),
        behind("y", 1, steps_per_s=1.0),
        behind("x", 1, steps_per_s=9.0, health="slow"),
        behind("b", loss=1.25),
    ],
)
CREW = [worker("direct"), NORTH, worker("south", workers=0)]


def tree_of(workers: list[dict[str, Any]] | None = None, **keys: Any) -> dict[str, Any]:
    counts = {"alive": 5, "participating": 3, "averaged": 5}
    usual = status()["round"]
    missing = {**usual, "expected": ["direct", "north"], "arrived": [], "missing": ["north"]}
    return status(workers=workers or CREW, counts=counts, **{"round": missing} | keys)


def snapshot(document: dict[str, Any]) -> Snapshot:
    return parse_snapshot(frame(document))


def model_of(document: dict[str, Any]) -> FeedModel:
    """A model that took this snapshot at 100 s."""
    model = FeedModel()
    model.update(snapshot(document), 100.0)
    return model


def names(text: str) -> list[str]:
    """The first word of each line of the table, with what stands before it."""
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines) if "WORKER" in line or "worker " in line) + 1
    found = []
    for line in lines[first:]:
        if not line.strip():
            break
        inset = len(line) - len(line.lstrip())
        found.append(" " * inset + line.split()[0])
    return found


BELOW = ["direct", "north", "  a", "  b", "  cellar", "    x", "    y", "south"]


def test_one_screen_has_each_worker_below_its_relay() -> None:
    text = drawn(tree_of(), 100)
    assert names(text) == BELOW
    assert "north (4)" in text and "cellar (2)" in text
    assert "training: north (4)" in text


def test_status_has_each_worker_below_its_relay() -> None:
    assert names(as_text(tree_of())) == BELOW


def test_table_is_sorted_and_filtered_within_each_site() -> None:
    view = View(order=4)  # by speed, slowest first
    workers = snapshot(tree_of()).workers
    assert [each.id for each in view.rows(workers) if each.level == 2] == ["y", "x"]
    view.wanted = "desk-a"
    assert [each.id for each in view.rows(workers)] == ["north", "a"]


def test_ages_of_those_behind_relays_go_on() -> None:
    aged_snapshot = model_of(tree_of()).at(107.0)
    assert aged_snapshot is not None
    aged = {each.id: each.beat_age_s for each in tree.everyone(aged_snapshot.workers)}
    assert (aged["a"], aged["y"]) == (9.0, 9.0)


def test_nobody_knows_how_those_behind_a_lost_relay_are() -> None:
    document = tree_of([NORTH | {"health": "lost"}])
    assert {w.health for w in tree.without_relays(snapshot(document).workers)} == {tree.UNKNOWN}
    reasons = model_of(document).verdict(100.0).reasons
    assert reasons == ("north is lost, last heard 0.4 s ago",)


def test_worker_that_is_not_well_behind_a_relay_is_a_reason() -> None:
    reasons = model_of(tree_of()).verdict(100.0).reasons
    assert reasons == ("x is slow, last heard 2.0 s ago",)


def test_who_stands_in_no_row_is_counted() -> None:
    assert "72 downstream" in as_text(tree_of([NORTH | {"workers": 76}]))


def test_relay_shows_its_parent_and_how_long_that_is_away() -> None:
    parent = {"address": "tcp://hub:8512", "name": "north", "lost_s": None, "offered_s": 3.0}
    for lost, said in ((None, "connected"), (40.0, "UNREACHABLE for 40 s")):
        text = as_text(tree_of(parent=parent | {"lost_s": lost}))
        assert "tcp://hub:8512 as north" in text and said in text


def test_hub_says_which_site_is_missing() -> None:
    document = tree_of(sites_away=[{"name": "west", "workers": 4, "away_s": 33.0}])
    assert "site west (4 workers) for 40 s" in drawn(document, 100, later_s=7.0)
    assert (
        "site west is missing, with 4 workers, for 40 s"
        in model_of(document).verdict(107.0).reasons
    )


def test_questions_say_what_becomes_of_a_site_and_of_a_worker_behind_a_relay() -> None:
    shown = snapshot(tree_of())
    found = {each.id: each for each in tree.everyone(shown.workers)}
    relay = kick(found["north"], shown).text
    assert "The workers downstream wait" in relay
    assert "1 worker is left" in relay
    assert "Its relay does it" in kick(found["a"], shown).text


def test_programs_get_the_whole_tree() -> None:
    (north,) = (each for each in snapshot(tree_of()).workers if each.id == "north")
    assert json.loads(json.dumps(tree_of()))["workers"][1]["behind"][2]["worker_id"] == "y"
    assert [(each.worker_id, each.level) for each in north.behind] == [
        *(("a", 0), ("cellar", 0), ("y", 1), ("x", 1), ("b", 0)),
    ]
