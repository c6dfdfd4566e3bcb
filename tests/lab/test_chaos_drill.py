"""The chaos drill itself: its report, proxy, disk and workers, and a short one for real."""

import contextlib
import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_lab.chaos import drill as drill_module
from diloco_lab.chaos.audit import BROKER_LOG, Findings
from diloco_lab.chaos.crew import AUDIT, MODES, Crew, DrillProxy, Life
from diloco_lab.chaos.faults import SHORT, Kind
from diloco_lab.chaos.report import audited, new_report, problems, work
from diloco_lab.chaos.run_watch import Broken, RunWatch
from diloco_lab.chaos.worker import bring_in
from diloco_lab.driver.experiment import emptied
from kit.audit_records import LEFT, WITHIN_S, a_life, frozen, push, release, version


def append(log: Path, *records: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


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
        ("faults", [verdict(Kind.CUT, survived=False)], "did not survive"),
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


def says(end: socket.socket, data: bytes) -> bool:
    """Whether what is said comes back."""
    end.sendall(data)
    return receive(end, len(data)) == data


def test_proxy_cuts_behind_the_byte_it_was_told(echo: str) -> None:
    with DrillProxy(echo) as proxy, connect(proxy) as end:
        assert says(end, b"0123456789")
        proxy.cut_within(15)
        end.sendall(b"0123456789")
        assert receive(end, 10) == b"01234", "ten bytes up and five down"
        assert not proxy.is_armed


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


def test_kill_may_delay_the_next_round_for_longer_where_the_machine_is_slow() -> None:
    late = KEPT | {"faults": [verdict(Kind.KILL_BROKER, next_round_s=60.0)]}
    assert list(problems(late, 40))
    assert not list(problems(late | {"slowness": 4.0}, 40))


def test_worker_that_ends_too_early_breaks_the_run(tmp_path: Path) -> None:
    child: Any = SimpleNamespace(running=False, failure=lambda: "w0.1 died with exit code 1")
    one = a_life(folder=str(tmp_path), child=child)
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
