"""Nothing is lost, or counted twice: processes are killed, disks are full, slow or damaged.

What a run has counted is read from its audit file, and computed again in plain torch.
"""

import json
import os
import random
import re
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_broker.storage import checkpoint
from diloco_broker.storage.audit_log import AuditLog
from diloco_broker.storage.checkpoint import Damaged, found, load
from diloco_protocol.version import VersionId
from diloco_worker import DiLoCoClient, GlobalParameters
from kit import process_kit
from kit.checkpoints import a_checkpoint, assert_equal
from kit.core_harness import a_run
from kit.layers import Layers, delta, name_of
from kit.process_kit import (
    PATIENCE_S,
    Processes,
    a_free_address,
    memory_kib,
    wait_for,
)

FP32 = ("--wire-dtype", "fp32")


@contextmanager
def a_client(address: str, worker_id: str = "w") -> Iterator[DiLoCoClient]:
    """One that has joined with one layer."""
    with DiLoCoClient(address, worker_id=worker_id, timeout=PATIENCE_S) as client:
        client.join(Layers())
        yield client


def pushes_and_pulls(client: DiLoCoClient, first: int, last: int) -> GlobalParameters:
    """Make these pushes of worker 0; returns the parameters after them."""
    for number in range(first, last):
        client.push({name_of(0): delta(0, number)})
        final = client.pull()
    return final


@dataclass
class Walker:
    """A worker that pushes one pseudo-gradient after the other until `enough` is set."""

    number: int
    address: str
    pieces: int
    enough: threading.Event = field(default_factory=threading.Event)
    pushes: dict[str, tuple[int, int]] = field(default_factory=dict)  # push id: fragment, number
    done: int = 0

    @property
    def name(self) -> str:
        return f"w{self.number}"

    def run(self, least: int) -> None:
        with DiLoCoClient(self.address, worker_id=self.name, timeout=PATIENCE_S) as client:
            client.join(Layers(self.pieces))
            while self.done < least or not self.enough.is_set():
                fragment = self.done % self.pieces
                gradient = {name_of(fragment): delta(self.number, self.done)}
                which = fragment if self.pieces > 1 else None
                push_id = client.push(gradient, fragment=which, steps=1)
                self.pushes[f"{push_id:016x}"] = (fragment, self.done)
                client.pull()
                self.done += 1


@contextmanager
def walking(workers: int, address: str, least: int, pieces: int = 1) -> Iterator[list[Walker]]:
    """Workers in threads, each for at least `least` pushes, until the body is over."""
    walkers = [Walker(number, address, pieces) for number in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        runs = [pool.submit(walker.run, least) for walker in walkers]
        try:
            yield walkers
        finally:
            for walker in walkers:
                walker.enough.set()
        # In rounds the others wait for a worker that still has to push.
        for run in runs:
            run.result(PATIENCE_S)


def wait_for_pushes(walkers: list[Walker], pushes: int) -> None:
    """Wait until each of them has made this many more pushes."""
    wanted = [walker.done + pushes for walker in walkers]
    wait_for(lambda: all(w.done >= least for w, least in zip(walkers, wanted, strict=True)))


def history(audit: Path, fragment: int, version: VersionId) -> list[dict[str, Any]]:
    """The lines that lead to a version, the first in front."""
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    by_version = {str((each["fragment"], each["version"])): each for each in lines}
    chain: list[dict[str, Any]] = []
    before: list[Any] | None = [version.run, version.counter, f"{version.tag:016x}"]
    while before is not None:
        chain.insert(0, by_version[str((fragment, before))])
        before = chain[0]["after"]
    return chain


def replay(
    lines: list[dict[str, Any]], walkers: list[Walker], start: Tensor, rule: dict[str, float]
) -> Tensor:
    """The parameters of a fragment: torch's own SGD on the means of the counted pushes."""
    weight = nn.Parameter(start.clone())
    outer = torch.optim.SGD([weight], **rule, nesterov=rule["momentum"] > 0)  # type: ignore[arg-type]
    deltas = {i: delta(w.number, n) for w in walkers for i, (_, n) in w.pushes.items()}
    for line in lines:
        if line["pushes"]:
            assert all(push["chunks"] == "all" for push in line["pushes"]), "no worker has died"
            parts = [deltas[push["push_id"]] for push in line["pushes"]]
            weight.grad = torch.stack(parts).mean(0)
            outer.step()
    return weight.detach()


RUNS: dict[str, dict[str, Any]] = {
    "two fragments, staged, durable": {
        "num_fragments": 2,
        "sync_every": 8,
        "durable": True,
        "deterministic": True,
    },
    "async durable": {"mode": "async", "outer": "nesterov", "durable": True},
    "rarely saved": {"outer": "sgd", "save_every": 4},
    "not saved": {"outer": "sgd", "save_dir": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_everything_counts_exactly_once_through_kills_of_the_broker(
    processes: Processes, tmp_path: Path, name: str
) -> None:
    """Killed at random moments of a round while three workers go on, and started again.

    Without --durable momentum may be lost with a version that was not saved, so there the outer
    optimizer has none; the rest is the same.
    """
    kills = 2
    draw = random.Random(name)
    pieces = RUNS[name].get("num_fragments", 1)
    audit = tmp_path / "audit"
    options = {"save_dir": str(tmp_path / "run"), "audit": str(audit), "workers": 3, **RUNS[name]}
    options["bind"] = a_free_address()
    broker = processes.broker(**options)
    broker.address()
    times = []
    with walking(3, options["bind"], 2 * pieces, pieces) as walkers:
        for _ in range(kills):
            wait_for_pushes(walkers, 1)
            threading.Event().wait(draw.uniform(0, 0.15))  # the moment is the fault
            broker.kill()
            began = time.monotonic()
            broker = processes.broker(**options)
            wait_for_pushes(walkers, 2)  # the first may have been over when it was killed
            times.append(time.monotonic() - began)
    if options["save_dir"] is None:
        broker.says("from versions of its workers")
    with DiLoCoClient(options["bind"], timeout=PATIENCE_S) as client:
        final = client.pull()
    assert max(times) < 10, f"from the start to the second round that is over: {times} s"
    rule = {"lr": 0.7, "momentum": 0.9}
    if RUNS[name].get("outer") == "sgd":  # without a round to average in, each counts 1/workers
        rule = {"lr": 0.7 / (3 if RUNS[name].get("mode") == "async" else 1), "momentum": 0.0}
    start = Layers(pieces).state_dict()
    counted: Counter[str] = Counter()
    for fragment, version in final.versions.items():
        lines = history(audit, fragment, version)
        counted.update(push["push_id"] for line in lines for push in line["pushes"])
        key = name_of(fragment)
        wanted = replay(lines, walkers, start[key], rule)
        torch.testing.assert_close(final.tensors[key], wanted, rtol=1e-4, atol=1e-4)
    made = [push_id for walker in walkers for push_id in walker.pushes]
    assert counted == Counter(made), "each push exactly once"
    assert len({line["epoch"] for line in map(json.loads, audit.read_text().splitlines())}) >= 2


def test_broker_that_was_stopped_goes_on_with_all_its_workers(processes: Processes) -> None:
    """SIGSTOP for longer than the heartbeat timeout, in the middle of a round."""
    broker = processes.broker(workers=2, heartbeat_timeout=1.0)
    gone_on = threading.Event()

    def trains(worker: int) -> None:
        with a_client(address, f"w{worker}") as client:
            pushes_and_pulls(client, 0, 1)
            if worker == 1:
                assert gone_on.wait(PATIENCE_S)
            pushes_and_pulls(client, 1, 3)

    def is_half_way(round_: dict[str, Any]) -> bool:
        return round_["number"] == 1 and list(round_["arrived"]) == ["w0"]

    address = broker.address()
    with ThreadPoolExecutor(2) as pool, DiLoCoClient(address, timeout=PATIENCE_S) as observer:
        runs = [pool.submit(trains, worker) for worker in range(2)]
        try:
            wait_for(lambda: is_half_way(observer.status()["round"]))
            served = observer.status()["uptime_s"]
            os.kill(broker.pid, signal.SIGSTOP)
            threading.Event().wait(2.0)
            os.kill(broker.pid, signal.SIGCONT)
            wait_for(lambda: observer.status()["uptime_s"] > served + 0.5)
        finally:
            gone_on.set()
        for run in runs:
            run.result(PATIENCE_S)
    assert "dead" not in broker.output, broker.output
    assert broker.output.count("2 of 2 expected workers averaged") == 3, broker.output


def test_signal_saves_tells_workers_and_ends_with_0(processes: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broker, address = processes.serve("--save-dir", str(folder), *FP32, "--save-every", "50")
    with a_client(address) as client:
        final = pushes_and_pulls(client, 0, 3)
        assert [path.name[-1] for path in wait_for(lambda: found(folder))] == ["0"]
        began = time.monotonic()
        os.kill(broker.pid, signal.SIGTERM)
        assert broker.ends() == 0
        assert time.monotonic() - began < 10
        assert client._link is not None
        wait_for(lambda: client._link.restarting)  # type: ignore[union-attr]
        assert "SIGTERM" in str(client._link.restarting)
    newest = load(found(folder)[0])
    assert (newest.number, newest.record.fragments[0].version) == (3, final.version)
    assert torch.equal(
        torch.cat(list(newest.tensors[0].chunks)), final.tensors[name_of(0)].flatten()
    )


def test_second_signal_ends_at_once_as_a_save_hangs(processes: Processes, tmp_path: Path) -> None:
    options = ("--save-dir", str(tmp_path / "run"), *FP32)
    broker, address = processes.serve(*options, by=process_kit.on_a_disk_that_hangs)
    with a_client(address) as client:
        final = pushes_and_pulls(client, 0, 3)
        assert final.version.counter == 3, "a run does not wait for its disk"
        broker.says("hangs")
        os.kill(broker.pid, signal.SIGTERM)
        broker.says("Stopping")
        began = time.monotonic()
        os.kill(broker.pid, signal.SIGINT)
        assert broker.ends() == 128 + signal.SIGINT
        assert time.monotonic() - began < 2
    assert [load(path).number for path in found(tmp_path / "run")] == [0]


def test_run_goes_on_with_a_full_disk_and_saves_later(processes: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broker = processes.broker(save_dir=str(folder), keep=2)
    with a_client(broker.address()) as client:
        pushes_and_pulls(client, 0, 2)
        wait_for(lambda: client.status()["checkpoint"]["round"] == 2)
        broker.may_write(1000)
        pushes_and_pulls(client, 2, 5)
        problem = wait_for(lambda: client.status()["checkpoint"]["error"])
        assert "File too large" in problem
        texts = [event["text"] for event in client.status()["events"]]
        assert sum("could not be written: File too large" in text for text in texts) == 1
        broker.says("ERROR The checkpoint before round 3 could not be written")
        assert load(found(folder)[0]).number == 2
        # Unfinished saves are removed, except for the one that is being tried now.
        wait_for(lambda: [path.name[0] for path in folder.iterdir() if path.is_dir()] == ["c", "c"])
        broker.may_write(-1)
        final = pushes_and_pulls(client, 5, 6)
        wait_for(lambda: client.status()["checkpoint"]["round"] == 6)
        assert client.status()["checkpoint"]["error"] is None
        broker.says("Checkpoints are written again")
    assert load(found(folder)[0]).record.fragments[0].version == final.version


def test_durable_run_waits_for_room_and_loses_nothing(processes: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broker = processes.broker(save_dir=str(folder), durable=True)
    with a_client(broker.address()) as client:
        pushes_and_pulls(client, 0, 1)
        broker.may_write(1000)
        client.push({name_of(0): delta(0, 1)})
        wait_for(lambda: client.status()["checkpoint"]["error"])
        assert client.status()["fragments"][0]["version"] == 1
        broker.says("The round waits for it (--durable)")
        broker.may_write(-1)
        assert client.pull().version.counter == 2
    assert load(found(folder)[0]).number == 2


@pytest.mark.slow
def test_broker_starts_and_ends_on_a_full_disk(processes: Processes, tmp_path: Path) -> None:
    """Neither its lock nor its audit log can be written."""
    audit = tmp_path / "audit"
    options = ("--save-dir", str(tmp_path / "run"), *FP32, "--audit", str(audit))
    broker, address = processes.serve(*options, by=process_kit.on_a_full_disk)
    with a_client(address) as client:
        pushes_and_pulls(client, 0, 2)
        wait_for(lambda: client.status()["checkpoint"]["error"])
        texts = " ".join(event["text"] for event in client.status()["events"])
        assert f"Cannot write the audit log {audit}: File too large." in texts
        assert "checkpoint" in texts
    os.kill(broker.pid, signal.SIGTERM)
    assert broker.ends(20) == 0
    assert "Traceback" not in broker.output


def test_audit_log_has_no_wrong_line_after_a_full_disk(tmp_path: Path) -> None:
    """The line that could not be written is missing; all others can be read."""
    stage, (a,) = a_run("a")
    a.pushes(7)
    file = tmp_path / "audit"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(AuditLog(file, "e")) as log:
        log.add(stage.audits[-1])
        room = file.stat().st_size + 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))  # of this process
        try:
            with pytest.raises(OSError, match="File too large"):
                log.add(stage.audits[-1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        log.add(stage.audits[-1])
    with closing(AuditLog(file, "f")) as log:
        log.add(stage.audits[-1])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["epoch"] for line in lines] == ["e", "e", "f"]


def bytes_written(file: str) -> int:
    """What the write calls were given, whatever reached a disk by now."""
    return int(re.search(r"wchar: (\d+)", Path(file).read_text())[1])  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_save_copies_no_model_and_stops_no_loop(processes: Processes, tmp_path: Path) -> None:
    """The peak of memory, and the bytes that the loop writes, of 20 MB with as much momentum."""
    sizes: dict[str, Any] = {"chunk_elements": 1 << 19, "wire_dtype": "fp32", "keep": 1}
    broker = processes.broker(**sizes, save_dir=str(tmp_path), save_every=100)
    model = Layers(5, size=1000)
    with DiLoCoClient(broker.address(), timeout=PATIENCE_S) as client:
        client.join(model)
        for _ in range(2):
            client.push({name: 1e-3 * torch.randn(1000, 1000) for name in model.state_dict()})
            client.pull()
        Path(f"/proc/{broker.pid}/clear_refs").write_text("5")  # the peak begins anew
        before = memory_kib(broker.pid, "VmHWM")
        assert client.control("save").ok
        wait_for(lambda: client.status()["checkpoint"]["round"] == 2)
        assert memory_kib(broker.pid, "VmHWM") - before < 7_800, "KiB: it has made a copy"
        assert bytes_written(f"/proc/{broker.pid}/io") > 40e6, "by all threads"
        assert bytes_written(f"/proc/{broker.pid}/task/{broker.pid}/io") < 1e6, "by the loop's"
    assert (found(tmp_path)[0] / "fragment-0.safetensors").stat().st_size > 40e6


def test_file_that_another_life_has_damaged_is_not_linked_to(tmp_path: Path) -> None:
    """The newest is damaged, the broker goes on from the one before and is given the same version."""
    old = a_checkpoint(4)
    checkpoint.save(tmp_path, old, keep=3)
    fresh = a_checkpoint(5, seed=1)
    newer = checkpoint.save(tmp_path, fresh, keep=3)
    for file in newer.glob("fragment-*"):
        whole = file.read_bytes()
        file.unlink()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(Damaged):
        load(newer)
    adopted = replace(fresh, incarnation=old.incarnation + 1)
    assert_equal(load(checkpoint.save(tmp_path, adopted, keep=3)), adopted)


def test_rewritten_checkpoint_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one is requested twice."""
    made = a_checkpoint(4)
    checkpoint.save(tmp_path, made, keep=1)
    rename = Path.rename

    def look(self: Path, target: Path) -> Path:
        assert found(tmp_path), "a kill at this moment would lose the run"
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", look)
    assert_equal(load(checkpoint.save(tmp_path, made, keep=1)), made)
