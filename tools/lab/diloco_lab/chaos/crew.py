"""The processes of one run of the drill: broker, relays and workers, and the proxies between them."""

from __future__ import annotations

import contextlib
import resource
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco_lab.chaos.audit import BROKER_LOG
from diloco_lab.chaos.faults import (
    DISCONNECT_GRACE_S,
    HEARTBEAT_TIMEOUT_S,
    NEWCOMERS,
    RELAYS,
    WORKERS,
)
from diloco_lab.driver import machine
from diloco_lab.driver.options import ANYWHERE, broker_command
from diloco_lab.driver.roles import RoleProcess
from diloco_tools.processes import Child, Children
from diloco_tools.tcp_proxy import HOST, Gate, TcpProxy

# Files of one process of a worker, named NAME.LIFE and one of these.
STEPS = "steps"  # 8 bytes: the inner steps trained so far, little-endian
AUDIT = "worker.jsonl"  # its own log of its pushes


@dataclass
class Incarnation:
    """One process of a worker, from its start to its end. Times are of the monotonic clock."""

    worker: str
    number: int  # of the worker's processes: 1, 2, ...
    folder: Path  # for its files
    child: RoleProcess
    is_newcomer: bool = False  # it leaves before the others, and does not pull the final version
    joined_at: float | None = None  # when the drill saw it join
    ended_at: float | None = None  # when it was killed, or the drill saw it leave
    was_killed: bool = False
    stops: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each

    @property
    def name(self) -> str:
        return f"{self.worker}.{self.number}"

    def file(self, kind: str) -> Path:
        return self.folder / f"{self.name}.{kind}"

    @property
    def steps(self) -> int:
        """Inner steps that it has trained so far."""
        path = self.file(STEPS)
        return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0

    def is_alive_throughout(self, start: float, end: float) -> bool:
        """Whether it joined before `start`, left after `end`, and was not stopped in between."""
        if self.joined_at is None or self.joined_at >= start:
            return False
        if self.ended_at is not None and self.ended_at <= end:
            return False
        return not any(began < end and over > start for began, over in self.stops)


SYNC_EVERY = 6  # H
RECOVER_WAIT_S = 3.0  # longer than a live worker needs to reconnect


@dataclass(frozen=True)
class Mode:
    """How a run is synchronised."""

    options: tuple[str, ...]
    pause_s: float  # after each inner step of the run with faults: time for processes to start
    versions_a_round: int  # in a round, with each worker and each fragment once
    fragments: int = 1  # P
    delay: int = 0  # tau
    relays: tuple[str, ...] = ()  # between the broker and the workers

    @property
    def allowed_loss(self) -> int:
        """Inner steps that one kill may cost: H, and those during the exchange of a fragment."""
        return SYNC_EVERY + self.delay


# Rounds that do not wait for workers would be too fast for faults, so their steps take longer.
MODES = {
    "sync": Mode(("--mode", "sync"), 0.035, 1),
    "async": Mode(("--mode", "async"), 0.06, len(WORKERS)),
    "streaming": Mode(
        (
            *("--mode", "sync", "--num-fragments", "2", "--fragment-sync-delay", "2"),
            *("--fragment-merge", "rebase"),  # keeps the steps during the exchange
            *("--wire-dtype", "int4z", "--reply-dtype", "int4z"),  # copies follow by differences
        ),
        0.06,
        versions_a_round=2,
        fragments=2,
        delay=2,
    ),
    "relays": Mode(("--mode", "sync", "--relays"), 0.05, 1, relays=RELAYS),
}

# Bytes, on a full disk: less than a fragment of a checkpoint, more than a log.
LARGEST_FILE = 1 << 20
# Its processes end with the drill, also if it is killed.
END_WITH_US = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
OF_EVERY_BROKER: dict[str, Any] = {
    "feed": ANYWHERE,
    "heartbeat_timeout": HEARTBEAT_TIMEOUT_S,
    "disconnect_grace": DISCONNECT_GRACE_S,
}


class DrillProxy(TcpProxy):
    """Breaks all of its connections on request, or after a given number of further bytes."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._left: int | None = None  # bytes until a cut; None: no cut is pending

    def cut_within(self, count: int) -> None:
        """Break every connection once `count` more bytes have passed, both ways together."""
        with self._lock:
            self._left = count

    @property
    def is_armed(self) -> bool:
        """Whether such a cut is pending."""
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
        """The part of the data that still passes, and whether the cut follows it."""
        if self._left is None:
            return data, False
        passing = data[: self._left]
        self._left -= len(passing)
        return passing, self._left == 0


class Crew(Children):
    """Starts, kills, stops and cuts off processes. All have ended when its context is left.

    Everything is written to `folder`, which is empty, and `texts` has NAME.bin for each worker.
    """

    def __init__(self, folder: Path, mode: Mode, texts: Path, *, seed: int) -> None:
        super().__init__(folder)
        self.mode = mode
        self.incarnations: list[Incarnation] = []  # of all workers, in the order of their start
        self.broker: Child  # the current process
        self.address = f"tcp://{HOST}:{machine.free_port()}"  # the broker's own
        # By name of a worker or relay: the proxy that it connects to.
        self.proxies: dict[str, DrillProxy] = {}
        self.relays: dict[str, Child] = {}  # the current processes
        self.addresses = {name: f"tcp://{HOST}:{machine.free_port()}" for name in mode.relays}
        self._texts = texts
        self._seed = seed

    def __exit__(self, *error: object) -> None:
        # A process that still runs hangs, or the drill was aborted.
        for child in self.all:
            child.kill()
        for proxy in self.proxies.values():
            proxy.close()

    def start(self, name: str, command: Sequence[str]) -> Child:
        return super().start(name, [*END_WITH_US, *command])

    def fill_disk(self) -> None:
        """From now on checkpoints of the broker do not fit (EFBIG, not ENOSPC); its logs do."""
        self._limit_files(LARGEST_FILE)

    def make_room(self) -> None:
        self._limit_files(None)

    def _limit_files(self, size: int | None) -> None:
        _, most = resource.prlimit(self.broker.pid, resource.RLIMIT_FSIZE)
        limits = (most if size is None else size, most)
        resource.prlimit(self.broker.pid, resource.RLIMIT_FSIZE, limits)

    def start_broker(self) -> None:
        """Start the broker, for the first time or again. Returns at once."""
        name = self._next("broker")
        command = broker_command(
            "serve",
            *self.mode.options,
            workers=len(WORKERS),
            sync_every=SYNC_EVERY,
            outer_lr=0.8,
            outer_momentum=0.5,
            bind=self.address,
            save_dir=self.folder / "checkpoints",
            save_every=1,
            keep=3,
            audit=self.folder / BROKER_LOG,
            tape=self.folder / f"{name}.tape",
            recover_wait=RECOVER_WAIT_S,
            **OF_EVERY_BROKER,
        )
        self.broker = self.start(name, command)

    def start_relay(self, relay: str) -> None:
        """Start a relay, for the first time or again. Returns at once."""
        command = broker_command(
            "relay",
            parent=self.proxy_of(relay, self.address).address,
            name=relay,
            bind=self.addresses[relay],
            feed=OF_EVERY_BROKER["feed"],
        )
        self.relays[relay] = self.start(self._next(relay), command)

    def _next(self, name: str) -> str:
        """A process's name, with the number of its incarnation."""
        return f"{name}.{1 + sum(each.name.startswith(f'{name}.') for each in self.all)}"

    def relay_of(self, worker: str) -> str | None:
        """The relay of a worker, if any."""
        place = (*WORKERS, *NEWCOMERS).index(worker)
        relays = self.mode.relays
        return relays[place % len(relays)] if relays else None

    def behind(self, relay: str) -> list[Incarnation]:
        """The latest incarnations of the workers behind a relay."""
        names = {incarnation.worker for incarnation in self.incarnations}
        return [self.incarnation(name) for name in sorted(names) if self.relay_of(name) == relay]

    def proxy_of(self, name: str, target: str) -> DrillProxy:
        """The proxy of a worker or relay to `target`; it is made once."""
        if name not in self.proxies:
            self.proxies[name] = DrillProxy(target)
        return self.proxies[name]

    def start_worker(self, worker: str, *, is_newcomer: bool = False) -> Incarnation:
        """Start a worker, for the first time or again."""
        number = 1 + sum(incarnation.worker == worker for incarnation in self.incarnations)
        relay = self.relay_of(worker)
        target = self.address if relay is None else self.addresses[relay]
        child = self.add(RoleProcess("drill-worker", f"{worker}.{number}", self.folder))
        incarnation = Incarnation(worker, number, self.folder, child, is_newcomer)
        child.tell(
            "train",
            server=self.proxy_of(worker, target).address,
            worker=worker,
            steps=str(incarnation.file(STEPS)),
            audit=str(incarnation.file(AUDIT)),
            shard=str(self._texts / f"{worker}.bin"),
            # Other batches in each incarnation of each worker.
            seed=int.from_bytes(f"{self._seed}{worker}{number}".encode(), "big") % (1 << 62),
            pause=self.mode.pause_s,
        )
        self.incarnations.append(incarnation)
        return incarnation

    def incarnation(self, worker: str) -> Incarnation:
        """The latest incarnation of a worker."""
        return next(
            incarnation
            for incarnation in reversed(self.incarnations)
            if incarnation.worker == worker
        )

    def kill_worker(self, worker: str) -> None:
        incarnation = self.incarnation(worker)
        incarnation.child.kill()
        incarnation.ended_at, incarnation.was_killed = time.monotonic(), True
