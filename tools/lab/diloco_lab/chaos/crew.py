"""The processes of one run of the drill: broker, relays and workers, and the proxies between them."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diloco_lab.chaos import leftovers
from diloco_lab.chaos.audit import BROKER_LOG, RELAY_LOGS
from diloco_lab.chaos.disk import Disk
from diloco_lab.chaos.faults import (
    DISCONNECT_GRACE_S,
    HEARTBEAT_TIMEOUT_S,
    NEWCOMERS,
    RELAYS,
    WORKERS,
)
from diloco_lab.driver import machine
from diloco_lab.driver.options import ANYWHERE, broker_command
from diloco_tools.processes import C, Child, Children
from diloco_tools.tcp_proxy import HOST, Gate, TcpProxy

# Files of a process, named NAME.LIFE and one of these.
JOB = "job.json"  # what it is started with
STEPS = "steps"  # 8 bytes: the inner steps trained so far, little-endian
AUDIT = "worker.jsonl"  # its own log of its pushes
RESULT = "result.json"  # what has come of it


@dataclass(frozen=True)
class Job:
    """What one process of a worker has to do."""

    worker: str
    number: int  # of the worker's processes: 1, 2, ...
    server: str  # where it trains
    broker: str  # where it pulls the final version
    folder: str  # for its files; absolute, like the path of the text
    shard: str  # the text to train on
    seed: int  # of the batches
    pause: float  # seconds of sleep behind each step: stands for a larger model
    pulls: bool  # in the end it waits for the others and pulls the final version

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text()))

    def write(self) -> Path:
        """Write it to the file that the process is started with."""
        path = self.file(JOB)
        path.write_text(json.dumps(asdict(self)))
        return path

    @property
    def name(self) -> str:
        return f"{self.worker}.{self.number}"

    def file(self, kind: str) -> Path:
        return Path(self.folder) / f"{self.name}.{kind}"

    @property
    def finish(self) -> Path:
        """As soon as it exists training comes to its end; newcomers have one of their own."""
        return Path(self.folder) / ("finish" if self.pulls else f"finish.{self.worker}")

    @property
    def pull(self) -> Path:
        """As soon as it exists the final version is pulled."""
        return Path(self.folder) / "pull"


@dataclass
class Life:
    """One process of a worker, from its start to its end. Times are of the monotonic clock."""

    job: Job
    child: Child
    joined_at: float | None = None  # when it was seen to have joined
    ended_at: float | None = None  # when it was killed, or seen to have left
    was_killed: bool = False
    stops: list[tuple[float, float]] = field(default_factory=list)  # from when to when

    @property
    def steps(self) -> int:
        """Inner steps that it has trained so far."""
        path = self.job.file(STEPS)
        return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0

    def is_alive_throughout(self, start: float, end: float) -> bool:
        """Had it joined before, did it stay beyond, and did nobody stop it in between?"""
        if self.joined_at is None or self.joined_at >= start:
            return False
        if self.ended_at is not None and self.ended_at <= end:
            return False
        return not any(began < end and over > start for began, over in self.stops)


SYNC_EVERY = 6  # H
RECOVER_WAIT_S = 3.0  # longer than any live worker takes to come back


@dataclass(frozen=True)
class Mode:
    """How a run is synchronised."""

    options: tuple[str, ...]
    pause_s: float  # behind each inner step of the run with faults: room for processes to start
    versions_a_round: int  # that make what we call a round: once every worker and every fragment
    fragments: int = 1  # P
    delay: int = 0  # tau
    relays: tuple[str, ...] = ()  # between the broker and the workers

    @property
    def allowed_loss(self) -> int:
        """Inner steps that one kill may cost: H, and those made while a fragment was under way."""
        return SYNC_EVERY + self.delay


# Rounds that wait for nobody come faster than faults can be survived, so their steps take longer.
MODES = {
    "sync": Mode(("--mode", "sync"), 0.035, 1),
    "async": Mode(("--mode", "async"), 0.06, len(WORKERS)),
    "streaming": Mode(
        (
            *("--mode", "sync", "--num-fragments", "2", "--fragment-sync-delay", "2"),
            *("--fragment-merge", "rebase"),  # keeps the steps made while a fragment is under way
            *("--wire-dtype", "int4z", "--reply-dtype", "int4z"),  # copies follow by differences
        ),
        0.06,
        versions_a_round=2,
        fragments=2,
        delay=2,
    ),
    "relays": Mode(("--mode", "sync", "--relays"), 0.05, 1, relays=RELAYS),
}

OF_EVERY_BROKER: dict[str, Any] = {
    "feed": ANYWHERE,
    "heartbeat_timeout": HEARTBEAT_TIMEOUT_S,
    "disconnect_grace": DISCONNECT_GRACE_S,
}


class DrillProxy(TcpProxy):
    """Breaks all of its connections when it is told to, or behind a byte that is still to come."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._left: int | None = None  # bytes that still pass before a cut; None: no cut is to come

    def cut_within(self, count: int) -> None:
        """Break every connection once `count` more bytes have passed, both ways together."""
        with self._lock:
            self._left = count

    @property
    def is_armed(self) -> bool:
        """Whether such a cut is still to come."""
        with self._lock:
            return bool(self._left)

    def cut(self) -> None:
        with self._lock:
            self._left = None
            super().cut()

    def gate(self, connection: int, up: bool) -> Gate:
        return self._passing

    def forward(self, source: socket.socket, sink: socket.socket, gate: Gate, *, up: bool) -> None:
        with contextlib.suppress(OSError):
            super().forward(source, sink, gate, up=up)
        with self._lock:
            if self._left == 0:
                self.cut()

    def _passing(self, data: bytes) -> tuple[bytes, bool]:
        """What of this still passes, and whether the cut comes behind it."""
        if self._left is None:
            return data, False
        passing = data[: self._left]
        self._left -= len(passing)
        return passing, self._left == 0


class Crew(Children):
    """Starts, kills, stops and cuts off. Everything has ended once its context is left.

    Everything is written to `folder`, which is empty, `disk` is where the checkpoints go, if that is not
    simply `folder / "disk"`, and `texts` has NAME.bin for each worker. Each inner step is followed by a
    `pause` in seconds.
    """

    def __init__(
        self,
        folder: Path,
        mode: Mode,
        disk: Disk | None,
        texts: Path,
        *,
        seed: int,
        pause: float,
        durable: bool = False,
    ) -> None:
        super().__init__(folder)
        self.mode = mode
        self.disk = disk
        self.lives: list[Life] = []  # of all workers, in the order of their start
        self.broker: Child  # the process at hand
        self.address = f"tcp://{HOST}:{machine.free_port()}"  # the broker's own
        # Of each worker and relay by name: in front of whom it is connected to.
        self.proxies: dict[str, DrillProxy] = {}
        self.relays: dict[str, Child] = {}  # the processes at hand
        self.addresses = {name: f"tcp://{HOST}:{machine.free_port()}" for name in mode.relays}
        self._texts = texts
        self._seed = seed
        self._pause = pause
        self._durable = durable
        self._brokers = 0

    def __exit__(self, *error: object) -> None:
        # What still runs hangs, or the drill was broken off: no time for politeness.
        for child in self.all:
            child.kill()
        for proxy in self.proxies.values():
            proxy.close()
        if self.disk is not None:
            self.disk.close()

    def add(self, child: C) -> C:
        leftovers.note(self.folder, child.pid)
        return super().add(child)

    def start_broker(self) -> None:
        """Start the broker, for the first time or again. Returns at once."""
        self._brokers += 1
        command = broker_command(
            "serve",
            *self.mode.options,
            inside=self.disk.prefix if self.disk is not None else (),
            workers=len(self.mode.relays or WORKERS),
            sync_every=SYNC_EVERY,
            outer_lr=0.8,
            outer_momentum=0.5,
            bind=self.address,
            save_dir=self.folder / "disk",
            save_every=1,
            keep=3,
            audit=self.folder / BROKER_LOG,
            recover_wait=RECOVER_WAIT_S,
            durable=self._durable,
            **OF_EVERY_BROKER,
        )
        self.broker = self.start(f"broker.{self._brokers}", command)

    def start_relay(self, relay: str) -> None:
        """Start a relay, for the first time or again. Returns at once."""
        number = 1 + sum(each.name.startswith(f"{relay}.") for each in self.all)
        command = broker_command(
            "relay",
            parent=self.proxy_of(relay, self.address).address,
            name=relay,
            workers=sum(self.relay_of(worker) == relay for worker in WORKERS),
            bind=self.addresses[relay],
            audit=self.folder / f"{relay}{RELAY_LOGS.removeprefix('*')}",
            **OF_EVERY_BROKER,
        )
        self.relays[relay] = self.start(f"{relay}.{number}", command)

    def relay_of(self, worker: str) -> str | None:
        """The relay that a worker is behind; None where there are none."""
        place = (*WORKERS, *NEWCOMERS).index(worker)
        relays = self.mode.relays
        return relays[place % len(relays)] if relays else None

    def behind(self, relay: str) -> list[Life]:
        """The latest lives of the workers behind a relay."""
        names = {life.job.worker for life in self.lives}
        return [self.life(name) for name in sorted(names) if self.relay_of(name) == relay]

    def proxy_of(self, name: str, target: str) -> DrillProxy:
        """The proxy of a worker or relay, which stays; `target` is what is behind it."""
        if name not in self.proxies:
            self.proxies[name] = DrillProxy(target)
        return self.proxies[name]

    def start_worker(self, worker: str, *, pulls: bool = True) -> Life:
        """Start a worker, for the first time or again."""
        number = 1 + sum(life.job.worker == worker for life in self.lives)
        relay = self.relay_of(worker)
        target = self.address if relay is None else self.addresses[relay]
        job = Job(
            worker,
            number,
            server=self.proxy_of(worker, target).address,
            broker=self.address,
            folder=str(self.folder),
            shard=str(self._texts / f"{worker}.bin"),
            # Other batches in each life of each worker.
            seed=int.from_bytes(f"{self._seed}{worker}{number}".encode(), "big") % (1 << 62),
            pause=self._pause,
            pulls=pulls,
        )
        command = [sys.executable, "-m", "diloco_lab.chaos.worker", str(job.write())]
        life = Life(job, self.start(job.name, command))
        self.lives.append(life)
        return life

    def life(self, worker: str) -> Life:
        """The latest life of a worker."""
        return next(life for life in reversed(self.lives) if life.job.worker == worker)

    def kill_worker(self, worker: str) -> None:
        life = self.life(worker)
        life.child.kill()
        life.ended_at, life.was_killed = time.monotonic(), True
