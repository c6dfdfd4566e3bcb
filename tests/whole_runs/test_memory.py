"""Memory does not grow with rounds, with workers, or with workers that came and went.

Resident memory (VmRSS in /proc) is read of real processes, the broker's and a worker's, after each tenth
round of training. Nothing is done to make glibc give memory back, neither here nor in the product, so
what its heaps keep is in the figures; the bounds leave room for that and no more. What is too small for
it is counted: every object that the broker's state reaches. Of a worker of k processes each holds about
1/k of what a worker of one holds, and a slice: counted in bytes.
"""

from __future__ import annotations

import gc
import signal
import statistics
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco_broker import Broker, BrokerConfig
from diloco_broker.core import state
from diloco_broker.core.rounds.uploads import UPLOAD_WINDOW_TOTAL
from diloco_broker.core.story import KEPT, Story
from diloco_broker.core.versions import fragment
from diloco_broker.shell.tensor_work.executor import TensorExecutor
from diloco_protocol.messages import Pull
from diloco_worker import DiLoCoClient, DiLoCoWorker
from kit.core_harness import Puppet, a_stage
from kit.islands import Island
from kit.process_kit import EVERY, Child, Processes, memory_kib, train_and_measure, wait_for
from kit.raw_worker import RawWorker, one_tensor

LAYERS = 4
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="resident memory is read from /proc"
)


def train(processes: Processes, address: str, broker: Child, steps: int, width: int) -> Child:
    out = processes.folder / "worker.json"
    sizes = {"layers": LAYERS, "width": width}
    return processes.start(train_and_measure, address, broker.pid, out, steps, sizes)


# 19,600 parameters: a version is 78 kB in fp32, a delta 39 kB in bf16. That is enough for chunks whose
# memory is used again (`tensor_pool` of the protocol), which smaller ones leave to the allocator.
SMALL = 70
ROUNDS = 500
# From the median of rounds 100 to 200 to that of the last third are 267 rounds: a delta that each of
# them left behind would be 10,400 KiB. What was seen without one is 300 to 700: heaps that still
# settle. What is smaller than a delta is counted below.
GROWTH_KIB = 5000

MODES = {
    "sync": ["--no-save"],
    "async": ["--no-save", "--mode", "async"],
    "deterministic": ["--no-save", "--deterministic"],
    "fragments": ["--no-save", "--num-fragments", "2", "--sync-every", "2"],
    "saved": ["--save-dir", "run", "--save-every", "1"],
    "saved before it is released": ["--save-dir", "run", "--durable", "--mode", "async"],
}
SLOW = ("fragments", "saved before it is released")  # the others at night


def assert_flat(result: dict[str, Any]) -> None:
    """The median of the last third less that of rounds 100 to 200, of each process."""
    assert result["rounds"] == ROUNDS
    for who, seen in result["seen"].items():
        warm = statistics.median(seen[100 // EVERY : 200 // EVERY])
        last = statistics.median(seen[len(seen) * 2 // 3 :])
        assert last - warm < GROWTH_KIB, f"the {who}'s memory in KiB: {seen}"


@needs_proc
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.nightly)
        for name in MODES
    ],
)
def test_memory_is_flat_over_500_rounds(processes: Processes, name: str) -> None:
    broker, address = processes.serve("--sync-every", "1", *MODES[name])
    assert train(processes, address, broker, ROUNDS, SMALL).ends(240) == 0
    assert_flat(processes.result("worker"))


# 4,000,000 parameters: 8 MB a delta in bf16, 16 MB a version in fp32.
WIDE, WIDE_ROUNDS = 1000, 5
MIB = 1024


def peaks(processes: Processes, workers: int, *options: str) -> tuple[int, int]:
    """The most that broker and worker had at any time, KiB; all but one worker are clients here."""
    broker, address = processes.serve(
        "--no-save", "--workers", str(workers), "--sync-every", "1", *options
    )
    measured = train(processes, address, broker, WIDE_ROUNDS, WIDE)
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)])
    delta = {name: torch.full_like(tensor, 1e-6) for name, tensor in model.state_dict().items()}

    def take_part(client: DiLoCoClient) -> None:
        client.join(model)
        for _ in range(WIDE_ROUNDS):
            client.push(delta)
            client.pull()

    with ThreadPoolExecutor(workers) as pool, ExitStack() as stack:
        clients = [
            stack.enter_context(DiLoCoClient(address, worker_id=f"c{number}", timeout=60))
            for number in range(workers - 1)
        ]
        for future in [pool.submit(take_part, client) for client in clients]:
            future.result(90)
    assert measured.ends(60) == 0
    peak = memory_kib(broker.pid, "VmHWM")
    broker.gets(signal.SIGTERM)
    assert broker.ends(20) == 0
    return peak, processes.result("worker")["peak"]


@needs_proc
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_memory_is_flat_from_2_to_16_workers(processes: Processes) -> None:
    """Peaks: the broker has less than 8 MB more for each worker more, a worker less than 16 MB in all.

    What the broker has more are chunks under way, which credits limit for all workers together, whatever
    the size of the model: 64 of 1 MiB at most. A copy of each worker's delta, 8 MB here, would be
    112 MB.
    """
    (broker, worker), (broker_16, worker_16) = peaks(processes, 2), peaks(processes, 16)
    assert broker_16 - broker < (UPLOAD_WINDOW_TOTAL + 8) * MIB < 14 * 8 * MIB
    assert worker_16 - worker < 16 * MIB  # a version


def population(root: object) -> Counter[str]:
    """How many records of each kind an object reaches, and how many entries its containers have.

    The story of the core has a bound, which it reaches in its own time.
    """
    found: Counter[str] = Counter()
    seen = set()
    stack = [root]
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)
        if isinstance(each, Mapping):
            stack += [*each.keys(), *each.values()]
            found["entries of mappings"] += len(each)
        elif isinstance(each, list | tuple | set | frozenset | deque):
            stack += each
            found[f"entries of each {kind.__name__}"] += len(each)
        elif kind.__module__.startswith("diloco_") and kind not in (BrokerConfig, Story):
            found[kind.__name__] += 1
            names = [*getattr(each, "__dict__", ()), *getattr(kind, "__slots__", ())]
            stack += [getattr(each, name) for name in names]
    return found


class Town:
    """A run with one worker that stays, and others that come, take part in one round, and go."""

    def __init__(self, **options: Any) -> None:
        self.stage = a_stage(workers=1, **options)
        [self.resident] = self.stage.joined("resident")
        self.count = self.visits = 0

    @property
    def fragment(self) -> int:
        config = self.stage.config
        number = self.count if config.is_async else self.stage.round.number
        return int(number % config.num_fragments)

    def pushes(self, puppet: Puppet) -> None:
        self.count += 1
        puppet.pushes(1000 + self.count, fragment=self.fragment)
        self.stage.passes(self.stage.config.fixed_grace)

    def visit(self, behave: Callable[[Town, Puppet], None]) -> None:
        """A newcomer whose push counts, and who then behaves like this."""
        self.visits += 1
        if self.visits % 2:  # so that each fragment has its turn
            self.pushes(self.resident)
        newcomer = self.stage.worker(f"visitor-{self.visits}").joins()
        newcomer.pulls()
        self.pushes(newcomer)
        if not self.stage.config.is_async:
            self.pushes(self.resident)
        behave(self, newcomer)
        self.pushes(self.resident)
        self.stage.inbox.clear()
        self.stage.received.clear()


def dies_in_an_upload(town: Town, puppet: Puppet) -> None:
    puppet.begins(7, fragment=town.fragment)
    puppet.delivers([0])
    puppet.dies()


def leaves_with_a_push_that_has_to_wait(town: Town, puppet: Puppet) -> None:
    town.pushes(puppet)
    puppet.begins(8, fragment=town.fragment)
    puppet.leaves()


def dies_without_taking_what_it_asked_for(town: Town, puppet: Puppet) -> None:
    puppet.stage.state.versions.readers[puppet.bulk].lanes[0].credit = 1
    puppet.pulls()
    puppet.dies()


def sends_what_is_not_finite(town: Town, puppet: Puppet) -> None:
    puppet.begins(9, fragment=town.fragment)
    puppet.delivers([0], is_finite=False)
    puppet.leaves()


def comes_back_three_times(town: Town, puppet: Puppet) -> None:
    for _ in range(3):
        puppet.begins(10, fragment=town.fragment)
        puppet.loses_connection()
        puppet.joins()
    puppet.leaves()


def is_watched(town: Town, puppet: Puppet) -> None:
    observer = town.stage.worker("observer")
    observer.control = town.stage.route()
    observer.sends(Pull(0, credit=1))
    observer.loses_connection()
    town.stage.passes(11)  # it is probed every 10 s, and is gone
    puppet.dies()


WAYS: list[Callable[[Town, Puppet], None]] = [
    lambda _, puppet: puppet.leaves(),
    lambda _, puppet: puppet.dies(),
    dies_in_an_upload,
    leaves_with_a_push_that_has_to_wait,
    dies_without_taking_what_it_asked_for,
    sends_what_is_not_finite,
    comes_back_three_times,
    is_watched,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"deterministic": True},
        {"mode": "async"},
        {"mode": "async", "grace": 0.5},
        {"num_fragments": 2, "sync_every": 10},
    ],
    ids=lambda options: " ".join(options) or "sync",
)
def test_workers_that_came_and_went_leave_nothing_behind(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ledgers remember the last 128 that have left; with these the state is as large as it gets."""
    monkeypatch.setattr(fragment, "TAGS_KEPT", 64)  # of 1,024 versions it takes minutes
    monkeypatch.setattr(state, "CAUSES_KEPT", 8)  # and of 1,000 refusals
    town = Town(**options)
    sizes = []
    warm = 48 if "num_fragments" in options else 18  # each fragment has a ledger
    for visits in (warm * len(WAYS), 4 * len(WAYS)):
        for number in range(visits):
            town.visit(WAYS[number % len(WAYS)])
        town.stage.passes(60)
        sizes.append(population(town.stage.state))
    assert sizes[0]["Member"] == 1 + sizes[0]["Death"]  # the others took the places of the dead
    assert sizes[1] == sizes[0]


def at_rest(broker: Broker) -> Counter[str]:
    """The population once nothing changes any more: connections and the feed lag behind."""
    found: list[Counter[str]] = []

    def is_at_rest() -> bool:
        found.append(population(broker))
        return len(found) > 20 and all(each == found[-1] for each in found[-20:])

    wait_for(is_at_rest)
    return found[-1]


@pytest.mark.slow
def test_connections_that_came_and_went_leave_nothing_behind() -> None:
    """Over real sockets, 170 workers: half of them say goodbye, half are simply gone."""
    address = "tcp://127.0.0.1:*"
    config = BrokerConfig(bind=address, feed=address, disconnect_grace=0.0, chunk_elements=8)
    with Broker(config, {"weight": torch.zeros(50)}) as broker:
        members, tensors = broker._loop.core.state.members, broker._loop.tensors
        assert isinstance(tensors, TensorExecutor)
        sizes = []
        for row, workers in enumerate((150, 20)):
            for number in range(workers):
                with RawWorker(broker.address, f"visitor-{row}-{number}") as worker:
                    worker.join(one_tensor(50))
                    worker.pull(50)
                    if number % 2:
                        worker.send("leave", session=worker.session)
                wait_for(lambda: not len(members))  # the next one takes its place
            # The initial parameters are released with the next message on the feed.
            wait_for(lambda: tensors.initial is None)
            sizes.append(at_rest(broker))
    assert sizes[0]["Core"] == 1
    assert len(broker._loop.core._story) <= 2 * KEPT
    assert sizes[1] == sizes[0]


LOOK_S = 0.002


class Peak:
    """The most bytes of tensors at a time, of those that were not there when it began."""

    def __init__(self) -> None:
        self._before = set(storages())
        self._ended = threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def look(self) -> None:
        now = storages()
        self.most = max(self.most, sum(n for at, n in now.items() if at not in self._before))

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.most


def storages() -> dict[int, int]:
    """Bytes by address, of all tensors on the host that anything refers to."""
    found: dict[int, int] = {}
    # Not `gc.get_objects()`: while its list is alive, other threads cannot build tuples from generators.
    for each in gc.get_referrers(Tensor, nn.Parameter):
        if type(each) in (Tensor, nn.Parameter):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def measure(kind: str, address: str, name: str, out: str, sizes: dict[str, Any]) -> None:
    """Train for some rounds, and write down the most that was kept, and the size of the model."""
    torch.manual_seed(0)
    width = sizes["width"]
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(sizes["layers"])))
    whole = sum(parameter.numel() for parameter in model.parameters()) * 4
    dist.init_process_group("gloo")
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    peak = Peak()
    with DiLoCoWorker(
        model, optimizer, server=address, worker_id=name, process_group="world"
    ) as diloco:
        for _ in range(sizes["steps"]):
            optimizer.step()
    most = peak.end()
    told = {"most": most, "whole": whole, "rounds": diloco.sync_count}
    torch.save(told, out)


# Base 1, delta in bf16 1/2, the version that arrives 1; and some for chunks at the ends.
OF_FP32 = 2.6
# What is on its way within the worker, what travels to and from the broker, and what is worked on.
SLICES = 16 << 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param("ddp", 2, marks=pytest.mark.nightly),
        pytest.param("fsdp", 4, marks=pytest.mark.slow),
    ],
)
def test_process_of_k_keeps_its_part_of_the_vectors_and_a_slice(
    processes: Processes, tmp_path: Path, kind: str, count: int
) -> None:
    broker = processes.broker(
        wire_dtype="bf16", sync_every=2, save_dir=None, chunk_elements=524_288
    )
    sizes = {"width": 2048, "layers": 6, "steps": 6}
    island = Island(processes, tmp_path, kind, count, broker.address(), "a", measure, **sizes)
    island.ends_well()
    for told in island.results():
        assert told["rounds"] == 3
        most = OF_FP32 / count * told["whole"] + SLICES
        assert told["most"] <= most, f"{told['most'] / told['whole']:.2f} of the fp32 parameters"
        assert told["most"] >= told["whole"] / count, "nothing was counted"
