"""Workers that come through relays: which relay it is, wherever one is shown, and how the relays are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_broker.cli.status_text import as_text
from diloco_broker.core.operations.status import round_line
from diloco_broker.core.relays.relay import Relay
from diloco_protocol.feed import parse_snapshot
from diloco_tools.monitor.terminal.scene import View
from kit.core_harness import FIGURES, a_run
from kit.exporter_scrapes import exported
from kit.feed_snapshots import frame, status, worker
from kit.past_runs import closed, start
from kit.report_pages import facts_of
from kit.top_screen import shown
from kit.top_text import drawn

DIRECT = worker("a")
CREW = [DIRECT, worker("b", via="north"), worker("c", via="north-room1")]
TEXTS: list[Callable[[dict[str, Any]], str]] = [
    as_text,
    lambda document: drawn(document, 140),
    lambda document: shown(document, (140, 40)),
]


@pytest.mark.parametrize("draw", TEXTS, ids=["status", "one screen", "full screen"])
def test_column_is_there_where_some_worker_comes_through_a_relay(
    draw: Callable[[dict[str, Any]], str],
) -> None:
    text = draw(status(workers=CREW))
    assert " via " in text.lower() and "north-room1" in text
    assert " via " not in draw(status(workers=[DIRECT])).lower()


def test_filter_finds_those_that_come_through_a_relay() -> None:
    workers = parse_snapshot(frame(status(workers=CREW))).workers
    assert [each.id for each in View(wanted="NORTH").rows(workers)] == ["b", "c"]
    assert [each.id for each in View(wanted="room1").rows(workers)] == ["c"]


def test_core_tells_it_in_the_feed_and_in_the_history() -> None:
    stage, _ = a_run("a", "b")
    member = stage.state.members.named("b")
    assert member is not None
    member.relay = Relay("north", 1, b"", b"", 0.0, combines=True)
    for puppet in stage.puppets.values():
        puppet.pushes(7)
    line = round_line(stage.state, stage.reports[-1], FIGURES)
    for told in (stage.shown()["workers"], line["workers"]):
        assert {each["id"]: each["via"] for each in told} == {"a": "", "b": "north"}


def test_report_has_the_last_relay_of_each_worker(tmp_path: Path) -> None:
    lines = [start(1e9), closed(1e9 + 40, 0, "a", "b"), closed(1e9 + 80, 1, "a", "b")]
    lines[1]["workers"][0]["via"], lines[2]["workers"][0]["via"] = "south", "north"
    facts = facts_of(tmp_path, *lines)
    assert {each.id: each.via for each in facts.workers} == {"a": "north", "b": ""}


def test_relay_is_silent_from_ten_seconds_on() -> None:
    relay = {"name": "south", "workers": 1, "held_bytes": 0, "silent_s": 4.0}
    document = status(relays=[relay])
    assert "silent" not in drawn(document)
    assert "south 1 worker, silent 11 s" in drawn(document, later_s=7.0)


def test_exporter_has_figures_of_each_relay() -> None:
    relays = [
        {"name": "north", "workers": 4, "held_bytes": 900, "silent_s": 0.5},
        {"name": "south", "workers": 3, "held_bytes": 0, "silent_s": 12.0},
    ]
    seen = exported(status(relays=relays))
    for metric, values in {
        "diloco_relay_workers": [4, 3],
        "diloco_relay_held_bytes": [900, 0],
        "diloco_relay_heard_age_seconds": [0.5, 12.0],
    }.items():
        assert [seen[metric, (name,)] for name in ("north", "south")] == values
    assert not any(name.startswith("diloco_relay") for name, _ in exported(status()))
