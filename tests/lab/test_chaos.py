"""The chaos drill: audit, plan and figures; disk, watch and workers; a short one for real."""

import ast
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import diloco_lab.chaos.audit as audit_module
from diloco_lab.chaos import drill as drill_module
from diloco_lab.chaos import report as report_module
from diloco_lab.chaos.audit import (
    BROKER_LOG,
    FINAL,
    Findings,
    Version,
    WorkerLog,
    audit,
    contributions,
    lineage_of,
    log_of,
    main,
    read_lines,
    version_of,
)
from diloco_lab.chaos.crew import AUDIT, MODES, Crew, Incarnation
from diloco_lab.chaos.faults import (
    FRAGILE,
    RELAYS,
    SHORT,
    STURDY,
    WHOLE,
    Fault,
    Injected,
    Kind,
    Scale,
    plan,
)
from diloco_lab.chaos.report import averaged, new_report, problems, verdict, work, work_of
from diloco_lab.chaos.run_watch import Broken, RunWatch
from diloco_lab.chaos.worker import bring_in
from diloco_lab.driver.experiment import emptied

BROKEN = ("broken", "doubled", "lost", "uncounted", "strangers", "differing")
KINDS = (*BROKEN, "dropped", "in_flight", "forgotten")

RUN = "00000000000000aa"


def version(counter: int, tag: str = "t") -> list[Any]:
    return [RUN, counter, f"{tag}{counter}"]


def key(counter: int, tag: str = "t") -> Version:
    return (RUN, counter, f"{tag}{counter}")


def push(push_id: str, worker: str = "a", steps: int = 5, chunks: str = "all") -> dict[str, Any]:
    return {"worker": worker, "push_id": push_id, "steps": steps, "chunks": chunks, "weight": 1.0}


def release(
    counter: int,
    *pushes: dict[str, Any],
    tag: str = "t",
    after: str = "t",
    fragment: int = 0,
    epoch: str = "e",
) -> dict[str, Any]:
    return {
        "version": version(counter, tag),
        "after": version(counter - 1, after) if counter else None,
        "fragment": fragment,
        "round": counter,
        "epoch": epoch,
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
    return {"event": "counted", "push_id": push_id, "fragment": 0, "version": version(counter, tag)}


def dropped(push_id: str) -> dict[str, Any]:
    return {"event": "dropped", "push_id": push_id, "fragment": 0, "why": "late"}


LEFT = {"event": "left", "step": 10}


def a_fault(kind: Kind, target: str = "w0") -> Fault:
    return Fault(kind, target, 1, 0.0)


def log(*records: dict[str, Any], worker: str = "a") -> WorkerLog:
    return log_of(worker, 1, records)


def audited(
    releases: list[dict[str, Any]], *logs: WorkerLog, heads: tuple[Version, ...] | None = None
) -> Findings:
    """Behind a first version; the head is the last one written unless it is said."""
    read = [release(0), *releases]
    return audit(read, (version_of(read[-1]["version"]),) if heads is None else heads, logs)


# The audit: releases, logs, and which findings there are with which words; the others are empty.
AUDITS: dict[str, tuple[list[dict[str, Any]], list[WorkerLog], dict[str, list[str]]]] = {
    "a run in which all went well has no findings": (
        [release(1, push("p1"), push("q1", "b")), release(2, push("p2"))],
        [
            log(frozen("p1"), counted("p1", 1), frozen("p2"), counted("p2", 2), LEFT),
            log(frozen("q1"), counted("q1", 1), LEFT, worker="b"),
        ],
        {},
    ),
    "push in two versions of a lineage is counted twice": (
        [release(1, push("p1")), release(2, push("p1"))],
        [log(frozen("p1"), counted("p1", 1), LEFT)],
        {"doubled": ["p1 of a", "1#t1"]},
    ),
    "round that closed without any chunk of a worker that was cut off": (
        [release(1, push("p1", chunks="00")), release(2, push("p1"))],
        [log(frozen("p1"), counted("p1", 2), LEFT)],
        {},
    ),
    "same push id of two workers is two pushes": (
        [release(1, push("p1"), push("p1", "b"))],
        [
            log(frozen("p1"), counted("p1", 1), LEFT),
            log(frozen("p1"), counted("p1", 1), LEFT, worker="b"),
        ],
        {},
    ),
    "version that a crash took back counts nothing, its push is in its replacement": (
        [
            release(1, push("p1")),
            release(2, push("p2"), tag="lost"),
            release(2, push("p2")),
            release(3, push("p3")),
        ],
        [log(*[e for n in (1, 2, 3) for e in (frozen(f"p{n}"), counted(f"p{n}", n))], LEFT)],
        {},
    ),
    "lineage may go on from a version that was adopted from a worker": (
        [release(1), release(2, push("p2"), tag="x"), release(3, after="x")],
        [log(frozen("p2"), counted("p2", 2, "x"), LEFT)],
        {},
    ),
    "push that was never counted is found unless it was the last": (
        [release(1, push("p2"))],
        [log(frozen("p1"), frozen("p2"), counted("p2", 1), frozen("p3"), LEFT)],
        {"uncounted": ["p1"], "in_flight": ["p3"]},
    ),
    "killed worker may leave pushes uncounted": ([], [log(frozen("p1"), frozen("p2"))], {}),
    "half counted push of a survivor is not counted": (
        [release(1, push("p1", chunks="01")), release(2, push("p2"))],
        [log(frozen("p1"), frozen("p2"), counted("p2", 2), LEFT)],
        {"uncounted": ["p1"]},
    ),
    "dropped push is listed with its reason": (
        [],
        [log(frozen("p1"), dropped("p1"), LEFT)],
        {"dropped": ["p1", "late"]},
    ),
    "push that its worker dropped and a version contains": (
        [release(1, push("p1"))],
        [log(frozen("p1"), dropped("p1"), LEFT)],
        {"dropped": ["p1"], "differing": ["p1", "contains it"]},
    ),
    "push that was never frozen": (
        [release(1, push("p9"))],
        [log(LEFT)],
        {"strangers": ["p9"]},
    ),
    "other number of steps": (
        [release(1, push("p1", steps=6))],
        [log(frozen("p1", steps=5), counted("p1", 1), LEFT)],
        {"differing": ["has 5 steps"]},
    ),
    "version that is missing in the log breaks its lineage": (
        [release(2, push("p1"))],
        [log(frozen("p1"), LEFT)],
        {"broken": ["1#t1"], "in_flight": ["p1"]},
    ),
    "version written twice": (
        [release(1, push("p1")), release(1, push("p2"))],
        [log(frozen("p1"), frozen("p2"))],
        {"broken": ["1#t1 is twice"]},
    ),
    "version written by two incarnations of the broker": (
        [release(1, push("p1")), release(1, push("p1"), epoch="f")],
        [log(frozen("p1"))],
        {"broken": ["1#t1 is twice"]},
    ),
    "same version written again": (
        [release(1, push("p1")), release(1, push("p1"))],
        [log(frozen("p1"))],
        {},
    ),
    **{
        f"chunk of one version in another: {chunks}": (
            [release(1, push("p1", chunks="05")), release(2, push("p1", chunks=chunks))],
            [log(frozen("p1"), counted("p1", 2), LEFT)],
            found,
        )
        for chunks, found in (("02", {}), ("03", {"doubled": ["p1"]}), ("all", {"doubled": ["p1"]}))
    },
    **{
        f"push that was seen counted and is in no final version: {kind}": (
            [release(1, push("p1"), tag="lost"), release(1)],
            [log(frozen("p1"), counted("p1", 1, "lost"), *last)],
            {kind: ["p1"]},
        )
        for last, kind in (([LEFT], "lost"), ([], "forgotten"))
    },
}


@pytest.mark.parametrize("case", AUDITS)
def test_audit_finds_what_is_wrong_and_nothing_else(case: str) -> None:
    releases, logs, found = AUDITS[case]
    findings = audited(releases, *logs)
    assert {kind for kind in KINDS if getattr(findings, kind)} == found.keys()
    for kind, words in found.items():
        (sentence,) = getattr(findings, kind)
        assert all(word in sentence for word in words), sentence
    assert len(findings.problems) == len(found.keys() & set(BROKEN))


def test_lineage_is_walked_back_from_the_head_and_a_circle_ends() -> None:
    releases = [release(0), release(1, tag="x"), release(1)]
    assert lineage_of(releases, key(1)) == [release(0), release(1)]
    first = {**release(1), "after": version(2)}
    with pytest.raises(ValueError, match="comes after itself"):
        lineage_of([first, release(2)], key(2))


def test_each_fragment_has_a_lineage_of_its_own() -> None:
    releases = [
        release(0, tag="f"),
        release(0, tag="g", fragment=1),
        release(1, push("p1"), tag="f", after="f"),
        release(1, push("p2"), tag="g", after="g", fragment=1),
    ]
    of_worker = log(
        frozen("p1"), counted("p1", 1, "f"), frozen("p2", fragment=1), counted("p2", 1, "g"), LEFT
    )
    findings = audited(releases, of_worker, heads=(key(1, "f"), key(1, "g")))
    assert findings.problems == [] and len(findings.lineage) == 4
    assert len(audited(releases, of_worker, heads=(key(1, "f"),)).lost) == 1


def test_line_that_a_kill_has_torn_is_left_out_at_the_end_only() -> None:
    assert read_lines('{"a": 1}\n{"a": 2}\n{"a"') == [{"a": 1}, {"a": 2}]
    assert read_lines('{"a": 1}\n{"a": 2}') == [{"a": 1}, {"a": 2}]
    assert read_lines("") == []
    with pytest.raises(ValueError, match="Expecting"):
        read_lines('{"a": 1}\n{"a"\n{"a": 3}\n')


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
    nodes = list(ast.walk(ast.parse(Path(audit_module.__file__).read_text())))
    names = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    whole = "__future__ collections dataclasses itertools json pathlib sys typing"
    assert {name.split(".")[0] for name in names} <= set(whole.split())


@pytest.mark.parametrize("scale", [WHOLE, SHORT])
def test_plan_has_its_number_of_each_kind_kills_only_the_fragile_and_spares_the_broker_between(
    scale: Scale,
) -> None:
    for seed in range(50):
        faults = plan(seed, "relays", scale.of(RELAYS))
        kinds = [fault.kind for fault in faults]
        assert {kind: kinds.count(kind) for kind in Kind} == scale.counts
        targets = {kind: {f.target for f in faults if f.kind is kind} for kind in Kind}
        assert targets[Kind.KILL_WORKER] <= set(FRAGILE)
        assert targets[Kind.STOP_WORKER] <= set(STURDY)
        places = [i for i, kind in enumerate(kinds) if kind is Kind.KILL_BROKER]
        assert all(b - a > 2 for a, b in itertools.pairwise(places)), kinds


def test_useful_work_is_the_steps_of_whole_contributions() -> None:
    findings = audited(
        [
            release(1, push("p1", steps=6)),
            release(2, push("p2", steps=6, chunks="01")),
            release(3, push("p3", steps=6, chunks="01")),
            release(4, push("p3", steps=6, chunks="02")),
        ]
    )
    of_worker = log(*(frozen(f"p{n}", steps=6) for n in (1, 2, 3)), counted("p3", 4))
    entered = contributions(findings.lineage)
    assert work_of(20, of_worker, entered, 1) == {"trained": 20, "applied": 12, "share": 0.6}
    assert work_of(20, of_worker, entered, 2) == {"trained": 40, "applied": 12, "share": 0.3}


def incarnation(worker: str = "a", **known: Any) -> Incarnation:
    """The first process of a worker, which has joined at once unless `known` says otherwise."""
    child: Any = None
    return Incarnation(worker, 1, Path("/nowhere"), child, **{"joined_at": 0.0, **known})


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (incarnation(), True),
        (incarnation(joined_at=None), False),
        (incarnation(joined_at=10.0), False),
        (incarnation(ended_at=11.0), False),
        (incarnation(ended_at=12.0), False),
        (incarnation(ended_at=12.1), True),
        (incarnation(stops=[(9.0, 10.5)]), False),
        (incarnation(stops=[(11.9, math.inf)]), False),
        (incarnation(stops=[(8.0, 9.0), (13.0, 14.0)]), True),
    ],
)
def test_alive_throughout_is_joined_before_there_after_and_never_stopped(
    of: Incarnation, expected: bool
) -> None:
    assert of.is_alive_throughout(10.0, 12.0) is expected


def shares(found: dict[str, Any]) -> tuple[int, int]:
    assert found["share"] == found["averaged"] / found["alive"]
    return found["averaged"], found["alive"]


def test_share_averaged_is_of_those_alive_throughout() -> None:
    versions = [(1.0, {"a", "b"}), (2.0, {"a", "b"}), (3.0, {"a"}), (4.0, {"a", "c"})]
    assert shares(
        averaged(versions, [incarnation("a"), incarnation("b"), incarnation("c", joined_at=2.5)])
    ) == (5, 7)
    assert shares(averaged(versions, [incarnation("b", ended_at=2.5)])) == (1, 1)


@pytest.mark.parametrize(
    ("entry", "next_round", "survived"),
    [
        (Injected(a_fault(Kind.CUT, "w0"), 1.5), 0.5, True),
        (Injected(a_fault(Kind.CUT, "w1"), 1.5), 0.5, True),
        (Injected(a_fault(Kind.CUT, "w1"), 3.0), 1.0, False),
        (Injected(a_fault(Kind.CUT, "w0"), 4.0), None, False),
        (Injected(a_fault(Kind.CUT, "w0")), None, False),
        (Injected(a_fault(Kind.KILL_BROKER, "broker"), 3.5), 0.5, True),
        (Injected(a_fault(Kind.KILL_BROKER, "broker"), 4.0), None, False),
        (Injected(a_fault(Kind.PASSER, "passer"), 3.5), 0.5, True),
        *(
            (Injected(a_fault(kind, target), 3.5, is_over), 0.5, is_over)
            for kind, target in ((Kind.FILL_DISK, "broker"), (Kind.GUEST, "guest"))
            for is_over in (True, False)
        ),
    ],
)
def test_fault_is_survived_when_the_run_goes_on_and_its_worker_takes_part_again(
    entry: Injected, next_round: float | None, survived: bool
) -> None:
    """Versions are seen at 1, 2, 3 and 4 s; w1 is in the one at 3 s alone."""
    seen = [(float(at), release(at, push(f"p{at}", f"w{int(at == 3)}"))) for at in (1, 2, 3, 4)]
    assert verdict(entry, seen, 0.5) == {
        "kind": entry.fault.kind.name.lower(),
        "target": entry.fault.target,
        "at_s": None if entry.at is None else entry.at - 0.5,
        "next_round_s": next_round,
        "survived": survived,
    }


def append(log: Path, *records: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def a_verdict(kind: Kind, target: str = "w0", **known: Any) -> dict[str, Any]:
    found = {"kind": kind.name.lower(), "target": target, "at_s": 1.0, "next_round_s": 1.1}
    return {**found, "survived": True, **known}


KEPT = new_report("sync", 8) | {
    "faults": [
        a_verdict(Kind.KILL_WORKER),
        a_verdict(Kind.KILL_BROKER, "broker", at_s=5.0, next_round_s=4.0),
    ],
    "audit": report_module.audited(Findings(dropped=["d"], in_flight=["i"], forgotten=["f"])),
    "ending": {
        "versions": [version(9)],
        "checksum": "c0ffee",
        "checksums": {"a.1": "c0ffee"},
        "exits": {"a.1": 0},
        "broker_exit": 0,
        "broker_seconds": 1.0,
    },
    "rounds": 40.0,
    "contributions": 150,
    "useful_work": {"all": work(100, 95), "not_killed": work(80, 80)},
    "kills": [{"life": "w0.1", "trained": 20, "lost": 5.0}],
    "averaged": {"alive": 100, "averaged": 97, "share": 0.97},
}


def test_run_that_kept_every_promise_has_no_problem() -> None:
    assert list(problems(KEPT, 40)) == []
    assert KEPT["audit"]["remarks"] == ["d", "i", "f"]
    json.dumps(KEPT, allow_nan=False)


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        ("useful_work", {"not_killed": work(80, 79)}, "trained 80 steps and 79"),
        ("kills", [{"life": "w0.1", "trained": 20, "lost": 9.0}], "kill of w0.1 cost 9"),
        ("averaged", {"averaged": 94, "share": 0.94}, "94 of 100 workers alive"),
        ("rounds", 39.0, "39 rounds"),
        ("audit", {"problems": ["a.1 saw p1."]}, "a.1 saw p1"),
        ("faults", [a_verdict(Kind.CUT, survived=False)], "did not survive"),
        ("faults", [a_verdict(Kind.CUT, at_s=None, survived=False)], "never carried out"),
        ("faults", [a_verdict(Kind.KILL_BROKER, next_round_s=60.0)], "in 60.0 s"),
        ("ending", {"checksums": {"a.1": "decade"}}, "a.1 pulled other parameters"),
        ("ending", {"exits": {"a.1": -9}}, "a.1 ended with exit code -9"),
        ("ending", {"broker_exit": None}, "The broker ended with exit code None"),
    ],
)
def test_broken_promise_is_one_sentence_with_its_values(key: str, change: Any, words: str) -> None:
    changed = KEPT[key] | change if isinstance(change, dict) else change
    (sentence,) = problems(KEPT | {key: changed}, 40)
    assert words in sentence


def test_drill_that_breaks_off_says_why_and_in_which_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_off(_: RunWatch) -> None:
        raise Broken("w0 did not join.")

    monkeypatch.setattr(drill_module, "open_run", breaks_off)
    report = drill_module.drill("sync", tmp_path, SHORT, 0)
    assert report["problems"] == ["sync: w0 did not join."]


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_full_disk_is_an_error_in_the_broker_until_there_is_room(tmp_path: Path) -> None:
    crew, large = Crew(tmp_path, MODES["sync"], tmp_path, seed=0), bytes(2 << 20)
    this: Any = SimpleNamespace(pid=os.getpid())
    crew.broker = this
    crew.fill_disk()
    try:
        (tmp_path / "small").write_bytes(b"a log")
        with pytest.raises(OSError, match="File too large"):
            (tmp_path / "file").write_bytes(large)
    finally:
        crew.make_room()
    (tmp_path / "file").write_bytes(large)


def a_watch(folder: Path, *incarnations: Incarnation) -> RunWatch:
    """Of a run in sync mode whose broker is well."""
    broker = SimpleNamespace(running=True)
    crew: Any = SimpleNamespace(
        folder=folder, mode=MODES["sync"], incarnations=incarnations, broker=broker, relays={}
    )
    return RunWatch(crew, slowness=1.0)


def test_rounds_are_counted_from_the_log_without_the_first_version(tmp_path: Path) -> None:
    watch = a_watch(tmp_path)
    append(
        tmp_path / BROKER_LOG, release(0), release(1, push("p1")), release(2, push("p2"), push("q"))
    )
    watch.look()
    assert watch.rounds == 2
    append(tmp_path / BROKER_LOG, release(3))
    watch.wait_rounds(0, "nothing")
    watch.look()
    assert watch.rounds == 3


def test_kill_may_delay_the_next_round_for_longer_where_the_machine_is_slow() -> None:
    late = KEPT | {"faults": [a_verdict(Kind.KILL_BROKER, next_round_s=60.0)]}
    assert list(problems(late, 40))
    assert not list(problems(late | {"slowness": 4.0}, 40))


def test_worker_that_ends_too_early_breaks_the_run(tmp_path: Path) -> None:
    child: Any = SimpleNamespace(running=False, failure=lambda: "w0.1 died with exit code 1")
    one = Incarnation("w0", 1, tmp_path, child)
    watch = a_watch(tmp_path, one)
    with pytest.raises(Broken, match="died with exit code"):
        watch.look()
    append(one.file(AUDIT), {"event": "joined"}, LEFT)
    watch.look()
    assert one.joined_at == one.ended_at is not None


class Hook:
    """Stands for DiLoCoWorker: each force makes the next fragments' pushes, if the run lets it."""

    def __init__(self, log: Path, fragments: int, step: int, works: bool = True) -> None:
        self.config = SimpleNamespace(num_fragments=fragments)
        self.local_step = step
        self.forced = 0
        self._log = log
        self._works = works
        log.touch()

    def force_sync(self) -> bool:
        self.forced += 1
        if self._works:
            for f in range(self.config.num_fragments):
                append(self._log, frozen(f"f{f}", step=self.local_step, fragment=f))
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
    append(log, *(frozen(f"p{f}", step=at, fragment=f) for f, at in enumerate(sent)))
    bring_in(hook, log)
    assert hook.forced == forces
    stubborn: Any = Hook(tmp_path / "other", 1, 5, works=False)
    bring_in(stubborn, tmp_path / "other")
    assert 1 < stubborn.forced < 10, "it gives up"


def test_crew_leaves_no_process_behind(tmp_path: Path) -> None:
    with Crew(tmp_path, MODES["sync"], tmp_path, seed=0) as crew:
        crew.start_broker()
        process = crew.broker.process
    try:
        assert process.poll() == -9
    finally:
        process.kill()


def test_drill_removes_nothing_but_what_a_drill_has_left(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="something else"):
        emptied(tmp_path, BROKER_LOG)
    (tmp_path / BROKER_LOG).touch()
    for _ in range(2):
        assert list(emptied(tmp_path, BROKER_LOG).iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute on two idle cores
@pytest.mark.parametrize("mode", ["streaming", "relays"])
def test_short_drill_keeps_every_promise(tmp_path: Path, mode: str) -> None:
    command = [sys.executable, "-m", "diloco_lab.chaos", "--short", "--modes", mode]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], check=False, capture_output=True, text=True, timeout=880
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / f"{mode}.json").read_text())
    assert report["problems"] == []
    assert report["useful_work"]["not_killed"]["share"] == 1.0
    assert {each["kind"] for each in report["faults"]} >= {"kill_worker", "kill_broker", "cut"}
    assert len(report["ending"]["checksums"]) == 4
