"""The contract of the displays: each field that the catalogue says is shown in a display is shown there.

Every field gets a distinctive value, and what the catalogue makes of that has to stand in the display.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_broker.cli.status_text import as_text
from diloco_protocol.feed import Snapshot, parse_snapshot
from diloco_protocol.monitor.fields import (
    DASHBOARD,
    IN_TABLES,
    OF_SNAPSHOT,
    OF_WORKER,
    SETTINGS,
    STATUS,
    TOP,
    Field,
    columns,
)
from diloco_protocol.monitor.rows import ROWS, Listed, cell
from diloco_protocol.quantities import FORMATS, NONE, setting
from diloco_tools.monitor.feed.model import Freshness
from diloco_tools.monitor.metrics.metrics import TABLES
from diloco_tools.monitor.report.page import page_of
from diloco_tools.monitor.web.words import titles as titles_of_page
from diloco_tools.monitor.web.words import words
from kit.exporter_scrapes import exported, status
from kit.feed_snapshots import frame, worker
from kit.past_runs import closed, start
from kit.report_pages import Page, facts_of
from kit.top_screen import shown
from kit.top_text import drawn

WIDE = 400
# A snapshot in which every row has something to say.
RICH = status(
    min_workers=2,
    security="loopback",
    relays=[{"name": "north", "workers": 4, "silent_s": 12.0}],
    reducer={"quorum": 2, "grace_s": 4.0, "late": "drop", "submissions": 6, "waiting": 2},
    outer={
        "optimizer": "dn",
        "lr": 0.75,
        "momentum": 0.5,
        "variant": "paper",
        "buffer": 4,
        "c": 0.1,
        "lr_schedule": "linear:2:0.5",
        "momentum_warmup": "cosine:2:0.1",
        "momentum_restart": 8,
        "nesterov": True,
    },
    num_fragments=2,
    save_every=3,
    term=1,
    standby={"holds_lease": True, "lease_s": 5.0, "heard_age_s": 0.5},
    checkpoint={"folder": "/runs/a", "round": 410, "age_s": 63.5, "error": "disk full"},
)
ASYNC = {"mode": "async"}
IDLE = worker("idle", state="waiting")
# What makes a field distinctive where a value at its path does not; `None` at the end of a path.
EDITS: dict[str, dict[str, Any]] = {
    "round": {"round": RICH["round"] | {"number": 4711}},
    "round.arrived": {"round": RICH["round"] | {"arrived": list("abcde")}},
    "applied": ASYNC | {"fragments": [{"fragment": 0, "gradients": 4711}]},
    "reducer.submissions": ASYNC | {"reducer": {"submissions": 4711}},
    "reducer.waiting": ASYNC | {"reducer": {"waiting": 4711}},
    "missing": {"round": RICH["round"] | {"missing": ["wombat"]}},
    "training": {"round": RICH["round"] | {"missing": ["wombat"]}, "workers": [worker("wombat")]},
    "why.reason": {"why": {"reason": "grace", "since_s": 4711.0}},
    "versions": {"fragments": [{"fragment": 0, "version": 4711}]},
    "contributions": {"fragments": [{"fragment": 0, "contributions": 4711}]},
    "state": {"state": "paused", "paused_for_s": 4711.0},
    "security": {"security": "INSECURE"},
    "end.is_over": {"end": {"is_over": True}},
    "outer.nesterov": {"outer": {"optimizer": "sgd", "nesterov": False}},
    "standby.holds_lease": {"standby": {"holds_lease": False, "lease_s": 5.0}},
    "checkpoint.durable": {"checkpoint": {"folder": "/x", "durable": True}},
    "totals.rejected": {"totals": {"rejected": 4711, "refused": {"late": 4711}}},
    "asynchronous.dylu": {"asynchronous": {"dylu": False, "slots": 2}},
    "fragment_update_alpha": {"fragment_update_alpha": 0.4711},
    "reducer.max_delta_norm": {"reducer": {"max_delta_norm": 4711.0}},
    "asynchronous.cgad_decay": {"asynchronous": {"cgad_decay": 4711.0}},
    "asynchronous.cgad_epsilon": {"asynchronous": {"cgad_epsilon": 4711.0}},
    "asynchronous.cgad_cutoff": {"asynchronous": {"cgad_cutoff": 4711}},
    "asynchronous.deadline_s": {"asynchronous": {"deadline_s": 4711.0}},
    "reducer.trim": {"reducer": {"trim": 0.47}},
    "last_round.staleness": {"last_round": {"number": 9, "staleness": 4711}},
}


def distinctive(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 4711
    if isinstance(value, float):
        return 4711.0
    return "wombat"


def at_path(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The document with another value there."""
    name, _, rest = path.partition(".")
    return document | {name: at_path(document.get(name) or {}, rest, value) if rest else value}


def read(document: dict[str, Any]) -> Snapshot:
    return parse_snapshot(frame(document))


def edited(field: Field) -> dict[str, Any]:
    """A snapshot in which this field has a distinctive value."""
    if field.path in EDITS:
        return RICH | EDITS[field.path]
    return at_path(RICH, field.path, distinctive(field.value(read(RICH))))


def flat(text: str) -> str:
    return " ".join(text.replace(NONE, "-").split())


def page(document: dict[str, Any]) -> str:
    """Everything that the dashboard's page gets to show of a snapshot."""
    made = words(read(document), Freshness.LIVE, lambda _: None)
    rows = [", ".join(text for text, _ in parts) for _, parts in made["facts"] + made["rows"]]
    cells = [" ".join(map(str, cell)) for each in made["workers"] for cell in each["cells"]]
    titles = [each["title"] for each in titles_of_page()]
    return "\n".join([*rows, *titles, *cells])


DISPLAYS: dict[str, Callable[[dict[str, Any]], str]] = {
    STATUS: as_text,
    TOP: lambda document: drawn(document, WIDE),
    DASHBOARD: page,
}


def test_every_row_has_fields_and_every_field_a_row_that_is_shown() -> None:
    used = {field.row for _, fields in TABLES.values() for field in fields} - {""}
    assert used == set(ROWS)
    for _, fields in TABLES.values():
        assert len({field.path for field in fields}) == len(fields)
        assert {field.format for field in fields} <= FORMATS.keys()
        assert all(field.help.endswith(".") for field in fields if field.metric)


@pytest.mark.parametrize("path", [field.path for field in OF_SNAPSHOT if field.row])
def test_field_of_a_row_is_shown_where_the_catalogue_says(path: str) -> None:
    (field,) = (each for each in OF_SNAPSHOT if each.path == path)
    document = edited(field)
    said = field.part(read(document)).text
    assert said and said != field.part(read(RICH)).text, "the value shows"
    for display, draw in DISPLAYS.items():
        assert (flat(said) in flat(draw(document))) == (display in field.displays), display


def test_orders_data_sets_and_relays_are_shown_by_name() -> None:
    for draw in DISPLAYS.values():
        text = flat(draw(RICH))
        assert "save-all: no answer from b, 1 saved, 1 left" in text
        assert "text: epoch 2 of 3, 130 of 300 units counted, 12 handed out, 158 left" in text
        assert "north 4 workers, silent 12 s" in text


def test_full_screen_has_every_row_where_there_is_room() -> None:
    text = flat(shown(RICH, (WIDE, 80)))
    for field in OF_SNAPSHOT:
        if field.row and TOP in field.displays:
            assert flat(field.part(read(RICH)).text) in text, field.path


@pytest.mark.parametrize("path", [f.path for f in OF_WORKER if f.title and f.path[:4] != "rate"])
def test_field_of_a_worker_is_shown_in_the_tables_that_the_catalogue_says(path: str) -> None:
    (field,) = (each for each in OF_WORKER if each.path == path)
    one = worker("a", sync_age_s=9.0, via="north")
    document = RICH | {"workers": [one | {path: distinctive(one[path])}]}
    said = cell(field, Listed(read(document).workers[0])).text
    for display, draw in DISPLAYS.items():
        assert (f" {said} " in f"{flat(draw(document))} ") == (display in field.displays), display
        if display in field.displays and display is not DASHBOARD:  # some there have no title
            assert field.title.lower() in draw(document).lower()


def test_rates_are_known_to_the_full_screen_only() -> None:
    """A rate takes two snapshots."""
    titles = {field.title for field in columns(TOP)}
    assert {"Up/s", "Down/s"} <= titles
    assert titles >= {field.title for display in IN_TABLES for field in columns(display)}


OF_RUN = ("snapshot", "fragments", "orders", "data_sets", "relays", "workers")
METRICS = [(table, each.path) for table in OF_RUN for each in TABLES[table][1] if each.metric]


@pytest.mark.parametrize(("table", "path"), METRICS)
def test_metric_is_measured_as_the_catalogue_says(table: str, path: str) -> None:
    (field,) = (each for each in TABLES[table][1] if each.path == path)
    document = RICH | {"workers": [worker("a", sync_age_s=9.0)]}
    snapshot = read(document)
    record = snapshot if table == "snapshot" else getattr(snapshot, table)[0]
    expected = field.measured(record)
    found = [v for (name, _), v in exported(document).items() if name == f"diloco_{field.metric}"]
    assert expected is None or expected in found
    assert bool(found) is (expected is not None)


def test_report_lists_every_setting_under_its_label(tmp_path: Path) -> None:
    settings: dict[str, Any] = {}
    for number, path in enumerate(SETTINGS):
        settings = at_path(settings, path, f"value-{number}")
    for path in ("fragment_sync_delay", "num_fragments", "sync_every", "workers_wanted"):
        settings = at_path(settings, path, 4711)
    facts = facts_of(tmp_path, start(1e9, settings=settings), closed(1e9 + 40, 0, "a"))
    text = Page(page_of(facts)).text("settings")
    for number, (path, field) in enumerate(SETTINGS.items()):
        value: Any = settings
        for name in path.split("."):
            value = value[name]
        assert field.label.lower() in text.lower() and setting(value) in text, (number, path)
