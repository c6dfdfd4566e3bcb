"""The processes of one run of the drill: a broker on a port of its own, and workers behind proxies."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from diloco_tools.chaos.audit import BROKER_LOG
from diloco_tools.chaos.disk import Disk
from diloco_tools.chaos.faults import DISCONNECT_GRACE_S, HEARTBEAT_TIMEOUT_S, WORKERS
from diloco_tools.chaos.job import Job, steps_in
from diloco_tools.chaos.proxy import DrillProxy
from diloco_tools.processes import Child, Children

HOST = "127.0.0.1"
SYNC_EVERY = 6  # H
FRAGMENTS = 2  # P, in streaming mode
DELAY = 2  # tau, in streaming mode
RECOVER_WAIT_S = 3.0  # longer than any live worker takes to come back
PULL_WITHIN_S = 60.0  # that a worker which has left waits for the others
OUTER = ("--outer-lr", "0.8", "--outer-momentum", "0.5")

MODES: dict[str, tuple[str, ...]] = {
    "sync": ("--mode", "sync"),
    "async": ("--mode", "async"),
    "streaming": (
        *("--mode", "sync"),
        *("--num-fragments", str(FRAGMENTS)),
        *("--fragment-sync-delay", str(DELAY)),
        *("--fragment-merge", "rebase"),  # keeps the steps made while a fragment is under way
    ),
}


def fragments_of(mode: str) -> int:
    return FRAGMENTS if mode == "streaming" else 1


def versions_a_round(mode: str) -> int:
    """How many versions make what we call a round: once every worker and every fragment."""
    return {"sync": 1, "async": len(WORKERS), "streaming": FRAGMENTS}[mode]


def allowed_loss(mode: str) -> int:
    """Inner steps that one kill may cost: H, and the tau steps made while a fragment was under way."""
    return SYNC_EVERY + (DELAY if mode == "streaming" else 0)


@dataclass
class Life:
    """One process of a worker, from its start to its end. Times are of the monotonic clock.

    Attributes:
        pulls: it pulls the final version.
        joined_at: when it was seen to have joined; None before.
        ended_at: when it was killed, or seen to have left.
        stops: when it was stopped and continued.
    """

    worker: str
    number: int
    child: Child
    folder: Path
    pulls: bool = True
    joined_at: float | None = None
    ended_at: float | None = None
    was_killed: bool = False
    stops: list[tuple[float, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.worker}.{self.number}"

    @property
    def audit(self) -> Path:
        return self.folder / f"{self.name}.worker.jsonl"

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.result.json"

    @property
    def steps(self) -> int:
        """Inner steps that it has trained so far."""
        return steps_in(self.folder / f"{self.name}.steps")


class Crew:
    """Starts, kills, stops and cuts off. Everything has ended once its context is left.

    Args:
        folder: for logs, checkpoints, everything; empty.
        mode: one of MODES.
        disk: where checkpoints go, if that is not simply `folder / "disk"`.
        shards: the text of each worker by name; others share one.
        pause: seconds of sleep behind each inner step.
        durable: checkpoints come before releases.

    Attributes:
        lives: of all workers, in the order of their start.
        broker: the process at hand.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        disk: Disk | None,
        shards: dict[str, Path],
        *,
        seed: int,
        pause: float,
        durable: bool = False,
    ) -> None:
        self.folder = folder
        self.mode = mode
        self.disk = disk
        self.lives: list[Life] = []
        self.broker: Child
        self._shards = shards
        self._seed = seed
        self._pause = pause
        self._durable = durable
        self._port = free_port()
        self._brokers = 0
        self._children = Children(folder)
        self._proxies: dict[str, DrillProxy] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        # Whoever is still here hangs, or the drill was broken off: no time for politeness.
        for child in self._children.all:
            child.kill()
        for proxy in self._proxies.values():
            proxy.close()
        if self.disk is not None:
            self.disk.close()

    @property
    def address(self) -> str:
        """The broker's own."""
        return f"tcp://{HOST}:{self._port}"

    @property
    def finish(self) -> Path:
        """As soon as this file exists the workers come to their end."""
        return self.folder / "finish"

    @property
    def pull(self) -> Path:
        """As soon as this one exists they pull the final version."""
        return self.folder / "pull"

    # The broker.

    def start_broker(self) -> None:
        """Start the broker, for the first time or again. Returns at once."""
        self._brokers += 1
        command = [
            *(self.disk.prefix if self.disk is not None else ()),
            *(sys.executable, "-m", "diloco_broker", "serve"),
            *("--workers", str(len(WORKERS))),
            *("--sync-every", str(SYNC_EVERY)),
            *OUTER,
            *("--bind", self.address),
            *("--feed", f"tcp://{HOST}:*"),
            *("--save-dir", str(self.folder / "disk")),
            *("--save-every", "1"),
            *("--keep", "3"),
            *("--audit", str(self.folder / BROKER_LOG)),
            *("--heartbeat-timeout", str(HEARTBEAT_TIMEOUT_S)),
            *("--disconnect-grace", str(DISCONNECT_GRACE_S)),
            *("--recover-wait", str(RECOVER_WAIT_S)),
            *MODES[self.mode],
        ]
        if self._durable:
            command.append("--durable")
        self.broker = self._children.start(f"broker.{self._brokers}", command)

    # Workers.

    def start_worker(self, worker: str, *, pulls: bool = True) -> Life:
        """Start a worker, for the first time or again."""
        number = 1 + sum(life.worker == worker for life in self.lives)
        proxy = self._proxies.get(worker)
        if proxy is None:
            proxy = self._proxies[worker] = DrillProxy(self.address)
        name = f"{worker}.{number}"
        start = [sys.executable, "-m", "diloco_tools.chaos.worker"]
        job = Job(
            worker,
            proxy.address,
            str(self._shards.get(worker, next(iter(self._shards.values())))),
            seed_of(self._seed, worker, number),
            self._pause,
            str(self.folder / f"{name}.steps"),
            str(self.folder / f"{name}.worker.jsonl"),
            str(self.finish if pulls else self.finish_of(worker)),
            str(self.pull) if pulls else "",
            PULL_WITHIN_S,
            str(self.folder / f"{name}.result.json"),
        )
        place = self.folder / f"{name}.job.json"
        job.write(place)
        child = self._children.start(name, [*start, str(place)])
        life = Life(worker, number, child, self.folder, pulls)
        self.lives.append(life)
        return life

    def finish_of(self, worker: str) -> Path:
        """As soon as this file exists a newcomer comes to its end."""
        return self.folder / f"finish.{worker}"

    def life(self, worker: str) -> Life:
        """The latest life of a worker."""
        return next(life for life in reversed(self.lives) if life.worker == worker)

    def proxy(self, worker: str) -> DrillProxy:
        return self._proxies[worker]

    def kill_worker(self, worker: str) -> Life:
        """SIGKILL: it has no time for a last word."""
        life = self.life(worker)
        life.child.kill()
        life.ended_at, life.was_killed = time.monotonic(), True
        return life

    def kill_broker(self) -> None:
        self.broker.kill()


def seed_of(seed: int, worker: str, life: int) -> int:
    """Seed of the batches: other ones in each life of each worker."""
    return int.from_bytes(f"{seed}{worker}{life}".encode(), "big") % (1 << 62)


def free_port() -> int:
    """A port that nobody listens at."""
    with contextlib.closing(socket.create_server((HOST, 0))) as probe:
        return int(probe.getsockname()[1])
