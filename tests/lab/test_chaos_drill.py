"""The chaos drill itself: its report, proxy, disk and workers, and a short one for real."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import socketserver
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

from diloco_lab.chaos import drill as drill_module
from diloco_lab.chaos import inject as inject_module
from diloco_lab.chaos import run_watch as watch_module
from diloco_lab.chaos.audit import BROKER_LOG, Findings
from diloco_lab.chaos.crew import AUDIT, MODES, STEPS, Crew, DrillProxy, Life
from diloco_lab.chaos.faults import SHORT, Kind
from diloco_lab.chaos.report import (
    USUAL_S,
    audited,
    faults_table,
    figures_table,
    new_report,
    problems,
    slowness_of,
    work,
)
from diloco_lab.chaos.run_watch import MODE_S, STANDSTILL_S, Broken, RunWatch
from diloco_lab.chaos.worker import StepCount, bring_in, checksum
from diloco_lab.driver.experiment import emptied
from diloco_protocol import Ledger, VersionId
from diloco_worker import GlobalParameters
from kit.audit_records import LEFT, RUN, WITHIN_S, a_life, frozen, push, release, version


def append(log: Path, *records: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


# The report.


def verdict(kind: Kind, target: str = "w0", **known: Any) -> dict[str, Any]:
    found = {"kind": kind.name.lower(), "target": target, "at_s": 1.0, "next_round_s": 1.1}
    return {**found, "survived": True, **known}


KEPT = new_report("sync", 8) | {
    "faults": [
        verdict(Kind.KILL_WORKER),
        verdict(Kind.KILL_BROKER, "broker", at_s=5.0, next_round_s=4.0),
    ],
    "audit": audited(Findings(dropped=["d"], in_flight=["i"], forgotten=["f"])),
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
        ("faults", [verdict(Kind.CUT, survived=False)], "did not get over"),
        ("faults", [verdict(Kind.CUT, at_s=None, survived=False)], "never carried out"),
        ("faults", [verdict(Kind.KILL_BROKER, next_round_s=60.0)], "in 60.0 s"),
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


def test_tables_show_every_mode_also_one_that_broke_off() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    cuts = [verdict(Kind.CUT, next_round_s=s, survived=s < 2) for s in (0.5, 1.0, 3.0)]
    reports = [KEPT | {"faults": [*KEPT["faults"], *cuts]}, new_report("async", 8)]
    console.print(faults_table(reports))
    console.print(figures_table(reports))
    shown = console.export_text()
    assert "80 / 80 = 1.0000" in shown and "1 of 1  4.0  4.0" in shown
    assert "2 of 3  1.0  3.0" in shown, "median and worst"
    assert "not audited" in shown and "async" in shown


# The proxy.


class Echo(socketserver.BaseRequestHandler):
    """Sends back what it gets."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            while data := self.request.recv(4096):
                self.request.sendall(data)


@pytest.fixture
def echo() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"tcp://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def connect(proxy: DrillProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), WITHIN_S)


def receive(end: socket.socket, count: int) -> bytes:
    """This many bytes, or fewer if the connection ends."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < count and (piece := end.recv(count - len(data))):
            data += piece
    return data


def ends(end: socket.socket) -> bool:
    """Whether the connection is over; waits for it."""
    return receive(end, 1) == b""


def says(end: socket.socket, data: bytes) -> bool:
    """Whether what is said comes back."""
    end.sendall(data)
    return receive(end, len(data)) == data


def test_proxy_forwards_until_it_is_told_to_cut_or_shut(echo: str) -> None:
    with DrillProxy(echo) as proxy, connect(proxy) as one, connect(proxy) as two:
        assert says(one, b"x" * 100_000) and says(two, b"x" * 100_000)
        proxy.cut()
        assert ends(one) and ends(two)
        with connect(proxy) as before:
            assert says(before, b"again")
            proxy.shut()
            assert ends(before)
        with connect(proxy) as during:
            assert ends(during)
        proxy.open()
        with connect(proxy) as after:
            assert says(after, b"y")


def test_proxy_cuts_behind_the_byte_it_was_told(echo: str) -> None:
    with DrillProxy(echo) as proxy, connect(proxy) as end:
        assert says(end, b"0123456789")
        proxy.cut_within(15)
        end.sendall(b"0123456789")
        assert receive(end, 10) == b"01234", "ten bytes up and five down"
        assert not proxy.is_armed


def test_proxy_outlives_what_is_behind_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        target = probe.getsockname()[:2]
    with DrillProxy(f"tcp://127.0.0.1:{target[1]}") as proxy, connect(proxy) as end:
        assert ends(end)
        with socket.create_server(target) as server, connect(proxy) as again:
            server.settimeout(WITHIN_S)
            behind, _ = server.accept()
            behind.settimeout(WITHIN_S)
            with behind:
                again.sendall(b"z")
                assert receive(behind, 1) == b"z"


# The disk.


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


# The watch.


def a_watch(folder: Path, *lives: Life) -> RunWatch:
    """Of a run in sync mode whose broker is well."""
    broker = SimpleNamespace(running=True)
    crew: Any = SimpleNamespace(
        folder=folder, mode=MODES["sync"], lives=lives, broker=broker, relays={}
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


class Clock:
    """Stands for the module `time`: nothing passes but what is slept."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch_module, "time", clock)
    return clock


@pytest.mark.parametrize("slowness", [1.0, 10.0])
def test_run_that_stands_still_is_broken_later_where_the_machine_is_slow(
    tmp_path: Path, clock: Clock, slowness: float
) -> None:
    watch = a_watch(tmp_path)
    watch.slowness = slowness
    with pytest.raises(Broken, match="after w0 was killed"):
        watch.wait_rounds(1, "w0 was killed")
    assert clock.now == pytest.approx(STANDSTILL_S * slowness, abs=0.1)


@pytest.mark.parametrize("slowness", [1.0, 10.0])
def test_mode_may_take_longer_where_the_machine_is_slow(
    tmp_path: Path, clock: Clock, slowness: float
) -> None:
    watch = a_watch(tmp_path)
    watch.slowness = slowness
    with pytest.raises(Broken, match="It never came"):
        watch.wait_until(lambda: False, 10_000.0, "It never came.")
    assert clock.now == pytest.approx(MODE_S * slowness, abs=0.1)


def test_pace_is_that_of_a_calm_beginning_and_no_machine_is_too_fast() -> None:
    assert slowness_of(USUAL_S / 3) == slowness_of(USUAL_S) == 1.0
    assert slowness_of(4 * USUAL_S) == 4.0


def test_kill_may_delay_the_next_round_for_longer_where_the_machine_is_slow() -> None:
    late = KEPT | {"faults": [verdict(Kind.KILL_BROKER, next_round_s=60.0)]}
    assert list(problems(late, 40))
    assert not list(problems(late | {"slowness": 4.0}, 40))


def test_what_was_put_off_is_done_once_while_somebody_waits(tmp_path: Path) -> None:
    watch = a_watch(tmp_path)
    done: list[str] = []
    watch.when(lambda: "first" in done, lambda: done.append("second"))
    watch.later(0.0, lambda: done.append("first"))
    assert not watch.is_quiet
    watch.wait_until(lambda: watch.is_quiet, WITHIN_S, "Something is still put off.")
    watch.look()
    assert done == ["first", "second"]


def test_worker_that_ends_too_early_breaks_the_run(tmp_path: Path) -> None:
    child: Any = SimpleNamespace(running=False, failure=lambda: "w0.1 died with exit code 1")
    one = a_life(folder=str(tmp_path), child=child)
    watch = a_watch(tmp_path, one)
    with pytest.raises(Broken, match="died with exit code"):
        watch.look()
    append(one.file(AUDIT), {"event": "joined"}, LEFT)
    watch.look()
    assert one.joined_at == one.ended_at is not None


def test_worker_may_be_stopped_while_its_relay_is_away(tmp_path: Path) -> None:
    child: Any = SimpleNamespace(running=True)
    life = a_life("w2", str(tmp_path), child, joined_at=1.0)
    ends = [inject_module._stands_still(life, at) for at in (10.0, 11.0)]
    assert not life.is_alive_throughout(12.0, 13.0)
    for goes_on in ends:  # in whichever order they come
        goes_on()
    assert [at for at, _ in life.stops] == [10.0, 11.0]
    assert life.is_alive_throughout(time.monotonic() + 1.0, time.monotonic() + 2.0)


# The worker.


def test_each_step_is_on_the_disk_at_once(tmp_path: Path) -> None:
    life = a_life(folder=str(tmp_path))
    assert life.steps == 0
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.register_step_post_hook(StepCount(life.file(STEPS)))
    for expected in (1, 2, 3):
        weight.grad = torch.ones(1)
        optimizer.step()
        assert life.steps == expected


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
    assert 1 < stubborn.forced < 10, "it does not force for ever"


def test_checksum_tells_values_names_and_versions_apart() -> None:
    def parameters(counter: int = 1, name: str = "a", value: float = 1.0) -> GlobalParameters:
        at = VersionId(RUN, counter, 7)
        return GlobalParameters(at, {name: torch.full((2, 2), value)}, Ledger(), {0: at})

    same = {checksum(parameters()), checksum(parameters())}
    assert len(same) == 1
    others = [parameters(counter=2), parameters(name="b"), parameters(value=1.0 + 2**-23)]
    assert len(same | {checksum(other) for other in others}) == 4


# The crew, and the drill.


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
        [*command, "--out", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / f"{mode}.json").read_text())
    assert report["problems"] == []
    assert report["useful_work"]["not_killed"]["share"] == 1.0
    assert {each["kind"] for each in report["faults"]} >= {"kill_worker", "kill_broker", "cut"}
    assert len(report["ending"]["checksums"]) == 4
