"""Relays in displays: each worker stands below its relay, counts as one, and a relay as none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_broker.cli.status_text import as_text
from diloco_protocol.feed import Snapshot, parse_snapshot
from diloco_protocol.monitor import tree
from diloco_tools.monitor.feed.model import FeedModel, Freshness
from diloco_tools.monitor.feed.series import RunSeries
from diloco_tools.top.drawing import sentences
from diloco_tools.top.drawing.full_screen import picture
from diloco_tools.top.drawing.notation import Glyphs
from diloco_tools.top.drawing.scene import Scene, View
from diloco_tools.top.drawing.text_screen import screen
from kit.feed_snapshots import frame, status, worker

UTF8 = Glyphs.for_encoding("utf-8")


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


def scene_of(document: dict[str, Any], more: float = 0.0) -> Scene:
    model = FeedModel()
    model.update(snapshot(document), 100.0)
    return Scene(model, RunSeries(), 100.0 + more, Freshness.LIVE, more, "tcp://hub:8513")


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
    text = screen(scene_of(tree_of()), 100, UTF8).plain
    assert names(text) == BELOW
    assert "north (4)" in text
    assert "cellar (2)" in text
    assert "training: north (4)" in text


def test_status_has_each_worker_below_its_relay() -> None:
    text = as_text(snapshot(tree_of()).raw)
    told = ["direct", "north", "  a", "  cellar", "    y", "    x", "  b", "south"]
    assert names(text) == told
    assert "training    north (4)" in text


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
def test_full_screen_sorts_and_filters_within_each_site(size: tuple[int, int]) -> None:
    view = View(order=4)  # by speed, slowest first
    drawn = picture(scene_of(tree_of()), view, *size, UTF8)
    assert [each.id for each in drawn.rows if each.level == 2] == ["y", "x"]
    view.wanted = "desk-a"
    drawn = picture(scene_of(tree_of()), view, *size, UTF8)
    assert [each.id for each in drawn.rows] == ["north", "a"]
    assert all(line.cell_len <= size[0] for line in drawn.lines)


def test_ages_of_those_behind_relays_go_on() -> None:
    shown = scene_of(tree_of(), more=7.0).snapshot()
    assert shown is not None
    aged = {each.id: each.beat_age_s for each in tree.everyone(shown.workers)}
    assert (aged["a"], aged["y"]) == (9.0, 9.0)


def test_nobody_knows_how_those_behind_a_lost_relay_are() -> None:
    document = tree_of([NORTH | {"health": "lost"}])
    assert {w.health for w in tree.without_relays(snapshot(document).workers)} == {tree.UNKNOWN}
    reasons = scene_of(document).model.verdict(100.0).reasons
    assert reasons == ("north is lost, last heard 0.4 s ago",)


def test_worker_that_is_not_well_behind_a_relay_is_a_reason() -> None:
    reasons = scene_of(tree_of()).model.verdict(100.0).reasons
    assert reasons == ("x is slow, last heard 2.0 s ago",)


def test_who_stands_in_no_row_is_counted() -> None:
    document = tree_of([NORTH | {"workers": 76}])
    assert "72 behind relays not listed" in screen(scene_of(document), 120, UTF8).plain
    assert "72 behind relays not listed" in as_text(document)


def test_relay_shows_its_parent_and_how_long_that_is_away() -> None:
    parent = {"address": "tcp://hub:8512", "name": "north", "lost_s": None, "offered_s": 3.0}
    here = tree_of(parent=parent)
    away = tree_of(parent=parent | {"lost_s": 40.0})
    for text in (screen(scene_of(here), 100, UTF8).plain, as_text(here)):
        assert "tcp://hub:8512" in text
        assert "as north" in text
        assert "the site's push is there" in text
    assert "not there for 40s" in screen(scene_of(away), 100, UTF8).plain
    assert "NOT THERE for 40.0 s" in as_text(away)


def test_hub_says_which_site_is_missing() -> None:
    document = tree_of(sites_away=[{"name": "west", "workers": 4, "away_s": 33.0}])
    scene = scene_of(document, more=7.0)
    assert "site west (4) for 40s" in screen(scene, 100, UTF8).plain
    assert any(
        "site west (4) for 40s" in line.plain for line in picture(scene, View(), 80, 24, UTF8).lines
    )
    assert "site west (4) for 33.0 s" in as_text(document)
    assert "site west is missing, with 4 workers, for 40 s" in scene.model.verdict(107.0).reasons


def test_questions_say_what_becomes_of_a_site_and_of_a_worker_behind_a_relay() -> None:
    shown = snapshot(tree_of())
    found = {each.id: each for each in tree.everyone(shown.workers)}
    relay = sentences.kick(found["north"], shown, UTF8).plain
    assert "The workers behind it wait" in relay
    assert "1 worker is left" in relay
    assert "Its relay does it" in sentences.kick(found["a"], shown, UTF8).plain
    assert "as its relay has told" in sentences.details(found["a"], None, UTF8).plain
    assert "4 workers" in sentences.details(found["north"], None, UTF8).plain


def test_programs_get_the_whole_tree() -> None:
    (north,) = (each for each in snapshot(tree_of()).workers if each.id == "north")
    assert json.loads(json.dumps(tree_of()))["workers"][1]["behind"][2]["worker_id"] == "y"
    assert [(each.worker_id, each.level) for each in north.behind] == [
        *(("a", 0), ("cellar", 0), ("y", 1), ("x", 1), ("b", 0)),
    ]
