"""What diloco-report makes of a history: what happened, when, and to whom."""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_protocol.feed import MalformedFeedError
from diloco_tools.monitor.report import digest
from diloco_tools.monitor.report.digest import SIGN, read_run
from diloco_tools.monitor.report.facts import Ending, Facts, Worker
from kit.core_harness import a_run
from kit.past_runs import closed, event, line, start, write, write_run
from kit.recorded_runs import RECORDED, RUNS, trained
from kit.report_pages import action, facts_of, page

AT = 1_700_000_000.0


def in_incarnation(epoch: str, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of another life of the broker."""
    return [{**each, "epoch": epoch} for each in lines]


def worker(facts: Facts, name: str) -> Worker:
    (found,) = (each for each in facts.workers if each.id == name)
    return found


# A run from its start to its end.


def test_run_is_told_from_its_start_to_its_end(tmp_path: Path) -> None:
    facts = read_run(write_run(tmp_path, rounds=50))
    assert facts.model is not None
    assert (facts.run, facts.mode, facts.model.parameters) == ("3fa2c1d09b11", "sync", 1000)
    assert (facts.rounds, facts.contributions, facts.most_alive) == (50, 100, 2)
    assert facts.first_loss == 4.0 and facts.last_loss == pytest.approx(3.51)
    assert (facts.best_loss, facts.best_loss_round) == (facts.last_loss, 49)
    assert facts.round_median_s == pytest.approx(40.0, rel=0.02) and facts.round_longest_s == 40.0
    assert (facts.bytes_up, facts.bytes_down) == (49_000, 98_000)
    assert facts.last_words == "it was asked to"
    a = worker(facts, "a")
    assert (a.contributions, a.step, a.hosts) == (50, 24_500, ("host-of-a",))
    assert (a.loss, a.staleness_most) == (2.4, 0)
    assert a.steps_per_s == pytest.approx(12.5, rel=0.02)
    assert facts.ended_at - facts.began_at == 2002.0


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        ([line("stop", AT + 9, text="anna asked for it", run_is_over=True)], Ending.OVER),
        ([line("stop", AT + 9, text="SIGTERM", run_is_over=False)], Ending.STOPPED),
        ([line("stop", AT + 9, text="of an older release")], Ending.STOPPED),
        ([], Ending.OPEN),
    ],
)
def test_end_is_told_as_the_history_has_it(tmp_path: Path, last: list[Any], ending: Ending) -> None:
    facts = facts_of(tmp_path, start(AT), closed(AT + 1, 0, "a"), *last)
    assert facts.ending == ending
    assert (facts.lives[-1].ending is None) == (ending == Ending.OPEN)


def test_run_that_was_resumed_has_all_its_lives(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        start(AT),
        *(closed(AT + n, n, "a", "b") for n in range(1, 11)),
        *in_incarnation(
            "b1", start(AT + 100), event(AT + 101, "a joins from h."), event(AT + 101, "b joins.")
        ),
        *in_incarnation("b1", *(closed(AT + 100 + n, n, "a", "b") for n in range(9, 12))),
        *in_incarnation(
            "c2", start(AT + 200), event(AT + 201, "a joins."), closed(AT + 205, 12, "a")
        ),
        *in_incarnation("c2", line("stop", AT + 206, text="enough", run_is_over=True)),
    )
    assert [(life.first, life.last, life.rounds) for life in facts.lives] == [
        (1, 10, 10),
        (9, 11, 3),
        (12, 12, 1),
    ]
    assert [life.ending for life in facts.lives] == [None, None, "enough"]
    assert facts.bytes_up == 10_000 + 11_000 + 12_000, "counters begin again with each life"
    assert worker(facts, "a").bytes_up == 5_000 + 6_000
    assert (worker(facts, "a").ended, worker(facts, "b").ended) == ("here", "away")
    assert worker(facts, "a").returns == 0
    assert any(each.startswith("2 rounds") for each in facts.remarks)


def test_history_that_has_lost_its_beginning_says_so(tmp_path: Path) -> None:
    write(tmp_path / "history.1.jsonl", *(closed(AT + n, n, "a") for n in range(700, 710)))
    facts = facts_of(tmp_path, start(AT + 9), *(closed(AT + n, n, "a") for n in range(710, 720)))
    assert facts.rounds == 20 and (facts.lives[0].first, facts.lives[0].last) == (700, 719)
    assert any("begins with round 700" in each for each in facts.remarks)


# An optimizer of torch's own changes nothing in a history, and loads for seconds.
@pytest.mark.parametrize("kind", sorted(RUNS.keys() - {"torch"}))
def test_run_of_any_kind_is_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(kind, "run", 0, RECORDED)
    facts = read_run(tmp_path / "run")
    assert (facts.rounds, facts.contributions) == (RECORDED, RECORDED)
    losses = [loss for *_, loss, _, _ in facts.series["rounds"]]
    assert losses == [pytest.approx(1.0 / (number + 1)) for number in range(RECORDED)]
    assert facts.mode == ("async" if kind == "asynchronous" else "sync")
    assert worker(facts, "w").contributions == RECORDED
    assert [each.what for each in facts.actions] == ["save"]
    assert facts.damaged == 0 and facts.ending == Ending.OVER
    # On a machine that is busy the broker may warn, of how long it stood still, say.
    assert not [each for each in facts.said if "a checkpoint is asked for" in each.text]
    page(facts)


# Comings and goings.


def test_worker_that_died_and_came_back_is_seen_to(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        start(AT),
        event(AT + 1, "a joins from h1."),
        event(AT + 1, "b joins from h2."),
        closed(AT + 10, 0, "a", "b"),
        event(AT + 14, "b counts as dead: it is silent.", level="warning"),
        closed(AT + 20, 1, "a"),
        event(AT + 25, "b joins from h3."),
        closed(AT + 30, 2, "a", "b"),
        event(AT + 31, "b leaves: it is done."),
        line("stop", AT + 40, text="x"),
    )
    b = worker(facts, "b")
    assert (b.deaths, b.returns, b.ended) == (1, 1, "left")
    assert (b.first_seen, b.last_seen) == (AT + 1, AT + 31)
    assert (b.contributions, b.hosts[0]) == (2, "h2") and "h3" in b.hosts
    assert worker(facts, "a").ended == "here"


def test_worker_that_was_removed_is_told_from_one_that_others_speak_of(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        event(AT, "a joins."),
        event(AT, "b joins."),
        event(AT + 1, "b warns: anna: a removed from the run."),
        event(AT + 2, "b warns: a leaves: it is done."),
        event(AT + 3, "anna: b removed from the run.", level="warning"),
        line("stop", AT + 9, text="x"),
        actions=(action(AT + 3, "kick", "b removed from the run", before="b"),),
    )
    assert [each.id for each in facts.workers] == ["a", "b"]
    assert (worker(facts, "a").ended, worker(facts, "b").ended) == ("here", "kicked")
    assert worker(facts, "b").kicks == 1
    assert facts.warnings == 0, "an operator's action is not a warning"


@pytest.mark.parametrize("name", ["b", "a b", "Übung [red]"])
def test_the_brokers_own_sentences_are_understood(name: str) -> None:
    stage, (a, b) = a_run("a", name, stall_timeout=60.0, disconnect_grace=5.0)

    def last(*words: str) -> tuple[str, str]:
        sign = SIGN.match(stage.said(*words)[-1])
        assert sign is not None
        return sign["name"], re.split(r"\W", sign["what"])[0]

    assert last(f"{name} joins") == (name, "joins")
    b.dies()
    stage.passes(6.0)
    assert last("counts as dead") == (name, "counts")
    a.leaves()
    assert last("a leaves") == ("a", "leaves")


# Settings, operators, warnings.


def test_change_of_a_setting_is_told_with_who_is_behind_it(tmp_path: Path) -> None:
    other = {"outer": {"optimizer": "nesterov", "lr": 0.5, "momentum": 0.9}}
    facts = facts_of(
        tmp_path,
        start(AT),
        start(AT + 5, settings=other),
        start(AT + 6, settings=other),  # written again when the file begins anew
        *in_incarnation("b1", start(AT + 9)),
    )
    told = [(each.name, each.before, each.after, each.by_restart) for each in facts.changes]
    assert told == [("outer.lr", 0.7, 0.5, False), ("outer.lr", 0.5, 0.7, True)]
    assert facts.settings["sync_every"] == 500


def test_what_operators_did_is_told(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        closed(AT, 0, "a"),
        event(AT + 10, "anna: the run is paused.", level="warning"),
        closed(AT + 90, 1, "a"),
        actions=(
            action(AT + 10, "pause", "the run is paused"),
            action(AT + 20, "resume", "the run goes on after 10 s"),
            action(AT + 30, "set outer_lr", "outer lr 0.7 -> 0.5", before=0.7, after=0.5),
            action(AT + 80, "pause", "the run is paused", is_proven=False),
        ),
    )
    assert [(a.what, a.before, a.after) for a in facts.actions][2] == ("set outer_lr", 0.7, 0.5)
    assert facts.actions[3].sentence == "anna (unproven): the run is paused."
    assert facts.warnings == 0


def test_warnings_that_differ_in_numbers_are_one(tmp_path: Path) -> None:
    said = [event(AT + n, f"b has been slow for {n}.5 s", level="warning") for n in range(90)]
    facts = facts_of(tmp_path, *said, event(AT + 99, "the disk is full", level="error"))
    assert [(each.level, each.count) for each in facts.said] == [("error", 1), ("warning", 90)]
    slow = facts.said[1]
    assert (slow.text, slow.first_at, slow.last_at) == ("b has been slow for 89.5 s", AT, AT + 89)
    assert (facts.warnings, facts.errors) == (90, 1)


# What is damaged, empty, odd.


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    damaged = (b"{cut", b"\xff\xfe", b'{"kind": 3}', b"[]")
    facts = facts_of(tmp_path, start(AT), *damaged, closed(AT + 1, 0, "a"))
    assert (facts.rounds, facts.damaged) == (1, 4)
    assert any("4 damaged lines" in each for each in facts.remarks)


def test_run_in_which_nothing_happened_has_a_report(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, start(AT), event(AT + 1, "a joins."))
    shown = page(facts)
    assert "No round closed" in shown.text("head")
    assert not shown.series["rounds"]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
WHOLE = {
    "start": start(AT),
    "round": closed(AT, 3, "a"),
    "event": event(AT, "b joins from h."),
    "stop": line("stop", AT, text="enough", run_is_over=True),
}
PLACES = [
    (kind, key) for kind, whole in WHOLE.items() for key in whole if key not in ("kind", "epoch")
]
OF_WORKER = WHOLE["round"]["workers"][0]
PLACES += [("worker", key) for key in OF_WORKER]


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.lists(st.tuples(st.sampled_from(PLACES), anything), max_size=4))
def test_no_value_in_a_line_breaks_a_report(odd: list[tuple[tuple[str, str], Any]]) -> None:
    made = digest.Digest()
    made.take(WHOLE["start"])
    for (kind, key), value in odd:
        is_time = isinstance(value, float) and 0 <= value < 1e12
        if key != "at" or is_time:  # lines without a time are skipped before
            line = {**WHOLE.get(kind, {}), key: value}
            if kind == "worker":
                line = {**WHOLE["round"], "workers": [{**OF_WORKER, key: value}]}
            with suppress(MalformedFeedError):
                made.take(line)
            made.take(WHOLE["round"])
    page(made.facts())


# However long it is.


def test_ever_new_workers_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "MOST_WORKERS", 20)
    rounds = [closed(AT + n, n, "a", f"stranger-{n}") for n in range(100)]
    facts = facts_of(tmp_path, *rounds)
    assert len(facts.workers) == 20 and facts.workers_left_out == 81
    assert worker(facts, "a").contributions == 100
    assert "81 more workers not shown" in page(facts).text("workers")


def test_long_history_gives_a_small_page_that_has_every_extreme(tmp_path: Path) -> None:
    names = [f"w{number}" for number in range(50)]
    made = digest.Digest()
    made.take(start(AT))
    for number in range(5_000):
        at = AT + 40.0 * number
        here = [names[number % 50], names[(number * 7) % 50]]
        loss = 55.5 if number == 3_333 else 2.0 + (number % 13) / 10
        made.take(closed(at, number, *here, loss=loss, seconds=99.0 if number == 3 else 40.0))
        made.take(event(at, f"{here[0]} warns: it is {number} degrees", level="warning"))
    facts = made.facts()
    losses, seconds = ([each[place] for each in facts.series["rounds"]] for place in (4, 2))
    assert max(losses) == 55.5 and max(seconds) == 99.0
    assert len(losses) <= 2 * digest.POINTS
    assert len(facts.series["speeds"]) <= digest.MOST_CURVES
    assert len(page(facts).markup) < 3_000_000
    assert len(facts.events) == digest.MOST_EVENTS and facts.events_left_out == 4_700


def test_log_of_actions_that_is_damaged_costs_its_damaged_lines_alone(tmp_path: Path) -> None:
    history = write_run(tmp_path, 3)
    whole = action(AT, "save", "a checkpoint is asked for")
    write(history.with_name("control.jsonl"), b"{cut", whole, {**whole, "at": "never"}, b"[]")
    assert [each.what for each in read_run(tmp_path).actions] == ["save"]
    assert replace(read_run(tmp_path), actions=()) == replace(read_run(history), actions=())
