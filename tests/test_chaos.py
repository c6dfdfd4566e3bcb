"""The chaos drill: its audit, its plan, its figures, its proxy and disk, and one short drill."""

from __future__ import annotations

import ast
import dataclasses
import io
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import diloco_tools.chaos.audit as audit_module
from diloco_protocol import Ledger, VersionId
from diloco_tools.chaos import stage as stage_module
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
from diloco_tools.chaos.crew import Crew, allowed_loss
from diloco_tools.chaos.disk import SizeLimit, Tmpfs
from diloco_tools.chaos.drill import empty
from diloco_tools.chaos.faults import FRAGILE, SHORT, STURDY, WHOLE, Fault, Kind, plan
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
from diloco_tools.chaos.proxy import Proxy
from diloco_tools.chaos.report import Calm, Ending, KillCost, ModeReport
from diloco_tools.chaos.stage import Broken, Stage
from diloco_tools.chaos.table import faults_table, figures_table
from diloco_tools.chaos.worker import Job, StepCount, bring_in, checksum, steps_in
from diloco_worker import GlobalParameters

RUN = "00000000000000aa"
WITHIN_S = 10.0


# Logs, written as the broker and the workers write them.


def version(counter: int, tag: str = "t") -> list[Any]:
    return [RUN, counter, f"{tag}{counter}"]


def key(counter: int, tag: str = "t") -> Version:
    return (RUN, counter, f"{tag}{counter}")


def push(push_id: str, worker: str = "a", steps: int = 5, chunks: str = "all") -> dict[str, Any]:
    return {"worker": worker, "push_id": push_id, "steps": steps, "chunks": chunks, "weight": 1.0}


def release(
    counter: int, *pushes: dict[str, Any], tag: str = "t", after: str = "t", fragment: int = 0
) -> dict[str, Any]:
    return {
        "version": version(counter, tag),
        "after": version(counter - 1, after) if counter else None,
        "fragment": fragment,
        "round": counter,
        "epoch": "e",
        "pushes": list(pushes),
    }


def frozen(push_id: str, steps: int = 5, step: int = 5, fragment: int = 0) -> dict[str, Any]:
    return {
        "event": "frozen",
        "worker": "a",
        "push_id": push_id,
        "fragment": fragment,
        "steps": steps,
        "base": version(0),
        "step": step,
    }


def counted(push_id: str, counter: int, tag: str = "t") -> dict[str, Any]:
    return {
        "event": "counted",
        "push_id": push_id,
        "fragment": 0,
        "version": version(counter, tag),
    }


def dropped(push_id: str) -> dict[str, Any]:
    return {"event": "dropped", "push_id": push_id, "fragment": 0, "why": "late"}


LEFT = {"event": "left", "step": 10}


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


def fault(kind: Kind, target: str = "w0") -> Fault:
    return Fault(kind, target, 1, 0.0)


def test_rows_are_by_kind_with_median_and_worst() -> None:
    made = rows(
        [
            Aftermath(fault(Kind.CUT), 1.0, 0.5, True),
            Aftermath(fault(Kind.CUT), 2.0, 1.5, True),
            Aftermath(fault(Kind.CUT), 3.0, None, False),
            Aftermath(fault(Kind.KILL_WORKER), 4.0, 2.0, True),
        ]
    )
    assert [(row.kind, row.injected, row.survived) for row in made] == [
        (Kind.KILL_WORKER, 1, 1),
        (Kind.CUT, 3, 2),
    ]
    assert (made[1].median, made[1].worst) == (1.0, 1.5)
    assert next_after(2.0, [1.0, 2.0, 5.0, 3.5]) == 1.5
    assert next_after(9.0, [1.0]) is None


# The report.


def sound() -> ModeReport:
    """A run in which every promise was kept."""
    return ModeReport(
        "sync",
        allowed=8,
        least_rounds=40,
        disk="tmpfs",
        aftermaths=[
            Aftermath(fault(Kind.KILL_WORKER), 1.0, 1.1, True),
            Aftermath(fault(Kind.KILL_BROKER, "broker"), 5.0, 4.0, True),
        ],
        findings=Findings(),
        ending=Ending([version(9)], "c0ffee", {"a.1": "c0ffee"}, 2.0, {"a.1": 0}, 0, 1.0),
        rounds=40,
        contributions=150,
        all_work=Work(100, 95),
        sturdy_work=Work(80, 80),
        kill_costs=[KillCost("w0.1", 20, 5.0)],
        averaged=Averaged(100, 97),
        calm=Calm(1.99, 150, 20.0),
    )


def test_run_that_kept_every_promise_has_no_problem() -> None:
    assert sound().problems == []
    json.dumps(sound().plain(), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sturdy_work": Work(80, 79)}, "trained 80 steps and 79"),
        ({"kill_costs": [KillCost("w0.1", 20, 9.0)]}, "kill of w0.1 cost 9"),
        ({"averaged": Averaged(100, 94)}, "94 of 100 workers alive"),
        ({"rounds": 39.0}, "39 rounds"),
        ({"calm": Calm(1.9, 150, 20.0)}, "5.3% above the calm run's"),
        ({"broken": ["w0 did not join."]}, "w0 did not join"),
        ({"findings": Findings(lost=["a.1 saw p1."])}, "a.1 saw p1"),
        ({"aftermaths": [Aftermath(fault(Kind.CUT), 3.0, None, False)]}, "did not get over"),
        ({"aftermaths": [Aftermath(fault(Kind.CUT), None, None, False)]}, "never carried out"),
        ({"aftermaths": [Aftermath(fault(Kind.KILL_BROKER), 3.0, 60.0, True)]}, "in 60.0 s"),
    ],
)
def test_broken_promise_is_one_sentence_with_its_values(change: dict[str, Any], words: str) -> None:
    problems = dataclasses.replace(sound(), **change).problems
    assert len(problems) == 1 and words in problems[0] and problems[0].startswith("sync: ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checksums": {"a.1": "decade"}}, "a.1 pulled other parameters"),
        ({"exits": {"a.1": -9}}, "a.1 ended with exit code -9"),
        ({"broker_exit": None}, "The broker ended with exit code None"),
    ],
)
def test_bad_ending_is_a_broken_promise(change: dict[str, Any], words: str) -> None:
    report = sound()
    assert report.ending is not None
    ending = dataclasses.replace(report.ending, **change)
    problems = dataclasses.replace(report, ending=ending).problems
    assert len(problems) == 1 and words in problems[0]


def test_remarks_are_the_pushes_that_ended_for_a_reason() -> None:
    findings = Findings(dropped=["d"], in_flight=["i"], forgotten=["f"])
    report = dataclasses.replace(sound(), findings=findings)
    assert report.remarks == ["d", "i", "f"] and report.problems == []


def test_tables_show_every_mode_also_one_that_broke_off() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    reports = [sound(), ModeReport("async", 8, 40, broken=["It hung."])]
    console.print(faults_table(reports))
    console.print(figures_table(reports))
    shown = console.export_text()
    assert "80 / 80 = 1.0000" in shown and "1 of 1  4.0  4.0" in shown
    assert "not audited" in shown and "async" in shown


# The proxy.


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(end: socket.socket) -> None:
            with end:
                while data := end.recv(4096):
                    end.sendall(data)

        def accept() -> None:
            while True:
                try:
                    end, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(end,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[:2]
        server.shutdown(socket.SHUT_RDWR)


def connect(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), WITHIN_S)


def receive(end: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer if the connection ends."""
    data = b""
    while len(data) < count and (piece := end.recv(count - len(data))):
        data += piece
    return data


def ends(end: socket.socket) -> bool:
    """Whether the connection is over; waits for it."""
    try:
        return end.recv(1) == b""
    except ConnectionError:
        return True


def test_proxy_forwards_until_it_is_told_to_cut(echo: tuple[str, int]) -> None:
    with Proxy(*echo) as proxy, connect(proxy) as one, connect(proxy) as two:
        for end in (one, two):
            end.sendall(b"x" * 100_000)
            assert receive(end, 100_000) == b"x" * 100_000
        proxy.cut()
        assert ends(one) and ends(two)
        assert proxy.cuts == 2
        with connect(proxy) as three:
            three.sendall(b"again")
            assert receive(three, 5) == b"again"


def test_proxy_cuts_behind_the_byte_it_was_told(echo: tuple[str, int]) -> None:
    with Proxy(*echo) as proxy, connect(proxy) as end:
        end.sendall(b"0123456789")
        assert receive(end, 10) == b"0123456789"
        proxy.cut_within(15)
        end.sendall(b"0123456789")
        assert receive(end, 10) == b"01234", "ten bytes up and five down"
        assert not proxy.is_armed


def test_shut_proxy_lets_nobody_through_until_it_is_opened(echo: tuple[str, int]) -> None:
    with Proxy(*echo) as proxy, connect(proxy) as before:
        before.sendall(b"x")
        assert receive(before, 1) == b"x"
        proxy.shut()
        assert ends(before)
        with connect(proxy) as during:
            assert ends(during)
        proxy.open()
        with connect(proxy) as after:
            after.sendall(b"y")
            assert receive(after, 1) == b"y"


def test_proxy_outlives_what_is_behind_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        target = probe.getsockname()[:2]
    with Proxy(*target) as proxy, connect(proxy) as end:
        assert ends(end)
        with socket.create_server(target) as server, connect(proxy) as again:
            server.settimeout(WITHIN_S)
            behind, _ = server.accept()
            with behind:
                again.sendall(b"z")
                behind.settimeout(WITHIN_S)
                assert behind.recv(1) == b"z"


# The disk.


def test_small_tmpfs_is_full_until_there_is_room(tmp_path: Path) -> None:
    disk = Tmpfs.mounted(tmp_path)
    if disk is None:
        pytest.skip("this machine lets nobody mount a tmpfs")

    def writes(name: str) -> bool:
        command = [*disk.prefix, "sh", "-c", f"echo something > {tmp_path}/{name}"]
        quiet = subprocess.DEVNULL
        return subprocess.run(command, check=False, timeout=WITHIN_S, stderr=quiet).returncode == 0

    try:
        assert writes("before")
        disk.fill(0)
        assert not writes("while")
        disk.make_room(0)
        assert writes("after")
    finally:
        disk.close()
    assert list(tmp_path.iterdir()) == [], "it was nobody else's disk, and it is gone"
    assert disk.holder.returncode is not None


WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "wb") as file:
            file.write(bytes(2 << 20))
        print("written", flush=True)
    except OSError as error:
        print(type(error).__name__, error.errno, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_limit_on_file_sizes_is_an_error_in_the_process_and_can_be_lifted(tmp_path: Path) -> None:
    disk = SizeLimit()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def tries() -> str:
            assert process.stdin is not None and process.stdout is not None
            print("go", file=process.stdin, flush=True)
            return process.stdout.readline().strip()

        assert tries() == "written"
        disk.fill(process.pid)
        assert tries().startswith("OSError")
        disk.make_room(process.pid)
        assert tries() == "written"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(WITHIN_S) == 0


# The stage.


def a_stage(folder: Path, **more: Any) -> Stage:
    """Of a run in sync mode whose processes are all well."""
    process: Any = SimpleNamespace(running=True)
    crew: Any = SimpleNamespace(folder=folder, mode="sync", lives=[], broker=process)
    for name, value in more.items():
        setattr(crew, name, value)
    return Stage(crew, time.monotonic() + WITHIN_S)


def append(folder: Path, *records: dict[str, Any]) -> None:
    with (folder / BROKER_LOG).open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_rounds_are_counted_from_the_log_without_the_first_version(tmp_path: Path) -> None:
    stage = a_stage(tmp_path)
    append(tmp_path, release(0), release(1, push("p1")), release(2, push("p2"), push("q")))
    stage.look()
    assert stage.rounds == 2 and stage.contributions == 3
    append(tmp_path, release(3))
    stage.wait_rounds(0, "nothing")
    stage.look()
    assert stage.rounds == 3


def test_run_that_stands_still_is_broken_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "STANDSTILL_S", 0.05)
    with pytest.raises(Broken, match=r"No round closed for 0.05 s after w0 was killed."):
        a_stage(tmp_path).wait_rounds(1, "w0 was killed")


def test_deadline_ends_every_wait(tmp_path: Path) -> None:
    stage = a_stage(tmp_path)
    stage.deadline = time.monotonic()
    with pytest.raises(Broken, match="ran out of time"):
        stage.wait_until(lambda: False, 60.0, "It never came.")


def test_what_was_put_off_is_done_once_while_somebody_waits(tmp_path: Path) -> None:
    stage = a_stage(tmp_path)
    done: list[str] = []
    stage.when(lambda: "first" in done, lambda: done.append("second"))
    stage.later(0.0, lambda: done.append("first"))
    assert not stage.is_quiet
    stage.wait_until(lambda: stage.is_quiet, WITHIN_S, "Something is still put off.")
    stage.look()
    assert done == ["first", "second"]


def test_worker_that_ends_too_early_breaks_the_run(tmp_path: Path) -> None:
    child = SimpleNamespace(running=False, failure=lambda: "w0.1 died with exit code 1")
    one: Any = SimpleNamespace(
        name="w0.1", audit=tmp_path / "w0.1.jsonl", child=child, joined_at=None, ended_at=None
    )
    stage = a_stage(tmp_path, lives=[one])
    with pytest.raises(Broken, match="died with exit code"):
        stage.look()
    one.audit.write_text(json.dumps({"event": "joined"}) + "\n" + json.dumps(LEFT) + "\n")
    stage.look()
    assert one.joined_at == one.ended_at is not None


# The worker.


def test_each_step_is_on_the_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "w0.1.steps"
    assert steps_in(path) == 0
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.register_step_post_hook(StepCount(path))
    for expected in (1, 2, 3):
        weight.grad = torch.ones(1)
        optimizer.step()
        assert steps_in(path) == expected


class Hook:
    """Stands for DiLoCoWorker: each force makes the next fragments' pushes, if the run lets it."""

    def __init__(self, log: Path, fragments: int, step: int, works: bool = True) -> None:
        self.config = SimpleNamespace(num_fragments=fragments)
        self.local_step = step
        self.forced = 0
        self._log = log
        self._works = works
        log.touch()

    def writes(self, *records: dict[str, Any]) -> None:
        with self._log.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def force_sync(self) -> bool:
        self.forced += 1
        if self._works:
            for fragment in range(self.config.num_fragments):
                self.writes(frozen(f"f{fragment}", step=self.local_step, fragment=fragment))
        return self._works


@pytest.mark.parametrize(
    ("fragments", "step", "sent", "forces"),
    [(1, 12, [12], 0), (1, 13, [12], 1), (2, 12, [12, 9], 1), (2, 0, [], 0), (1, 4, [], 1)],
)
def test_worker_leaves_nothing_unsent(
    tmp_path: Path, fragments: int, step: int, sent: list[int], forces: int
) -> None:
    log = tmp_path / "log"
    hook: Any = Hook(log, fragments, step)
    hook.writes(*(frozen(f"p{f}", step=at, fragment=f) for f, at in enumerate(sent)))
    bring_in(hook, log)
    assert hook.forced == forces


def test_worker_does_not_force_for_ever(tmp_path: Path) -> None:
    hook: Any = Hook(tmp_path / "log", 1, 5, works=False)
    bring_in(hook, tmp_path / "log")
    assert 1 < hook.forced < 10


def test_checksum_tells_values_names_and_versions_apart() -> None:
    def parameters(counter: int = 1, name: str = "a", value: float = 1.0) -> GlobalParameters:
        at = VersionId(RUN, counter, 7)
        return GlobalParameters(at, {name: torch.full((2, 2), value)}, Ledger(), {0: at})

    same = {checksum(parameters()), checksum(parameters())}
    assert len(same) == 1
    others = [parameters(counter=2), parameters(name="b"), parameters(value=1.0 + 2**-23)]
    assert len(same | {checksum(other) for other in others}) == 4


def test_job_survives_its_file(tmp_path: Path) -> None:
    job = Job("w0", "tcp://h:1", "s", 1, 0.5, "t", "a", "f", "p", 9.0, "r")
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


# The crew, and the drill.


def test_crew_leaves_no_process_behind(tmp_path: Path) -> None:
    with Crew(tmp_path, "sync", None, {}, seed=0, pause=0.0) as crew:
        crew.start_broker()
        process = crew.broker.process
    try:
        assert process.poll() == -9
    finally:
        process.kill()


def test_kill_may_cost_tau_steps_more_where_fragments_are_delayed() -> None:
    assert allowed_loss("sync") == allowed_loss("async") < allowed_loss("streaming")


def test_drill_removes_nothing_but_what_a_drill_has_left(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="not of a drill"):
        empty(tmp_path)
    (tmp_path / BROKER_LOG).touch()
    empty(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)  # half a minute on two idle cores
def test_short_drill_keeps_every_promise(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diloco_tools.chaos", "--short", "--modes", "streaming"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--minutes", "4"],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "streaming.json").read_text())
    assert report["problems"] == []
    assert report["useful_work"]["not_killed"]["share"] == 1.0
    assert {each["kind"] for each in report["faults"]} >= {"kill_worker", "kill_broker", "cut"}
    assert len(report["ending"]["checksums"]) == 4
