"""A run as jobs of a real Slurm: to its end, and through what may happen to it on the way."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.engine_runs import incarnations, losses, mean_loss
from kit.paths import ROOT
from kit.slurm_cluster import SlurmCluster, why_not

SCRIPT = ROOT / "tests" / "kit" / "engine_script.py"
LAUNCH = (sys.executable, "-m", "diloco_tools.launch", "slurm")
ROUNDS, H = 120, 10

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    made = SlurmCluster(tmp_path_factory.mktemp("slurm") / "c")
    yield made
    made.close()


class Run:
    """One run on the cluster, by the commands that a user types."""

    def __init__(self, cluster: SlurmCluster, folder: Path, name: str) -> None:
        self.cluster, self.folder, self.name = cluster, folder, name
        self.of_run = folder / "run"
        self.out = folder / "out"
        self.out.mkdir()

    def starts(
        self, *options: str, rounds: int = ROUNDS, pause: float = 0.01, torchrun: str = ""
    ) -> str:
        serve = f"--sync-every {H} --max-rounds {rounds} --audit {self.folder}/broker.jsonl"
        own = ("--name", self.name, "--folder", str(self.of_run), "--serve", serve, "--grace", "15")
        python = [
            sys.executable,
            *(["-m", "torch.distributed.run", *torchrun.split()] if torchrun else []),
        ]
        command = [*python, str(SCRIPT), str(self.out), str(pause)]
        words = (*LAUNCH, *own, "--time", "10", *options, "--submit", "--", *command)
        return self.cluster.says(*words, cwd=self.folder)

    def log(self, who: str) -> str:
        file = self.of_run / "logs" / f"{who}.log"
        return file.read_text() if file.exists() else ""

    def waits(self, is_so: Callable[[], bool], what: str, within_s: float) -> None:
        def is_so_now() -> bool:
            self.cluster.start_now()
            return is_so()

        try:
            self.cluster.wait(is_so_now, what, within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from None

    def waits_for(self, who: str, pattern: str) -> None:
        self.waits(lambda: bool(re.search(pattern, self.log(who))), f"{who}: {pattern}", 90.0)

    def waits_for_the_end(self) -> None:
        def is_over() -> bool:
            return not any(job.startswith(self.name) for job in self.cluster.jobs())

        self.waits(is_over, "the end of all jobs", 120.0)

    def told(self) -> str:
        logs = sorted((self.of_run / "logs").glob("*"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)

    def is_sound(self, calm: float | None = None, rounds: int = ROUNDS) -> float:
        assert set(losses(self.out)) == {"island-0", "island-1"}, self.told()
        return mean_loss(self.folder / "broker.jsonl", self.out, rounds, calm)


@pytest.fixture(scope="module")
def calm(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of a run to which nothing happens; its jobs end well."""
    run = Run(cluster, tmp_path_factory.mktemp("calm"), "calm")
    said = run.starts("--islands", "2", pause=0.0)
    numbers = re.findall(r"(?:job|array) (\d+)", said)
    assert len(numbers) == 2
    run.waits_for_the_end()
    for number in numbers:
        told = cluster.says("scontrol", "show", "job", number)
        assert re.findall(r"JobState=(\w+)", told) == ["COMPLETED"] * told.count("JobState"), (
            run.told()
        )
        assert "ExitCode=0:0" in told
    assert [incarnations(run.out, f"island-{i}") for i in (0, 1)] == [1, 1]
    secrets = [file.read_text() for file in (run.of_run / "keys" / "clients").glob("*.key")]
    scripts = [
        (run.of_run / name).read_text() for name in ("broker.sh", "islands.sh", "launch.json")
    ]
    for secret in secrets:
        value = re.search(r'"secret": *"([^"]+)"', secret)
        assert value is not None
        assert not any(value[1] in script for script in scripts)
    return run.is_sound()


def test_killed_rank_and_broker_resume(cluster: SlurmCluster, tmp_path: Path, calm: float) -> None:
    run = Run(cluster, tmp_path, "killed")
    run.starts("--islands", "2", pause=0.02)
    run.waits_for("broker", "Round 10 closed")
    cluster.kill(run.out / "island-0.0.pid")
    run.waits_for("island-0", r"restart 1 of 3")
    run.waits_for("island-0", r"(?s)begins at step.*begins at step")
    cluster.says("pkill", "-9", "-f", f"diloco_broker serve .*{run.of_run}")
    run.waits_for("broker", r"the broker ended with code 137; restart 1 of 3")
    run.waits_for_the_end()
    run.is_sound(calm)
    assert [incarnations(run.out, f"island-{i}") for i in (0, 1)] == [2, 1]


def test_preempted_run_saves_and_resumes(
    cluster: SlurmCluster, tmp_path: Path, calm: float
) -> None:
    run = Run(cluster, tmp_path, "preempted")
    run.starts("--islands", "2", pause=0.02)
    run.waits_for("broker", "Round 10 closed")
    urgent = "sbatch -p urgent -N4 --exclusive --output=/dev/null --wrap true"
    cluster.says(*urgent.split())
    for who in ("island-0", "island-1", "broker"):
        run.waits_for(who, "goes back into the queue, since Slurm takes its node")
    for who in ("island-0", "island-1"):
        run.waits_for(who, r"stops at step \d+: SIGTERM")
        run.waits_for(who, r"life 2")
    run.waits_for_the_end()
    run.is_sound(calm)
    for who in ("island-0", "island-1"):
        assert re.search(r"(?s)stops at step (\d+).*begins at step \1\b", run.log(who)), run.told()


def test_stopped_run_leaves_and_resumes(cluster: SlurmCluster, tmp_path: Path, calm: float) -> None:
    run = Run(cluster, tmp_path, "stopped")
    run.starts("--islands", "2", pause=0.02)
    run.waits_for("broker", "Round 10 closed")
    shown = cluster.says(*LAUNCH, "status", str(run.of_run))
    assert re.search(r"broker +\d+ +RUNNING", shown), shown
    assert re.search(r"island-1 +\d+_1 +RUNNING", shown), shown
    assert "round" in shown
    said = cluster.says(*LAUNCH, "stop", str(run.of_run))
    assert "is stopped" in said
    assert not any(job.startswith("stopped") for job in cluster.jobs())
    assert "cancelled" not in said
    assert "is over, or was not submitted" in cluster.says(*LAUNCH, "status", str(run.of_run))
    run.starts("--islands", "2", pause=0.0)
    run.waits_for_the_end()
    run.is_sound(calm)


def test_island_of_two_nodes_is_requeued_whole(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, "wide")
    wide = ("--islands", "2", "--nodes-per-island", "2", "--restarts", "0")
    run.starts(*wide, pause=0.02, rounds=150, torchrun="--nproc-per-node=1")
    run.waits_for("broker", "Round 5 closed")
    assert "[island-1 rank 1]: begins at step 0" in run.log("island-1"), run.told()
    cluster.kill(run.out / "island-1.1.pid")
    run.waits_for("island-1", r"goes back into the queue, having ended with code 1\b")
    run.waits_for("island-1", r"life 2")
    run.waits_for_the_end()
    run.is_sound(rounds=150)
    assert [incarnations(run.out, f"island-{i}") for i in (0, 1)] == [1, 2]


def test_late_island_does_not_wait_for_a_broker(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, "late")
    run.starts("--islands", "1", rounds=3, pause=0.0)
    run.waits_for_the_end()
    cluster.says("sbatch", str(run.of_run / "islands.sh"))
    run.waits_for("island-0", "nothing to do")
    run.waits_for_the_end()
    assert incarnations(run.out, "island-0") == 1


def test_islands_leave_a_broker_that_is_gone(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, "orphans")
    run.starts("--islands", "2", "--restarts", "0", "--requeues", "0", pause=0.02, rounds=100_000)
    run.waits_for("broker", "Round 5 closed")
    cluster.says("pkill", "-9", "-f", f"diloco_broker serve .*{run.of_run}")
    run.waits_for("broker", "ended with code 137, and has been queued again often enough")
    for who in ("island-0", "island-1"):
        run.waits_for(who, "saves and leaves")
        run.waits_for(who, r"stops at step \d+: SIGTERM")
    run.waits_for_the_end()
