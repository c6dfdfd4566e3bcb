"""The chaos drill: its audit, its plan, its figures, its proxy and disk, and one short drill."""

from __future__ import annotations

import ast
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import diloco_tools.chaos.audit as audit_module
from diloco_tools.chaos.audit import (
    BROKER_LOG,
    FINAL,
    Findings,
    Life,
    Version,
    audit,
    chunks_of,
    contributions,
    life_of,
    lineage_of,
    main,
    read_lines,
    releases_of,
)
from diloco_tools.chaos.faults import FRAGILE, SHORT, STURDY, WHOLE, Kind, plan
from diloco_tools.chaos.figures import (
    Aftermath,
    Averaged,
    Stay,
    Work,
    averaged,
    next_after,
    rows,
    work_of,
)
from kit.audit_records import (
    LEFT,
    a_fault,
    counted,
    dropped,
    frozen,
    key,
    push,
    release,
    version,
)

# Logs, written as the broker and the workers write them.


def life(*records: dict[str, Any], worker: str = "a", number: int = 1) -> Life:
    return life_of(worker, number, records)


def found(
    releases: list[dict[str, Any]], *lives: Life, heads: tuple[Version, ...] | None = None
) -> Findings:
    """Audit; the head is the last version written unless it is said."""
    read = releases_of(releases)
    return audit(read, (read[-1].version,) if heads is None else heads, lives)


# The audit.


def test_run_in_which_all_went_well_has_no_findings() -> None:
    findings = found(
        [release(0), release(1, push("p1"), push("q1", "b")), release(2, push("p2"))],
        life(frozen("p1"), counted("p1", 1), frozen("p2"), counted("p2", 2), LEFT),
        life(frozen("q1"), counted("q1", 1), LEFT, worker="b"),
    )
    assert findings.problems == []
    assert [r.version for r in findings.lineage] == [key(0), key(1), key(2)]
    assert not findings.in_flight and not findings.dropped and not findings.forgotten


def test_push_in_two_versions_of_a_lineage_is_found() -> None:
    findings = found(
        [release(0), release(1, push("p1")), release(2, push("p1"))],
        life(frozen("p1"), counted("p1", 1), LEFT),
    )
    assert len(findings.doubled) == 1
    assert "p1 of a" in findings.doubled[0] and "1#t1" in findings.doubled[0]


@pytest.mark.parametrize(("second", "doubles"), [("02", 0), ("03", 1), ("all", 1)])
def test_parts_of_a_push_may_be_in_two_versions_but_no_chunk_twice(
    second: str, doubles: int
) -> None:
    findings = found(
        [release(0), release(1, push("p1", chunks="05")), release(2, push("p1", chunks=second))],
        life(frozen("p1"), counted("p1", 2), LEFT),
    )
    assert len(findings.doubled) == doubles


def test_push_of_which_nothing_went_in_at_first_is_counted_once() -> None:
    """A round may close without any chunk of a worker that was cut off."""
    findings = found(
        [release(0), release(1, push("p1", chunks="00")), release(2, push("p1"))],
        life(frozen("p1"), counted("p1", 2), LEFT),
    )
    assert findings.problems == []


def test_same_push_id_of_two_workers_is_two_pushes() -> None:
    findings = found(
        [release(0), release(1, push("p1"), push("p1", "b"))],
        life(frozen("p1"), counted("p1", 1), LEFT),
        life(frozen("p1"), counted("p1", 1), LEFT, worker="b"),
    )
    assert findings.problems == []


def test_version_that_a_crash_took_back_counts_nothing() -> None:
    """Version 2 was lost with the broker; its push went into the version made in its place."""
    findings = found(
        [
            release(0),
            release(1, push("p1")),
            release(2, push("p2"), tag="lost"),
            release(2, push("p2")),
            release(3, push("p3")),
        ],
        life(*[e for n in (1, 2, 3) for e in (frozen(f"p{n}"), counted(f"p{n}", n))], LEFT),
    )
    assert findings.problems == []
    assert key(2, "lost") not in [r.version for r in findings.lineage]


def test_lineage_may_go_on_from_a_version_that_was_adopted() -> None:
    """Version 2 of the first life was held by a worker; the second life made 3 from it."""
    findings = found(
        [release(0), release(1), release(2, push("p2"), tag="x"), release(3, after="x")],
        life(frozen("p2"), counted("p2", 2, "x"), LEFT),
    )
    assert findings.problems == []


@pytest.mark.parametrize("survives", [True, False])
def test_push_that_was_seen_counted_and_is_in_no_final_version_is_lost(survives: bool) -> None:
    last = [LEFT] if survives else []
    findings = found(
        [release(0), release(1, push("p1"), tag="lost"), release(1)],
        life(frozen("p1"), counted("p1", 1, "lost"), *last),
    )
    assert len(findings.lost) == survives
    assert len(findings.forgotten) == (not survives)
    assert "p1" in (findings.lost + findings.forgotten)[0]


def test_push_that_was_never_counted_is_found_unless_it_was_the_last() -> None:
    findings = found(
        [release(0), release(1, push("p2"))],
        life(frozen("p1"), frozen("p2"), counted("p2", 1), frozen("p3"), LEFT),
    )
    assert len(findings.uncounted) == 1 and "p1" in findings.uncounted[0]
    assert len(findings.in_flight) == 1 and "p3" in findings.in_flight[0]


def test_killed_worker_may_leave_pushes_uncounted() -> None:
    findings = found([release(0)], life(frozen("p1"), frozen("p2")))
    assert findings.problems == [] and findings.in_flight == []


def test_half_counted_push_of_a_survivor_is_not_counted() -> None:
    findings = found(
        [release(0), release(1, push("p1", chunks="01")), release(2, push("p2"))],
        life(frozen("p1"), frozen("p2"), counted("p2", 2), LEFT),
    )
    assert len(findings.uncounted) == 1 and "p1" in findings.uncounted[0]


def test_dropped_push_is_listed_with_its_reason() -> None:
    findings = found([release(0)], life(frozen("p1"), dropped("p1"), LEFT))
    assert findings.problems == []
    assert "p1" in findings.dropped[0] and "late" in findings.dropped[0]


def test_push_that_its_worker_dropped_and_a_version_contains_is_found() -> None:
    findings = found([release(0), release(1, push("p1"))], life(frozen("p1"), dropped("p1"), LEFT))
    assert len(findings.differing) == 1


def test_push_that_nobody_froze_is_found() -> None:
    findings = found([release(0), release(1, push("p9"))], life(LEFT))
    assert len(findings.strangers) == 1 and "p9" in findings.strangers[0]


def test_other_number_of_steps_is_found() -> None:
    findings = found(
        [release(0), release(1, push("p1", steps=6))],
        life(frozen("p1", steps=5), counted("p1", 1), LEFT),
    )
    assert len(findings.differing) == 1


def test_version_that_is_missing_in_the_log_breaks_its_lineage() -> None:
    findings = found([release(0), release(2, push("p1"))], life(frozen("p1"), LEFT))
    assert len(findings.broken) == 1 and "1#t1" in findings.broken[0]


def test_version_written_twice_is_found_unless_it_is_the_same() -> None:
    again = [release(0), release(1, push("p1")), release(1, push("p2"))]
    assert len(found(again, life(frozen("p1"), frozen("p2"))).broken) == 1
    same = [release(0), release(1, push("p1")), release(1, push("p1"))]
    assert found(same, life(frozen("p1"))).problems == []


def test_lineage_that_goes_in_a_circle_ends() -> None:
    first = {**release(1), "after": version(2)}
    with pytest.raises(ValueError, match="comes after itself"):
        lineage_of(releases_of([first, release(2)]), key(2))


def test_each_fragment_has_a_lineage_of_its_own() -> None:
    releases = [
        release(0, tag="f"),
        release(0, tag="g", fragment=1),
        release(1, push("p1"), tag="f", after="f"),
        release(1, push("p2"), tag="g", after="g", fragment=1),
    ]
    of_worker = life(
        frozen("p1"), counted("p1", 1, "f"), frozen("p2", fragment=1), counted("p2", 1, "g"), LEFT
    )
    findings = found(releases, of_worker, heads=(key(1, "f"), key(1, "g")))
    assert findings.problems == [] and len(findings.lineage) == 4
    only_one = found(releases, of_worker, heads=(key(1, "f"),))
    assert len(only_one.lost) == 1


def test_line_that_a_kill_has_torn_is_left_out_at_the_end_only() -> None:
    assert read_lines('{"a": 1}\n{"a": 2}\n{"a"') == [{"a": 1}, {"a": 2}]
    assert read_lines('{"a": 1}\n{"a": 2}') == [{"a": 1}, {"a": 2}]
    assert read_lines("") == []
    with pytest.raises(ValueError, match="Expecting"):
        read_lines('{"a": 1}\n{"a"\n{"a": 3}\n')


def test_bitmap_is_read_as_the_wire_has_it() -> None:
    assert chunks_of("00") == frozenset()
    assert chunks_of("0180") == {0, 15}


def test_audit_of_a_folder_ends_with_1_when_something_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(name: str, *records: dict[str, Any]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    assert main([str(tmp_path)]) == 2
    write(BROKER_LOG, release(0), release(1, push("p1", "w.x")))
    write("w.x.2.worker.jsonl", frozen("p1"), counted("p1", 1), LEFT)
    (tmp_path / FINAL).write_text(json.dumps({"versions": [version(1)]}))
    assert main([str(tmp_path)]) == 0
    assert "2 versions contain 1 pushes" in capsys.readouterr().out
    write("w.x.3.worker.jsonl", frozen("p2"), counted("p2", 1, "lost"), LEFT)
    assert main([str(tmp_path)]) == 1
    assert "BROKEN: w.x.3 saw push p2 counted" in capsys.readouterr().out


def test_audit_shares_nothing_with_what_it_checks() -> None:
    tree = ast.parse(Path(audit_module.__file__).read_text())
    names = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {
        (node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    assert names <= {"__future__", "collections", "dataclasses", "json", "pathlib", "sys", "typing"}


# The plan.


def test_plan_is_the_same_for_the_same_seed_and_mode() -> None:
    assert plan(3, "sync", WHOLE) == plan(3, "sync", WHOLE)
    assert plan(3, "sync", WHOLE) != plan(4, "sync", WHOLE)
    assert plan(3, "sync", WHOLE) != plan(3, "async", WHOLE)


@pytest.mark.parametrize("scale", [WHOLE, SHORT])
@pytest.mark.parametrize("seed", range(5))
def test_plan_has_so_many_of_each_kind_and_kills_only_the_fragile(scale: Any, seed: int) -> None:
    faults = plan(seed, "sync", scale)
    for kind, count in scale.counts:
        assert sum(fault.kind is kind for fault in faults) == count
    assert len(faults) == sum(count for _, count in scale.counts)
    for fault in faults:
        if fault.kind is Kind.KILL_WORKER:
            assert fault.target in FRAGILE
        if fault.kind is Kind.STOP_WORKER:
            assert fault.target in STURDY


def test_whole_drill_has_what_was_promised() -> None:
    counts = dict(WHOLE.counts)
    assert WHOLE.rounds >= 40
    assert counts[Kind.KILL_BROKER] == 3 and counts[Kind.FILL_DISK] == 1
    assert set(counts) == set(Kind)


def test_broker_is_not_killed_twice_in_a_row() -> None:
    for seed in range(50):
        kinds = [fault.kind for fault in plan(seed, "sync", WHOLE)]
        places = [i for i, kind in enumerate(kinds) if kind is Kind.KILL_BROKER]
        assert all(b - a > 2 for a, b in itertools.pairwise(places)), kinds


# The figures.


def test_useful_work_is_the_steps_of_whole_contributions() -> None:
    findings = found(
        [
            release(0),
            release(1, push("p1", steps=6)),
            release(2, push("p2", steps=6, chunks="01")),
            release(3, push("p3", steps=6, chunks="01")),
            release(4, push("p3", steps=6, chunks="02")),
        ]
    )
    of_worker = life(*(frozen(f"p{n}", steps=6) for n in (1, 2, 3)), counted("p3", 4))
    entered = contributions(findings.lineage)
    assert work_of(stay(trained=20), of_worker, entered, 1) == Work(20, 12)
    assert work_of(stay(trained=20), of_worker, entered, 2) == Work(40, 12)


def stay(
    worker: str = "a",
    trained: int = 0,
    joined: float | None = 0.0,
    ended: float | None = None,
    stops: tuple[tuple[float, float], ...] = (),
) -> Stay:
    return Stay(worker, 1, trained, joined, ended, False, stops)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (stay(), True),
        (stay(joined=None), False),
        (stay(joined=10.0), False),
        (stay(ended=11.0), False),
        (stay(ended=12.0), False),
        (stay(ended=12.1), True),
        (stay(stops=((9.0, 10.5),)), False),
        (stay(stops=((11.9, float("inf")),)), False),
        (stay(stops=((8.0, 9.0), (13.0, 14.0))), True),
    ],
)
def test_alive_throughout_is_joined_before_there_after_and_never_stopped(
    of: Stay, expected: bool
) -> None:
    assert of.is_alive_throughout(10.0, 12.0) is expected


def test_share_averaged_is_of_those_alive_throughout() -> None:
    versions = [(1.0, {"a", "b"}), (2.0, {"a", "b"}), (3.0, {"a"}), (4.0, {"a", "c"})]
    stays = [stay("a"), stay("b"), stay("c", joined=2.5)]
    assert averaged(versions, stays) == Averaged(7, 5)
    assert averaged(versions, [stay("b", ended=2.5)]) == Averaged(1, 1)


def test_without_rounds_a_window_of_versions_takes_their_place() -> None:
    versions = [(float(n), {"ab"[n % 2]}) for n in range(9)]
    assert averaged(versions, [stay("a", joined=-1.0), stay("b", joined=-1.0)], 4) == Averaged(4, 4)
    assert averaged(versions, [stay("c", joined=-1.0)], 4) == Averaged(2, 0)


def test_rows_are_by_kind_with_median_and_worst() -> None:
    made = rows(
        [
            Aftermath(a_fault(Kind.CUT), 1.0, 0.5, True),
            Aftermath(a_fault(Kind.CUT), 2.0, 1.5, True),
            Aftermath(a_fault(Kind.CUT), 3.0, None, False),
            Aftermath(a_fault(Kind.KILL_WORKER), 4.0, 2.0, True),
        ]
    )
    assert [(row.kind, row.injected, row.survived) for row in made] == [
        (Kind.KILL_WORKER, 1, 1),
        (Kind.CUT, 3, 2),
    ]
    assert (made[1].median, made[1].worst) == (1.0, 1.5)
    assert next_after(2.0, [1.0, 2.0, 5.0, 3.5]) == 1.5
    assert next_after(9.0, [1.0]) is None
