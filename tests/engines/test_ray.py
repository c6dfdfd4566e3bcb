"""A run on a real Ray: to its end, and through what may happen to its processes and nodes."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from diloco_broker import BrokerConfig
from kit.engine_runs import incarnations, losses, mean_loss
from kit.paths import ROOT

ray = pytest.importorskip("ray", reason="Ray is not here; `make test-engines` installs it")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.train import RunConfig, ScalingConfig  # noqa: E402

from diloco_tools.ray import DiLoCoTrainer, Result  # noqa: E402
from diloco_tools.ray.broker_actor import name_of  # noqa: E402
from diloco_tools.ray.storage import Storage  # noqa: E402
from kit.ray_loop import GO, loop  # noqa: E402

ROUNDS, H = 150, 10
# Behind each step, until the test has done what it does to the run: on no machine is it over before.
SLOW_S = 0.1
# Seconds without a new round or a new process, after which a run hangs: where the cluster starts in the
# usual time, and at least. A machine that needs longer for that gets as many times more. Ray's own
# actors take over 100 s to begin a run on two cores with a load of 25.
PATIENCE_S, USUAL_START_S = 400.0, 15.0
ENDS_WITHIN_S = 60.0

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),  # each wait has a bound of its own
    pytest.mark.filterwarnings("default"),  # Ray's own
]


@dataclass
class Made:
    """The cluster, and how long a run on it may stand still."""

    cluster: Any
    patience_s: float


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Made]:
    """A head that holds what takes no CPU, and one node with one CPU."""
    began = time.monotonic()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        made.add_node(num_cpus=1)
        path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        ray.init(address=made.address, runtime_env={"env_vars": {"PYTHONPATH": path}})
        slowness = max(1.0, (time.monotonic() - began) / USUAL_START_S)
        yield Made(made, PATIENCE_S * slowness)
    finally:
        ends(made, request.config)


def ends(cluster: Any, config: pytest.Config) -> None:
    """End it, though a driver may be connected still: a polite end would wait for that one.

    A driver whose cluster is killed ends this process, so that comes after pytest's summary.
    """

    def politely() -> None:
        ray.shutdown()
        cluster.shutdown()

    def at_last() -> None:
        for node in nodes:
            with suppress(Exception):  # it has ended
                node.kill_all_processes(check_alive=False, allow_graceful=False)

    nodes = cluster.list_all_nodes()
    polite = threading.Thread(target=politely, daemon=True)
    polite.start()
    polite.join(ENDS_WITHIN_S)
    if polite.is_alive():
        config.add_cleanup(at_last)


class Run:
    """One `fit` in a thread of its own, and what the test does to it meanwhile."""

    def __init__(self, made: Made, folder: Path, name: str, **options: Any) -> None:
        self.patience_s = made.patience_s
        self.folder, self.out = folder, folder / "out"
        self.out.mkdir(exist_ok=True)
        self.storage = Storage.of(folder / "storage", name)
        self.audit = folder / "broker.jsonl"
        given: dict[str, Any] = {
            "islands": 2,
            "pause": SLOW_S,
            "cpu": 0.25,
            "processes": 1,
            "rounds": ROUNDS,
            **options,
        }
        self.trainer = DiLoCoTrainer(
            loop,
            train_loop_config={"folder": str(self.out), "pause": given["pause"]},
            islands=given["islands"],
            scaling_config=ScalingConfig(
                num_workers=given["processes"], resources_per_worker={"CPU": given["cpu"]}
            ),
            broker=BrokerConfig(sync_every=H, max_rounds=given["rounds"], audit=str(self.audit)),
            run_config=RunConfig(name=name, storage_path=str(folder / "storage")),
        )
        self.result: Result | None = None
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        self.result = self.trainer.fit()

    def waits(self, is_so: Callable[[], bool], what: str) -> None:
        """As long as there is progress: rounds that close, or processes that start."""
        seen, since = self._progress, time.monotonic()
        while not is_so():
            if (now := self._progress) != seen:
                seen, since = now, time.monotonic()
            stood_s = time.monotonic() - since
            assert stood_s < self.patience_s, f"{what}: the run stands still at {seen}"
            time.sleep(0.1)

    @property
    def _progress(self) -> tuple[int, int]:
        return len(self.released), sum(1 for _ in self.out.glob("*.worker.jsonl"))

    @property
    def released(self) -> list[str]:
        """Lines of the broker's audit log, one for each version."""
        return self.audit.read_text().splitlines() if self.audit.exists() else []

    def goes_on(self) -> None:
        """Nothing more is done to it: steps are not followed by pauses any more."""
        (self.out / GO).touch()

    def waits_for_round(self, number: int) -> None:
        self.waits(lambda: len(self.released) > number, f"round {number}")

    def waits_for_incarnations(self, worker: str, count: int) -> None:
        self.waits(lambda: incarnations(self.out, worker) >= count, f"life {count} of {worker}")

    def ends(self) -> Result:
        self.goes_on()
        self.waits(lambda: not self._thread.is_alive(), "the end")
        assert self.result is not None, "it ended with an error"
        return self.result

    def is_sound(self, calm: float | None = None) -> float:
        return mean_loss(self.audit, self.out, ROUNDS, calm)


@pytest.fixture(scope="module")
def calm(cluster: Made, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of a run to which nothing happens; what `fit` returns."""
    run = Run(cluster, tmp_path_factory.mktemp("calm"), "calm", pause=0.0)
    result = run.ends()
    assert result.error is None
    assert result.metrics is not None
    assert result.metrics["pushes"] == ROUNDS
    assert result.metrics["worker"] == "island-0"
    assert len(result.islands) == 2
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        final = load_file(Path(folder) / "model.safetensors")
    assert sorted(final) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert set(losses(run.out)) == {"island-0", "island-1"}
    keys = list(run.storage.keys.glob("**/*.key"))
    assert len(keys) >= 4 and all(key.stat().st_mode & 0o077 == 0 for key in keys)
    return run.is_sound()


def test_killed_rank_and_broker_come_back(cluster: Made, tmp_path: Path, calm: float) -> None:
    run = Run(cluster, tmp_path, "killed")
    run.waits_for_round(10)
    os.kill(int((run.out / "island-0.0.pid").read_text()), signal.SIGKILL)
    run.waits_for_incarnations("island-0", 2)
    broker = ray.get_actor(name_of(run.storage))
    first = ray.get(broker.addresses.remote(), timeout=run.patience_s)
    os.kill(ray.get(broker.pid.remote(), timeout=run.patience_s), signal.SIGKILL)
    run.waits(
        lambda: ray.get(broker.addresses.remote(), timeout=run.patience_s) != first,
        "another incarnation of the broker",
    )
    result = run.ends()
    assert result.error is None
    run.is_sound(calm)
    assert [incarnations(run.out, f"island-{i}") for i in (0, 1)] == [2, 1]
    epochs = {json.loads(line)["epoch"] for line in run.released}
    assert len(epochs) == 2


def test_same_name_goes_on_where_the_run_was(cluster: Made, tmp_path: Path, calm: float) -> None:
    first = Run(cluster, tmp_path, "again", rounds=60, pause=0.0).ends()
    second = Run(cluster, tmp_path, "again", pause=0.0)
    result = second.ends()
    assert first.error is None and result.error is None
    second.is_sound(calm)
    assert result.metrics is not None
    assert result.metrics["pushes"] == ROUNDS - 60


def test_island_of_two_processes_is_one_worker(cluster: Made, tmp_path: Path, calm: float) -> None:
    run = Run(cluster, tmp_path, "wide", processes=2, pause=0.0)
    result = run.ends()
    assert result.error is None
    run.is_sound(calm)
    assert (run.out / "island-1.1.pid").exists()


def test_run_takes_a_node_and_outlives_its_loss(cluster: Made, tmp_path: Path, calm: float) -> None:
    run = Run(cluster, tmp_path, "elastic", islands=(1, 2), cpu=1)
    run.waits_for_round(5)
    assert incarnations(run.out, "island-1") == 0, "the cluster has no room for it"
    node = cluster.cluster.add_node(num_cpus=1)
    run.waits_for_incarnations("island-1", 1)
    cluster.cluster.remove_node(node, allow_graceful=False)
    run.waits_for_round(len(run.released) + 5)
    another = cluster.cluster.add_node(num_cpus=1)
    run.waits_for_incarnations("island-1", 2)
    try:
        result = run.ends()
    finally:
        cluster.cluster.remove_node(another)
    assert result.error is None
    assert len(result.islands) == 2
    run.is_sound(calm)
