"""A small Slurm of its own: controller, nodes and munge in namespaces that end with the test.

All of them share this machine, and nothing of them is reached from outside: the network has only a
loopback, with one more address, since Slurm takes none of 127.0.0.0/8.
"""

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ADDRESS = "10.99.0.1"
HOST = "here"
NODES, CPUS = 4, 4
PATIENCE_S = 60.0
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare", "nsenter", "ip")
# Seconds between SIGTERM and SIGKILL where another job takes the nodes.
GRACE_S = 20

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
NodeName=DEFAULT CPUs={cpus} RealMemory=4000
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr={address} Port=[16901-{last_port}]
PartitionName=usual Nodes=n[1-{nodes}] Default=YES PriorityTier=1 GraceTime={grace} State=UP
PartitionName=urgent Nodes=n[1-{nodes}] PriorityTier=10 PreemptMode=OFF State=UP
"""
# Seconds in the queue of a job that went back into it.
BACK_S = 3.0

# The first process of the namespaces: when it ends, so does everything in them.
FIRST = """\
set -e
mount --bind {folder}/hosts /etc/hosts
ip link set lo up
ip addr add {address}/32 dev lo
hostname {host}
munged --foreground --force --socket={folder}/munge.socket --key-file={folder}/munge.key \\
  --pid-file={folder}/munge.pid --log-file={folder}/munged.log --seed-file={folder}/munge.seed &
while ! [ -S {folder}/munge.socket ]; do sleep 0.05; done
slurmctld -D -i &
for node in $(seq {nodes}); do slurmd -D -N n$node & done
wait
"""


def why_not() -> str | None:
    """What is missing for a Slurm on this machine; None where one can be had."""
    if os.geteuid() != 0:
        return "namespaces and Slurm's daemons take root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)} here; `make test-engines` installs Slurm where it may"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"],
        capture_output=True,
        check=False,
        timeout=PATIENCE_S,
    )
    return None if tried.returncode == 0 else "no namespaces can be made here"


class SlurmCluster:
    """Four nodes of four CPUs each, in name only: they share those of this machine.

    Jobs of the partition `urgent` take nodes away from those of `usual`, which is the default.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "state").mkdir()
        for node in range(1, NODES + 1):
            (folder / f"spool-n{node}").mkdir()
        names = " ".join([HOST, *(f"n{node}" for node in range(1, NODES + 1))])
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} {names}\n")
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        values = {"folder": folder, "address": ADDRESS, "host": HOST, "nodes": NODES, "cpus": CPUS}
        text = CONFIGURATION.format(**values, last_port=16900 + NODES, grace=GRACE_S)
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").touch()
        (folder / "first.sh").write_text(FIRST.format(**values))
        self._back_since: dict[str, float] = {}
        self._environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        namespaces = [
            *("--net", "--uts", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child")
        ]
        with (folder / "daemons.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", *namespaces, "bash", str(folder / "first.sh")],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._first = self._child_of(self._process.pid)
            self.wait(
                lambda: "idle" in self.says("sinfo", "-h", "-o", "%T", fails=True), "nodes up"
            )
        except BaseException:
            self.close()
            raise

    def _child_of(self, pid: int) -> int:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        self.wait(lambda: children.read_text().strip() != "", "first process")
        return int(children.read_text().split()[0])

    def says(self, *words: str, fails: bool = False, cwd: Path | None = None) -> str:
        """What a program prints that is run in the cluster. With `fails` it may."""
        inside = ["nsenter", "-t", str(self._first), "-n", "-u", "-m", "-p"]
        done = subprocess.run(
            [*inside, "env", "-C", str(cwd or self.folder), *words],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert fails or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def jobs(self) -> dict[str, str]:
        """The state of each job in the queue, by name and element: `run-islands_0`."""
        lines = self.says("squeue", "-h", "-r", "-o", "%j|%i|%T").splitlines()
        found = {}
        for name, number, state in (line.split("|") for line in lines):
            element = number.partition("_")[2]
            found[f"{name}_{element}" if element else name] = state
        return found

    def start_now(self) -> None:
        """Slurm lets a job that went back into the queue wait for two minutes; here for some seconds.

        Not for less: a job that begins in the second of its end is killed, for a revoked credential.
        """
        lines = self.says("squeue", "-h", "-r", "-t", "PD", "-o", "%i|%r").splitlines()
        back = {number for number, reason in (x.split("|") for x in lines) if reason == "BeginTime"}
        now = time.monotonic()
        self._back_since = {number: self._back_since.get(number, now) for number in back}
        for number, since in self._back_since.items():
            if now - since >= BACK_S:
                self.says("scontrol", "update", f"JobId={number}", "StartTime=now", fails=True)

    def kill(self, pid_file: Path) -> None:
        """SIGKILL for a process of a job, by its number there."""
        self.says("kill", "-9", pid_file.read_text().strip())

    def wait(self, is_so: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + within_s
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s; {self.told()}"
            time.sleep(0.1)

    def told(self) -> str:
        """What may help to understand a failure."""
        logs: Sequence[Path] = sorted(self.folder.glob("*.log"))
        queue = self.says("squeue", "-r", "-o", "%i %j %t %r %S", fails=True)
        jobs = self.says("scontrol", "show", "job", "-o", fails=True)
        texts = "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs)
        return f"{queue}\n{jobs}\n{texts}"

    def close(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
