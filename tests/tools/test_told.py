"""What the run was told is shown: in the feed, in `status`, by every display and by the exporter."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_broker.cli.status_text import as_text
from diloco_broker.config import BrokerConfig
from diloco_broker.core.feed import start_line
from diloco_protocol.feed import Asynchronous, Liveness, parse_snapshot
from kit.core_harness import a_run, a_stage
from kit.feed_snapshots import frame, worker
from kit.top_screen import document, full_screen
from kit.top_text import drawn
from kit.unit_workers import UnitWorker

PIECES: dict[str, Any] = {"num_fragments": 2, "sync_every": 100}
ASYNC: dict[str, Any] = {"mode": "async"}
QUORUM: dict[str, Any] = {"quorum": 1}
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
    "nesterov": (False, {}),
    "dn_buffer": (5, {"outer": "dn"}),
    "dn_c": (0.125, {"outer": "dn", "dn_buffer": 4}),
    "dn_variant": ("direct", {"outer": "dn"}),
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
    "reply_dtype": ("bf16", {}),
    "heartbeat_timeout": (90.0, {}),
    "stall_timeout": (30.0, {}),
    "disconnect_grace": (4.0, {}),
    "standby": (True, {}),
    "lease": (5.0, {"standby": True}),
}
# What is no matter of the run: addresses, files, how a broker comes back. A plan of one's own is shown
# as the pattern, and its test is where its file is.
ELSEWHERE = {
    "bind", "feed", "insecure", "keys", "resume", "recover", "recover_wait", "keep", "audit", "fresh",
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


def test_history_begins_with_what_the_run_was_told() -> None:
    stage, _ = a_run("a", mode="async", num_fragments=2)
    settings = start_line(stage.shown())["settings"]
    for key in ("liveness", "asynchronous", "fragment_pattern", "fragment_max_delay", "reducer"):
        assert settings[key] == stage.shown()[key]


# The displays.

TOLD = {
    "num_fragments": 2,
    "fragment_pattern": "balanced",
    "fragment_sync_delay": 3,
    "fragment_max_delay": 9,
    "fragment_update_alpha": 0.5,
    "liveness": {"heartbeat_timeout_s": 90.0, "stall_timeout_s": 0.0, "disconnect_grace_s": 4.0},
}
SPLIT = TOLD | {"fragments": [{"fragment": number, "version": 9} for number in range(2)]}


def full(news: dict[str, Any], width: int, height: int) -> str:
    return "\n".join(line.plain for line in full_screen(news, width, height).lines)


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
def test_end_of_a_run_and_orders_without_an_answer_are_shown(size: tuple[int, int]) -> None:
    stage, (_, b) = a_run("a", "b", max_rounds=40, max_time="90s")
    stage.asks("stop_all")
    b.leaves()
    news = stage.shown()
    for said in (as_text(news), drawn(news), full(news, *size)):
        assert "1 of 40 rounds" in said
        assert "stop-all: no answer from a" in said and "1 left" in said
    stage.puppets["a"].leaves()
    assert "stop-all" not in as_text(stage.shown()).split("workers")[0]


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
def test_progress_of_the_work_queue_is_shown(size: tuple[int, int]) -> None:
    a = UnitWorker(a_stage(workers=1), "a", size=10, epochs=1)
    a.takes(3)
    a.trains()
    a.begins(1)
    a.completes()
    a.takes(2)
    told = a.stage.shown()
    for said in (as_text(told), drawn(told), full(told, *size)):
        words = "text: epoch 1 of 1, 3 of 10 units counted, 2 handed out, 5 left"
        assert words in said.replace("  ", ", ")
    a.takes(5)
    a.trains()
    a.begins(2)
    a.completes()
    told = a.stage.shown()
    for said in (as_text(told), drawn(told), full(told, *size)):
        assert "text: all 10 units counted" in said


def test_row_of_the_work_queue_goes_on_in_a_second_line() -> None:
    long = {"name": "the-web", "size": 9_000_000, "epochs": 3, "counted": 1_300_000, "held": 128}
    shown = full(document(1, workers=[worker("a")], data_sets=[long]), 80, 24)
    told = "1.3M of 27M units counted 128 handed out 26M left"
    assert told in " ".join(shown.split())


def test_work_queue_without_an_end_has_nothing_left() -> None:
    news = document(1, data_sets=[{"name": "\x1b[2J", "size": 9, "epoch": 4, "counted": 40}])
    lines = [" ".join(line.split()) for line in drawn(news).splitlines()]
    assert "data ?[2J: epoch 5 40 units counted" in lines


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
def test_screens_show_what_the_run_was_told(size: tuple[int, int]) -> None:
    news = document(1, workers=[worker("a")], **SPLIT)
    of_async = a_run("a", **DYLU, staleness_weight="poly")[0].shown()
    for shown in (partial(full, width=size[0], height=size[1]), drawn):
        told = " ".join(shown(news).split())
        assert "balanced merged after 3 steps at most 9 alpha 0.5" in told
        assert "silent 90s: dead no step: not stalled 4s to reconnect" in told
        assert "DyLU from 8 steps  staleness to 6, weight poly  2 slots" in shown(of_async)


def test_limits_give_way_before_anything_else_on_a_full_screen() -> None:
    text = full(document(1, **SPLIT), 80, 24)
    assert "silent 90s" not in text
    assert "balanced  merged after 3 steps  at most 9  alpha 0.5" in text
    assert "rtx-home: Round 410 closed without this push" in text


# `diloco-broker status`.


def test_round_says_who_trains_towards_it_and_who_is_missing() -> None:
    stage, (a, b, c) = a_run("a", "b", "c")
    a.begins(2)
    b.beats(2)
    c.beats(2)
    news = stage.shown()
    for said in (as_text(news), drawn(news), full(news, 140, 40)):
        assert re.search(r"training:? +b, c", said) and "missing" not in said
    c.loses_connection()
    news = stage.shown()
    for said in (as_text(news), drawn(news), full(news, 140, 40)):
        assert re.search(r"missing +c", said) and re.search(r"training:? +b", said)


def test_status_has_what_people_look_for() -> None:
    text = as_text(document(1, **TOLD))
    for words in (
        "2 of 4 here, needs 2\nmissing     rtx-home\ntraining    xeon\n",
        "dn paper, lr 0.7, momentum 0.9, buffer 3 of 4",
        "2 balanced, merged 3 steps after the push, at most 9, alpha 0.5",
        "silent 90 s: dead, no step: not stalled, 4 s to reconnect",
        "4 alive, 2 participating, 3 averaged, 2 wanted, 1 died",
        "3: 2 late 1 non_finite, 1 malformed",
    ):
        assert words in text
    titles = "worker host health doing step inner steps/s loss stale heard"
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert titles in rows
    assert "mac-mini attic lost - 205712 - - 2.413 5 41.0 s" in rows
    assert any(" 96/320 2.2 2.900 0 " in row for row in rows if row.startswith("xeon"))
    assert max(map(len, text.splitlines())) <= 82, text


def test_screens_and_status_say_what_schedules_have_come_to() -> None:
    options: dict[str, Any] = {"outer_lr_schedule": "linear:2:0.5", "num_fragments": 2}
    stage, _ = a_run("a", **options, sync_every=12, outer_momentum_warmup="cosine:2:0.1")
    assert [each["gradients"] for each in stage.shown()["fragments"]] == [1, 0]
    at_first = "lr 0.7, momentum 0.1 of 0.9 (cosine:2:0.1)"
    assert at_first in as_text(stage.shown()), "the fragment of the open round has had none"
    stage.pushes(1, a=2)
    told = stage.shown()
    assert "lr 0.525 of 0.7 (linear:2:0.5), momentum 0.5 of 0.9 (cosine:2:0.1)" in as_text(told)
    for screen in (full(told, 140, 40), drawn(told)):
        assert "lr 0.525 of 0.7 momentum 0.5 of 0.9" in " ".join(screen.split())


def test_status_of_an_asynchronous_run_says_what_it_was_told() -> None:
    text = as_text(a_run("a", "b", **DYLU)[0].shown())
    assert "pushes      2 applied, 0 under way" in text
    assert "DyLU from 8 steps, staleness up to 6, not weighed, 2 slots of 30 s" in text
    assert "dead, no step 600 s: stalled, " in text
    assert "round  " not in text


def test_status_leaves_out_what_an_older_broker_does_not_say() -> None:
    newer = ("liveness", "asynchronous", "reducer", "fragment_pattern", "ended", "num_fragments")
    text = as_text({key: said for key, said in a_stage().shown().items() if key not in newer})
    assert "state       waiting for workers to join" in text
    assert "timeouts" not in text


@pytest.mark.parametrize("room", [24, 40])
def test_status_of_many_workers_fits_a_screen_and_keeps_those_that_are_not_well(room: int) -> None:
    crew = [
        worker(f"w{n:03}", host="h" * 60, health="ok" if n % 50 else "lost") for n in range(200)
    ]
    text = as_text(document(1, workers=crew), room)
    assert len(text.splitlines()) <= room
    assert [line.split()[0] for line in text.splitlines() if " lost " in line] == (
        ["w000", "w050", "w100", "w150"]
    )
    assert text.endswith("more; diloco-top and --json show all")
    assert "w199" in as_text(document(1, workers=crew)), "a file takes all"


@given(st.floats() | st.none(), st.floats() | st.none(), st.text(max_size=40))
def test_status_never_fails(loss: float | None, pace: float | None, name: str) -> None:
    one = worker(name, loss=loss, steps_per_s=pace, host=name)
    assert as_text(document(1, workers=[one]))
