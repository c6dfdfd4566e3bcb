"""Nothing is lost: brokers and workers killed for real, disks that are full, checkpoints half-written.

What a run has counted is read from its audit file, and computed again in plain torch.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nursery
import pytest
import torch
from nursery import Child, Nursery, wait_for
from test_checkpoint import an_image, assert_equal
from test_processes import a_free_address
from torch import Tensor, nn

from diloco_broker import Broker, BrokerConfig, checkpoint, saving
from diloco_broker.checkpoint import Damaged, found, load
from diloco_protocol import UsageError
from diloco_worker import DiLoCoClient

LOCAL: dict[str, Any] = {
    "bind": "tcp://127.0.0.1:*",
    "feed": "tcp://127.0.0.1:*",
    "chunk_elements": 16,
    "wire_dtype": "fp32",
}
SIZE = 24  # of a layer: 576 parameters, 36 chunks
PATIENCE_S = 40.0


@pytest.fixture
def nest() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


class Layers(nn.Module):
    """So many layers without biases: with as many fragments, layer i is fragment i."""

    def __init__(self, layers: int = 1, size: int = SIZE) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(layers))
        generator = torch.Generator().manual_seed(1)  # of its own: threads make models as well
        for weight in self.parameters():
            weight.data.copy_(torch.randn(size, size, generator=generator))


def name_of(fragment: int) -> str:
    return f"layers.{fragment}.weight"


def delta(worker: int, number: int) -> Tensor:
    """The pseudo-gradient of a worker's push 0, 1, ..."""
    generator = torch.Generator().manual_seed(1000 * worker + number)
    return torch.randn(SIZE, SIZE, generator=generator)


@dataclass
class Walker:
    """A worker that pushes one pseudo-gradient after the other until it is told that it is enough."""

    number: int
    address: str
    pieces: int
    enough: threading.Event = field(default_factory=threading.Event)
    pushes: dict[str, tuple[int, int]] = field(default_factory=dict)  # push id: fragment, number
    done: int = 0
    warned: str | None = None

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


def all_go_on(walkers: list[Walker], pushes: int) -> None:
    """Wait until each of them has made so many more."""
    wanted = [walker.done + pushes for walker in walkers]
    wait_for(lambda: all(w.done >= least for w, least in zip(walkers, wanted, strict=True)))


def history(audit: Path, fragment: int, version: list[Any] | None) -> list[dict[str, Any]]:
    """The lines that lead to a version, the first in front."""
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    by_version = {str((each["fragment"], each["version"])): each for each in lines}
    chain: list[dict[str, Any]] = []
    while version is not None:
        chain.insert(0, by_version[str((fragment, version))])
        version = chain[0]["after"]
    return chain


def replay(
    lines: list[dict[str, Any]], walkers: list[Walker], start: Tensor, rule: dict[str, float]
) -> Tensor:
    """The parameters of a fragment: torch's own SGD on the means of what was counted."""
    weight = nn.Parameter(start.clone())
    outer = torch.optim.SGD([weight], **rule, nesterov=rule["momentum"] > 0)  # type: ignore[arg-type]
    deltas = {i: delta(w.number, n) for w in walkers for i, (_, n) in w.pushes.items()}
    for line in lines:
        if line["pushes"]:
            assert all(push["chunks"] == "all" for push in line["pushes"]), "nobody has died"
            parts = [deltas[push["push_id"]] for push in line["pushes"]]
            weight.grad = torch.stack(parts).mean(0)
            outer.step()
    return weight.detach()


RUNS: dict[str, dict[str, Any]] = {
    "sync": {"outer": "sgd"},
    "sync durable": {"durable": True},
    "sync staged durable": {"durable": True, "deterministic": True},
    "async": {"mode": "async", "outer": "sgd"},
    "async durable": {"mode": "async", "outer": "nesterov", "durable": True},
    "two fragments": {"num_fragments": 2, "sync_every": 8, "outer": "sgd"},
    "two fragments durable": {"num_fragments": 2, "sync_every": 8, "durable": True},
    "rarely saved": {"outer": "sgd", "save_every": 4},
    "not saved": {"outer": "sgd", "save_dir": None},
}


@pytest.mark.parametrize("name", RUNS)
def test_everything_counts_exactly_once_through_kills_of_the_broker(
    nest: Nursery, tmp_path: Path, name: str
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
    walkers = [Walker(number, options["bind"], pieces) for number in range(3)]
    broker = nest.broker(**options)
    broker.address()
    times = []
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(walker.run, 2 * pieces) for walker in walkers]
        try:
            for _ in range(kills):
                all_go_on(walkers, 1)
                threading.Event().wait(draw.uniform(0, 0.15))  # the moment is the fault
                broker.kill()
                began = time.monotonic()
                broker = nest.broker(**options)
                all_go_on(walkers, 2)  # the first may have been over when it was killed
                times.append(time.monotonic() - began)
        finally:
            for walker in walkers:
                walker.enough.set()
        # In rounds the others wait for whoever has one push to make yet.
        for run in runs:
            run.result(PATIENCE_S)
        with DiLoCoClient(options["bind"], timeout=PATIENCE_S) as client:
            final = client.pull()
    assert max(times) < 10, f"from the start to the second round that is over: {times} s"
    rule = {"lr": 0.7, "momentum": 0.9}
    if RUNS[name].get("outer") == "sgd":  # without a round to average in, each counts 1/workers
        rule = {"lr": 0.7 / (3 if RUNS[name].get("mode") == "async" else 1), "momentum": 0.0}
    start = Layers(pieces).state_dict()
    counted: Counter[str] = Counter()
    for fragment, version in final.versions.items():
        named = [version.run, version.counter, f"{version.tag:016x}"]
        lines = history(audit, fragment, named)
        counted.update(push["push_id"] for line in lines for push in line["pushes"])
        key = name_of(fragment)
        wanted = replay(lines, walkers, start[key], rule)
        torch.testing.assert_close(final.tensors[key], wanted, rtol=1e-4, atol=1e-4)
    made = [push_id for walker in walkers for push_id in walker.pushes]
    assert counted == Counter(made), "each push exactly once"
    assert len({line["epoch"] for line in map(json.loads, audit.read_text().splitlines())}) >= 2


def test_rewound_run_goes_on_with_workers_that_were_ahead(nest: Nursery, tmp_path: Path) -> None:
    """Checkpoints every eight rounds: what came after the last one is given up, and nothing else."""
    audit = tmp_path / "audit"
    options = {"save_dir": str(tmp_path / "run"), "save_every": 8, "recover": "rewind"}
    options |= {"audit": str(audit), "workers": 2, "bind": a_free_address()}
    walkers = [Walker(number, str(options["bind"]), 1) for number in range(2)]
    broker = nest.broker(**options)
    broker.address()
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(walker.run, 12) for walker in walkers]
        try:
            all_go_on(walkers, 11)
            broker.kill()
            before = {push_id for walker in walkers for push_id in walker.pushes}
            broker = nest.broker(**options)
            broker.says("goes on with round 8, from the checkpoint before round 8.")
            all_go_on(walkers, 3)
        finally:
            for walker in walkers:
                walker.enough.set()
        for run in runs:
            run.result(PATIENCE_S)
        with DiLoCoClient(str(options["bind"]), timeout=PATIENCE_S) as client:
            final = client.pull()
    version = final.version
    lines = history(audit, 0, [version.run, version.counter, f"{version.tag:016x}"])
    rule = {"lr": 0.7, "momentum": 0.9}
    start = Layers().state_dict()[name_of(0)]
    wanted = replay(lines, walkers, start, rule)
    torch.testing.assert_close(final.tensors[name_of(0)], wanted, rtol=1e-4, atol=1e-4)
    counted = Counter(push["push_id"] for line in lines for push in line["pushes"])
    made = {push_id for walker in walkers for push_id in walker.pushes}
    assert max(counted.values()) == 1
    assert made - before <= set(counted) <= made
    assert len(before - set(counted)) >= 4, "rounds 8 and 9 at least"


# Processes that end.


def test_round_of_the_others_closes_within_two_seconds_of_a_kill(
    nest: Nursery, tmp_path: Path
) -> None:
    seconds = []
    model = Layers()
    options = {**LOCAL, "workers": 1}
    with (
        Broker(BrokerConfig(**options)) as broker,
        DiLoCoClient(broker.address, worker_id="other", timeout=PATIENCE_S) as other,
    ):
        other.join(model)
        for number in range(3):
            victim = nest.start(nursery.stay, broker.address, f"victim-{number}", model)
            victim.says("joined")
            other.push({name_of(0): delta(0, 2 * number)})
            other.pull()  # a newcomer is expected from the next round
            other.push({name_of(0): delta(0, 2 * number + 1)})
            round_ = other.status()["round"]
            assert (round_["phase"], round_["missing"]) == ("open", (f"victim-{number}",))
            os.kill(victim.pid, signal.SIGKILL)
            began = time.monotonic()
            other.pull()
            seconds.append(time.monotonic() - began)
    assert statistics.median(seconds) < 2.0, seconds


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_tells_the_workers_and_ends_with_0(
    nest: Nursery, tmp_path: Path, how: signal.Signals
) -> None:
    folder = tmp_path / "run"
    broker = nest.start(nursery.command, *serve_options(folder, "--save-every", "50"))
    with DiLoCoClient(broker.address(), worker_id="w", timeout=PATIENCE_S) as client:
        client.join(Layers())
        for number in range(3):
            client.push({name_of(0): delta(0, number)})
            final = client.pull()
        assert [path.name[-1] for path in wait_for(lambda: found(folder))] == ["0"]
        began = time.monotonic()
        os.kill(broker.pid, how)
        assert broker.ends() == 0
        assert time.monotonic() - began < 10
        assert client._link is not None
        wait_for(lambda: client._link.stopping)  # type: ignore[union-attr]
        assert how.name in str(client._link.stopping)
    image = load(found(folder)[0])
    assert (image.number, image.fragments[0].version) == (3, final.version)
    assert torch.equal(
        torch.cat(list(image.fragments[0].chunks)), final.tensors[name_of(0)].flatten()
    )


def serve_options(folder: Path, *more: str) -> tuple[str, ...]:
    """The daemon's command line, on free ports."""
    address = "tcp://127.0.0.1:*"
    where = ("--bind", address, "--feed", address, "--save-dir", str(folder))
    return ("serve", *where, "--wire-dtype", "fp32", *more)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_at_once_though_a_save_hangs(
    nest: Nursery, tmp_path: Path, second: signal.Signals
) -> None:
    options = serve_options(tmp_path / "run")
    broker = nest.start(nursery.command_with_a_disk_that_hangs, *options)
    with DiLoCoClient(broker.address(), worker_id="w", timeout=PATIENCE_S) as client:
        client.join(Layers())
        for number in range(3):
            client.push({name_of(0): delta(0, number)})
            assert client.pull().version.counter == number + 1, "a run does not wait for its disk"
        broker.says("hangs")
        os.kill(broker.pid, signal.SIGTERM)
        broker.says("Stopping")
        began = time.monotonic()
        os.kill(broker.pid, second)
        assert broker.ends() == 128 + second
        assert time.monotonic() - began < 2
    assert [load(path).number for path in found(tmp_path / "run")] == [0]


# Disks.


def test_run_goes_on_while_the_disk_is_full_and_is_saved_when_there_is_room(
    nest: Nursery, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    broker = nest.broker(save_dir=str(folder), keep=2)
    with DiLoCoClient(broker.address(), worker_id="w", timeout=PATIENCE_S) as client:
        client.join(Layers())
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
        # No rubbish: what was begun is cleared away, save for what is tried right now.
        wait_for(lambda: [path.name[0] for path in folder.iterdir() if path.is_dir()] == ["c", "c"])
        broker.may_write(-1)
        final = pushes_and_pulls(client, 5, 6)
        wait_for(lambda: client.status()["checkpoint"]["round"] == 6)
        assert client.status()["checkpoint"]["error"] is None
        broker.says("Checkpoints are written again")
    assert load(found(folder)[0]).fragments[0].version == final.version


def pushes_and_pulls(client: DiLoCoClient, first: int, last: int) -> Any:
    """These pushes of worker 0, and the parameters after them."""
    for number in range(first, last):
        client.push({name_of(0): delta(0, number)})
        final = client.pull()
    return final


def test_durable_run_waits_for_room_and_loses_nothing(nest: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broker = nest.broker(save_dir=str(folder), durable=True)
    with DiLoCoClient(broker.address(), worker_id="w", timeout=PATIENCE_S) as client:
        client.join(Layers())
        pushes_and_pulls(client, 0, 1)
        broker.may_write(1000)
        client.push({name_of(0): delta(0, 1)})
        wait_for(lambda: client.status()["checkpoint"]["error"])
        assert client.status()["fragments"][0]["version"] == 1
        broker.says("The round waits for it (--durable)")
        broker.may_write(-1)
        assert client.pull().version.counter == 2
    assert load(found(folder)[0]).number == 2


def test_file_in_the_place_of_the_folder_stops_no_run(nest: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.write_text("not a folder")
    broker = nest.broker(save_dir=str(folder))
    with DiLoCoClient(broker.address(), worker_id="w", timeout=PATIENCE_S) as client:
        client.join(Layers())
        pushes_and_pulls(client, 0, 3)
        wait_for(lambda: client.status()["checkpoint"]["error"])
        folder.unlink()
        final = pushes_and_pulls(client, 3, 4)
        wait_for(lambda: client.status()["checkpoint"]["error"] is None)
    assert load(found(folder)[0]).fragments[0].version == final.version


def test_broker_starts_and_ends_on_a_full_disk(nest: Nursery, tmp_path: Path) -> None:
    """Neither its lock nor its audit log can be written."""
    audit = tmp_path / "audit"
    options = serve_options(tmp_path / "run", "--audit", str(audit))
    broker = nest.start(nursery.command_on_a_full_disk, *options)
    with DiLoCoClient(broker.address(), worker_id="w", timeout=PATIENCE_S) as client:
        client.join(Layers())
        pushes_and_pulls(client, 0, 2)
        texts = " ".join(event["text"] for event in client.status()["events"])
        assert f"The audit log {audit} cannot be written: File too large." in texts
        assert "checkpoint" in texts
    os.kill(broker.pid, signal.SIGTERM)
    assert broker.ends(20) == 0
    assert "Traceback" not in broker.output


def test_audit_log_says_nothing_wrong_after_a_disk_was_full(nest: Nursery, tmp_path: Path) -> None:
    """What could not be written may be missing; what is there can be read."""
    audit = tmp_path / "audit"
    broker = nest.broker(audit=str(audit))
    with DiLoCoClient(broker.address(), worker_id="w", timeout=PATIENCE_S) as client:
        client.join(Layers())
        pushes_and_pulls(client, 0, 2)
        broker.may_write(audit.stat().st_size + 100)  # a line is cut in the middle
        pushes_and_pulls(client, 2, 4)
        broker.may_write(-1)
        pushes_and_pulls(client, 4, 6)
    broker.kill()
    again = nest.broker(audit=str(audit))
    with DiLoCoClient(again.address(), worker_id="w", timeout=PATIENCE_S) as client:
        client.join(Layers())
        pushes_and_pulls(client, 0, 1)
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    rounds = [line["round"] for line in lines if line["pushes"]]
    assert rounds[:2] == [0, 1]
    assert rounds[-3:] == [4, 5, 0]


def test_line_of_the_audit_log_that_a_crash_cut_spoils_no_other(tmp_path: Path) -> None:
    audit = tmp_path / "audit"
    audit.write_text('{"version": ["0123", 1, "ab')
    with (
        Broker(BrokerConfig(**LOCAL, audit=str(audit))) as broker,
        DiLoCoClient(broker.address, timeout=PATIENCE_S) as client,
    ):
        client.join(Layers())
    lines = audit.read_text().splitlines()
    assert lines[0] == '{"version": ["0123", 1, "ab'
    assert json.loads(lines[1])["round"] == 0


# Checkpoints.


def a_config(folder: Path, **options: Any) -> BrokerConfig:
    """Durable, so that each version is saved, however slow the disk."""
    return BrokerConfig(**{**LOCAL, "save_dir": str(folder), "durable": True, **options})


def some_rounds(config: BrokerConfig, first: int, last: int) -> Any:
    """A broker's life in which one worker makes these pushes; what there is at the end."""
    with (
        Broker(config) as broker,
        DiLoCoClient(broker.address, worker_id="w", timeout=PATIENCE_S) as client,
    ):
        client.join(Layers())
        assert client.pull().version.counter == first
        return pushes_and_pulls(client, first, last)


def lives_and_numbers(folder: Path) -> list[tuple[int, int]]:
    images = [load(path) for path in found(folder)]
    return [(image.life, image.number) for image in images]


def test_run_goes_on_from_the_newest_or_the_one_that_is_named(tmp_path: Path) -> None:
    some_rounds(a_config(tmp_path, keep=2), 0, 5)
    assert lives_and_numbers(tmp_path) == [(1, 5), (1, 4)]
    some_rounds(a_config(tmp_path, keep=2), 5, 6)
    assert lives_and_numbers(tmp_path) == [(2, 6), (1, 5)]
    named = str(found(tmp_path)[1])
    some_rounds(a_config(tmp_path, keep=2, resume=named), 5, 7)
    assert lives_and_numbers(tmp_path) == [(3, 7), (3, 6)]
    elsewhere = tmp_path / "elsewhere"
    some_rounds(a_config(elsewhere, resume=str(tmp_path)), 7, 8)
    assert lives_and_numbers(elsewhere)[0][1] == 8
    assert lives_and_numbers(tmp_path) == [(3, 7), (3, 6)]


def test_run_that_begins_afresh_loses_nothing_of_the_one_before(tmp_path: Path) -> None:
    one = some_rounds(a_config(tmp_path, keep=2), 0, 4)
    other = some_rounds(a_config(tmp_path, keep=2, resume="none"), 0, 9)
    assert one.version.run != other.version.run
    assert lives_and_numbers(tmp_path) == [(2, 9), (2, 8), (1, 4), (1, 3)]
    of_one = found(tmp_path)[2]
    assert load(of_one).fragments[0].version == one.version
    assert some_rounds(a_config(tmp_path, keep=2), 9, 10).version.run == other.version.run
    again = some_rounds(a_config(tmp_path, keep=2, resume=str(of_one)), 4, 5)
    assert again.version.run == one.version.run


def test_other_number_of_fragments_is_refused_with_both_numbers(tmp_path: Path) -> None:
    some_rounds(a_config(tmp_path), 0, 1)
    config = a_config(tmp_path, num_fragments=2, sync_every=8)
    with pytest.raises(
        UsageError, match=r"--num-fragments is 2, the checkpoint .* has 1; give the"
    ):
        Broker(config)
    Broker(replace(config, resume="none")).close()


def test_folder_has_one_broker_at_a_time_and_is_free_when_it_is_killed(
    nest: Nursery, tmp_path: Path
) -> None:
    broker = nest.broker(save_dir=str(tmp_path))
    broker.address()
    with pytest.raises(UsageError, match=rf"process {broker.pid}\) saves to .*another --save-dir"):
        Broker(a_config(tmp_path))
    broker.kill()
    Broker(a_config(tmp_path)).close()


LARGE = {"chunk_elements": 1 << 19, "wire_dtype": "fp32", "keep": 1}


def test_saving_each_round_makes_no_turn_of_the_loop_longer(nest: Nursery, tmp_path: Path) -> None:
    """CPU of the loop's thread in its longest turn, as the feed has it; 5 million parameters."""
    longest = {}
    model = Layers(5, size=1000)
    gradient = {name: 1e-3 * torch.randn(1000, 1000) for name in model.state_dict()}
    for saves in (False, True):
        folder = str(tmp_path) if saves else None
        broker = nest.broker(**LARGE, save_dir=folder)
        with DiLoCoClient(broker.address(), timeout=PATIENCE_S) as client:
            client.join(model)
            turns: dict[int, float] = defaultdict(float)  # by word on the feed, which begins anew
            while len(turns) < 7:
                client.push(gradient)
                client.pull()
                status = client.status()
                number, turn = status["sequence"], status["loop"]["longest_turn_ms"]
                turns[number] = max(turns[number], turn)
        # Without the first, when memory is touched for the first time. Each has saves in it, so the
        # shortest tells what they cost, and not what else the machine was busy with.
        longest[saves] = min(list(turns.values())[2:])
        broker.kill()
    assert longest[True] < longest[False] + 5, longest
    assert 1 <= len(found(tmp_path)) <= 2, "one to keep, and one that it was killed at removing"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_no_copy_of_the_model_is_made_to_save_it(nest: Nursery, tmp_path: Path) -> None:
    """20 MB of parameters and as much momentum; the peak of the process's memory while it saves."""
    broker = nest.broker(**LARGE, save_dir=str(tmp_path), save_every=100)
    model = Layers(5, size=1000)
    with DiLoCoClient(broker.address(), timeout=PATIENCE_S) as client:
        client.join(model)
        for _ in range(2):
            client.push({name: 1e-3 * torch.randn(1000, 1000) for name in model.state_dict()})
            client.pull()
        Path(f"/proc/{broker.pid}/clear_refs").write_text("5")  # the peak begins anew
        before = peak_bytes(broker)
        assert client.control("save").ok
        wait_for(lambda: client.status()["checkpoint"]["round"] == 2)
        assert peak_bytes(broker) - before < 8e6
    file = found(tmp_path)[0] / "fragment-0.safetensors"
    assert file.stat().st_size > 40e6


def peak_bytes(child: Child) -> int:
    lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def test_save_that_is_killed_at_any_moment_leaves_what_was_there(
    nest: Nursery, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    draw = random.Random(5)
    for life in range(1, 9):
        child = nest.start(nursery.save_for_ever, folder, life)
        child.says(f"saved 2 of {life}")
        threading.Event().wait(draw.uniform(0, 0.05))  # the moment is the fault
        child.kill()
        images = [load(path) for path in found(folder)]
        assert images[0].life == life
        assert images[0].number >= 2
        for image in images:
            assert_equal(image, replace(an_image(image.number, seed=image.number), life=image.life))
    saving.FolderLock(folder).release()
    left = {path.name for path in folder.iterdir()}
    assert left == {saving.LOCK, *(path.name for path in found(folder))}, "rubbish is cleared away"


def test_file_that_another_life_has_damaged_is_not_linked_to(tmp_path: Path) -> None:
    """The newest is damaged, the broker goes on from the one before and is given the same version."""
    old = an_image(4)
    checkpoint.save(tmp_path, old, keep=3)
    fresh = an_image(5, seed=1)
    newer = checkpoint.save(tmp_path, fresh, keep=3)
    for file in newer.glob("fragment-*"):
        whole = file.read_bytes()
        file.unlink()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(Damaged):
        load(newer)
    adopted = replace(fresh, life=old.life + 1)
    assert_equal(load(checkpoint.save(tmp_path, adopted, keep=3)), adopted)


def test_checkpoint_that_is_written_again_is_never_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only one there is, asked for twice: at no moment is there none."""
    image = an_image(4)
    checkpoint.save(tmp_path, image, keep=1)
    rename = Path.rename

    def look(self: Path, target: Path) -> Path:
        assert found(tmp_path), "a kill at this moment would lose the run"
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", look)
    assert_equal(load(checkpoint.save(tmp_path, image, keep=1)), image)


def test_what_is_wrong_with_the_disk_is_the_same_sentence_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, **_: Any) -> None:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "mkdir", full)
    saver = saving.Saver(tmp_path / "run", 3, lambda: None)
    for number in (4, 5):
        saver.save(an_image(number))
        assert saver.finish(PATIENCE_S)
    saver.close()
    first, second = (outcome.error for outcome in saver.outcomes)
    assert first == second
    assert "No space left on device" in str(first)
