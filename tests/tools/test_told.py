"""What the run was told is shown: in the feed, in `status`, by every display and by the exporter."""

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from diloco_broker import Broker, BrokerConfig
from diloco_broker.cli.status_text import as_text
from diloco_broker.core.operations.status import round_line
from diloco_broker.core.relays.relay import Relay
from diloco_protocol.feed import Asynchronous, Liveness, parse_snapshot
from diloco_protocol.monitor.fields import STATUS
from diloco_protocol.monitor.rows import rows_of
from diloco_tools.monitor.terminal.scene import View
from kit.core_harness import FIGURES, a_run, a_stage
from kit.feed_snapshots import frame, status, worker
from kit.past_runs import closed, start
from kit.process_kit import LOCAL
from kit.report_pages import facts_of
from kit.top_screen import ScreenPilot, document, screen, snapshot
from kit.top_text import drawn
from kit.unit_workers import UnitWorker

PIECES: dict[str, Any] = {"num_fragments": 2, "sync_every": 100}
ASYNC: dict[str, Any] = {"mode": "async"}
QUORUM: dict[str, Any] = {"quorum": 1}
CGAD: dict[str, Any] = ASYNC | {"outer": "cgad"}
DYLU: dict[str, Any] = ASYNC | {"dylu": True, "dylu_min_steps": 8, "max_staleness": 6}
# Each option that shapes a run: another value than the usual one, and the options that it needs.
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mode": ("async", {}),
    "workers": (3, {}),
    "min_workers": (2, {}),
    "sync_every": (77, {}),
    "max_rounds": (40, {}),
    "token_budget": (1000, {}),
    "max_time": ("90s", {}),
    "outer": ("sgd", {}),
    "outer_lr": (0.3, {}),
    "outer_momentum": (0.5, {}),
    "outer_lr_schedule": ("cosine:200:0.1", {}),
    "outer_momentum_warmup": ("cosine:200", {}),
    "outer_momentum_restart": (8, {}),
    "nesterov": (False, {}),
    "dn_buffer": (5, {"outer": "dn"}),
    "dn_c": (0.125, {"outer": "dn", "dn_buffer": 4}),
    "dn_variant": ("direct", {"outer": "dn"}),
    "cgad_decay": (0.5, CGAD),
    "cgad_cutoff": (7, CGAD),
    "cgad_epsilon": (0.01, CGAD),
    "staleness_weight": ("poly", ASYNC),
    "max_staleness": (7, ASYNC),
    "dylu": (True, ASYNC),
    "dylu_min_steps": (40, ASYNC | {"dylu": True}),
    "num_fragments": (2, {}),
    "fragment_pattern": ("balanced", PIECES),
    "fragment_sync_delay": (3, PIECES | {"fragment_max_delay": 5}),
    "fragment_update_alpha": (0.5, PIECES),
    "fragment_merge": ("rebase", PIECES),
    "fragment_max_delay": (9, PIECES | {"fragment_sync_delay": 3}),
    "deterministic": (True, {}),
    "relays": (True, {}),
    "weight_by": ("tokens", {}),
    "aggregate": ("clip-median-norm", {}),
    "max_delta_norm": (5.0, {}),
    "trim": (0.3, {"aggregate": "trimmed-mean"}),
    "quorum": (1, {}),
    "grace": (4.0, QUORUM),
    "late": ("drop", QUORUM),
    "staging_slots": (3, ASYNC),
    "staging_deadline": (60.0, ASYNC),
    "save_dir": ("run", {}),
    "save_every": (5, {}),
    "durable": (True, {"save_dir": "run"}),
    "wire_dtype": ("fp16", {}),
    "feedback_decay": (0.95, {}),
    "reply_dtype": ("bf16", {}),
    "heartbeat_timeout": (90.0, {}),
    "stall_timeout": (30.0, {}),
    "disconnect_grace": (4.0, {}),
    "standby": (True, {}),
    "lease": (5.0, {"standby": True}),
}
# Options that do not describe the run: addresses, files, recovery. A custom plan is shown as a pattern.
ELSEWHERE = {
    "bind", "feed", "insecure", "keys", "resume", "recover", "recover_wait", "keep", "audit", "tape",
    "fresh",
    "chunk_elements", "fragment_plan", "max_workers", "max_parameters", "ipc", "tensor_threads",
}  # fmt: skip


def said_by(**options: Any) -> dict[str, Any]:
    """The feed of a run with these options, without what differs from run to run."""
    stage = a_stage(**options)
    return {key: value for key, value in stage.shown().items() if key not in ("epoch", "uptime_s")}


def test_every_option_is_shown_or_is_no_matter_of_the_run() -> None:
    assert {field.name for field in fields(BrokerConfig)} == OPTIONS.keys() | ELSEWHERE


@pytest.mark.parametrize("name", OPTIONS)
def test_feed_shows_what_the_run_was_told(name: str) -> None:
    value, needs = OPTIONS[name]
    assert said_by(**needs, **{name: value}) != said_by(**needs)


def test_settings_of_a_run_are_read_by_the_tools() -> None:
    stage = a_stage(**DYLU, heartbeat_timeout=90.0, stall_timeout=60.0)
    read = parse_snapshot(frame(stage.shown()))
    assert read.liveness == Liveness(90.0, 60.0, stage.config.disconnect_grace)
    assert read.asynchronous == Asynchronous(True, 8, "none", 6, 2, 30.0)
    assert parse_snapshot(frame(a_stage(**PIECES).shown())).fragment_pattern == "strided"
    assert parse_snapshot(frame(a_stage().shown())).asynchronous is None


# What displays make of it; `test_catalogue` has every field in every display.


def row(news: dict[str, Any], label: str) -> str:
    """What `status`, top and the page say in this row."""
    rows = rows_of(parse_snapshot(frame(news)), STATUS)
    return next((each.text for each in rows if each.label == label), "")


def test_command_without_an_answer_is_shown_until_it_has_one() -> None:
    stage, (_, b) = a_run("a", "b", max_rounds=40)
    stage.asks("stop_all")
    b.leaves()
    assert row(stage.shown(), "end") == "1 of 40 rounds"
    assert row(stage.shown(), "commands") == "stop-all: no answer from a, 1 left"
    stage.puppets["a"].leaves()
    assert not row(stage.shown(), "commands")


def test_progress_of_the_work_queue_is_shown() -> None:
    a = UnitWorker(a_stage(workers=1), "a", size=10, epochs=1)
    a.takes(3)
    a.trains()
    a.begins(1)
    a.completes()
    a.takes(2)
    words = "text: epoch 1 of 1, 3 of 10 units counted, 2 handed out, 5 left"
    assert row(a.stage.shown(), "data") == words
    a.takes(5)
    a.trains()
    a.begins(2)
    a.completes()
    assert row(a.stage.shown(), "data") == "text: all 10 units counted"
    endless = document(1, data_sets=[{"name": "\x1b[2J", "size": 9, "epoch": 4, "counted": 40}])
    assert row(endless, "data") == "?[2J: epoch 5, 40 units counted"


def test_round_says_who_trains_towards_it_and_who_is_missing() -> None:
    stage, (a, b, c) = a_run("a", "b", "c")
    a.begins(2)
    b.beats(2)
    c.beats(2)
    assert "training: b, c" in row(stage.shown(), "round")
    assert "missing" not in row(stage.shown(), "round")
    c.loses_connection()
    assert "missing: c, training: b" in row(stage.shown(), "round")


def test_outer_row_says_what_schedules_have_come_to() -> None:
    options: dict[str, Any] = {"outer_lr_schedule": "linear:2:0.5", "num_fragments": 2}
    stage, _ = a_run("a", **options, sync_every=12, outer_momentum_warmup="cosine:2:0.1")
    assert [each["gradients"] for each in stage.shown()["fragments"]] == [1, 0]
    at_first = "lr 0.7, momentum 0.1 of 0.9 (cosine:2:0.1)"
    assert at_first in row(stage.shown(), "outer"), "the fragment of the open round has had none"
    stage.pushes(1, a=2)
    later = "lr 0.525 of 0.7 (linear:2:0.5), momentum 0.5 of 0.9 (cosine:2:0.1)"
    assert later in row(stage.shown(), "outer")


@pytest.mark.parametrize("room", [24, 40])
def test_status_of_many_workers_fits_a_screen_and_keeps_those_that_are_not_well(room: int) -> None:
    crew = [
        worker(f"w{n:03}", host="h" * 60, health="ok" if n % 50 else "lost") for n in range(200)
    ]
    text = as_text(document(1, workers=crew), room)
    assert len(text.splitlines()) <= room
    lost = [
        line.split()[0] for line in text.splitlines() if " lost " in line and "is lost" not in line
    ]
    assert lost == ["w000", "w050", "w100", "w150"]
    assert "w199" in as_text(document(1, workers=crew)), "a file takes all"


# Workers that come through relays: which relay it is, wherever one is shown, and how the relays are.


DIRECT = worker("a")
CREW = [DIRECT, worker("b", via="north"), worker("c", via="north-room1")]


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


# How the door of a broker is: in the feed, and in everything that shows it.


OPEN = "tcp://0.0.0.0:8512"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "loopback"),
        ({"insecure": True}, "loopback"),
        ({"bind": OPEN, "insecure": True}, "INSECURE"),
        ({"feed": OPEN, "insecure": True}, "INSECURE"),
        ({"bind": OPEN, "feed": OPEN, "keys": "keys"}, "keys"),
        ({"bind": OPEN, "keys": "keys", "insecure": True}, "keys"),
    ],
)
def test_feed_says_who_may_connect(options: dict[str, Any], word: str) -> None:
    shown = a_stage(**options).shown()
    assert shown["security"] == word
    assert parse_snapshot(frame(shown)).security == word


@pytest.mark.parametrize(("word", "is_warned"), [("INSECURE", True), ("loopback", False)])
def test_broker_begins_with_a_warning_where_everybody_may_steer(
    word: str, is_warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(BrokerConfig, "security", word)  # nothing here listens to other machines
    with caplog.at_level(logging.WARNING):
        Broker(BrokerConfig(**LOCAL)).close()
    warned = [each.message for each in caplog.records]
    assert bool(warned) == is_warned
    assert not warned or warned[0].startswith("INSECURE: ")


@screen({"size": (80, 24)}, {"size": (140, 40)})
async def test_insecure_is_red_and_stays_while_the_feed_is_late(pilot: ScreenPilot) -> None:
    await pilot.hears(snapshot(42, security="INSECURE"), after_s=1.0)
    (style,) = (each.style for each in pilot.strips()[0] if "INSECURE" in each.text)
    assert style is not None
    assert style.bold
    assert style.color is not None
    assert style.color.get_truecolor().red > 2 * style.color.get_truecolor().green
    await pilot.waits(20)
    assert "INSECURE" in pilot.lines()[0]
    assert "STALE" in pilot.lines()[0]
