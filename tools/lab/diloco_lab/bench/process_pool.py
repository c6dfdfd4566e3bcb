"""The processes of a benchmark: roles, which are reused, and brokers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from diloco_lab.bench.roles.raw import CALL_BYTES
from diloco_lab.driver import machine
from diloco_lab.driver.options import ANYWHERE, START_WITHIN_S, broker_command
from diloco_lab.driver.roles import RoleProcess, ask_all
from diloco_protocol.clients import Keys, find_keys
from diloco_protocol.feed import Snapshot
from diloco_protocol.roles import Role
from diloco_tools.monitor.feed.listener import FeedSubscriber, Listener
from diloco_tools.processes import Child, Children, wait_for_line

SAID_WITHIN_S = 60.0
LOOK_EVERY_S = 0.02
STATE_BYTES = 12  # per parameter at the broker: parameters, momentum, accumulator, each in fp32


class RawSample(NamedTuple):
    """One measurement of raw TCP: speed in GB/s, CPU seconds per GB of either end."""

    speed: float
    send_cpu: float
    receive_cpu: float


class Ends(NamedTuple):
    """Two processes with a plain TCP connection from one to the other.

    This is the limit that all is compared with on the wire: 1 MiB `sendall` on one side, `recv_into` on
    the other, with buffers that are made once. Nothing is done with the bytes. A program in Python that
    has to hand them over cannot be faster.
    """

    sender: RoleProcess
    receiver: RoleProcess

    def connect(self) -> None:
        port = self.receiver.ask("port")["port"]
        self.receiver.tell("accept")
        self.sender.ask("connect", port=port)
        self.receiver.hear()

    def move(self, size: int) -> RawSample:
        """Move `size` bytes, in pieces of 1 MiB."""
        count = max(1, size // CALL_BYTES)
        self.receiver.tell("take", count=count)
        self.sender.tell("give", count=count)
        given, taken = self.sender.hear(), self.receiver.hear()
        gigabytes = count * CALL_BYTES / 1e9
        return RawSample(
            gigabytes / (taken["ended"] - given["began"]),
            given["cpu"] / gigabytes,
            taken["cpu"] / gigabytes,
        )


class Probes(NamedTuple):
    """Heartbeats of a member of a run, and at the same time bytes over raw TCP and back.

    The bytes show the delay by the system's scheduler: with more processes than cores, each waits for a
    core now and then. Any further delay is the broker's.
    """

    hearts: RoleProcess
    ends: Ends

    def begin(self, interval_s: float) -> None:
        self.hearts.tell("beat", interval_s=interval_s)
        self.ends.receiver.tell("echo")
        self.ends.sender.tell("ping", interval_s=interval_s)

    def end(self, since: float = 0.0) -> tuple[list[float], list[float]]:
        """Milliseconds of all heartbeats and bytes due since `since`; raises ChildFailed."""
        found = []
        for role in (self.hearts, self.ends.sender):
            role.tell("rest")
            answers = role.hear()
            if len(answers["seconds"]) != answers["sent"]:
                raise role.failure("got an answer too few or too many")
            pairs = zip(answers["due"], answers["seconds"], strict=True)
            found.append([1e3 * seconds for due, seconds in pairs if due >= since])
        self.ends.receiver.hear()
        beats, pings = found
        return beats, pings


class BrokerProcess:
    """A `diloco-broker serve` and its feed, until `close`; may raise ChildFailed."""

    def __init__(self, child: Child, keys: Keys | None = None) -> None:
        self.child = child
        self.address = wait_for_line(child, "control", START_WITHIN_S)
        self.feed = wait_for_line(child, "feed", START_WITHIN_S)
        self._idle = machine.resident(child.pid)  # before it had a model
        self._snapshots: list[Snapshot] = []  # since the last `forget_turns`
        take = self._snapshots.append
        self._listener = Listener(FeedSubscriber(self.feed, keys=keys), take, lambda _: None)
        self._listener.start()
        self.close = self._listener.close

    @property
    def cpu_seconds(self) -> float:
        return machine.cpu_seconds(self.child.pid)

    def beyond_state(self, parameters: int) -> float:
        """Peak memory in MB beyond its state and beyond that before it had a model."""
        return (machine.peak(self.child.pid) - self._idle - STATE_BYTES * parameters) / 1e6

    def forget_turns(self) -> None:
        """Start counting turns anew."""
        self.wait_for(lambda _: True)
        self._snapshots.clear()

    def longest_turn_ms(self) -> float:
        """Of all turns since `forget_turns`, in thread CPU."""
        self.wait_for(lambda _: True)  # the turns since the last snapshot are in the next
        return max(each.loop.longest_turn_ms or 0.0 for each in self._snapshots)

    def wait_for(self, what: Callable[[Snapshot], bool]) -> Snapshot:
        """The first snapshot from now on for which `what` holds; raises ChildFailed if it is late."""
        deadline, seen = time.monotonic() + SAID_WITHIN_S, len(self._snapshots)
        while time.monotonic() < deadline and self.child.running:
            for snapshot in self._snapshots[seen:]:
                if what(snapshot):
                    return snapshot
                seen += 1
            time.sleep(LOOK_EVERY_S)
        raise self.child.failure()


class ProcessPool(Children):
    """The processes of one benchmark, with logs and checkpoints in an existing folder."""

    def __init__(self, folder: Path, bytes_raw: int) -> None:
        super().__init__(folder)
        self.skipped: list[str] = []  # sentences about missing measurements
        self.raw_samples: list[RawSample] = []  # all of them
        self.bytes_raw = bytes_raw  # of one measurement of raw TCP
        self._roles: dict[str, RoleProcess] = {}
        self._raw: Ends | None = None

    def role(self, role: str, name: str = "", inside: Sequence[str] = ()) -> RoleProcess:
        """The process of this name, started in its role if it is new; see `driver.roles`."""
        name = name or role
        if name not in self._roles:
            self._roles[name] = self.add(RoleProcess(role, name, self.folder, inside))
        return self._roles[name]

    def roles(self, role: str, count: int = 1) -> list[RoleProcess]:
        return [self.role(role, f"{role}-{i}") for i in range(count)]

    def dismiss(self, *starts: str) -> None:
        """End the roles whose names start so, and free their memory."""
        for name in [each for each in self._roles if each.startswith(starts)]:
            self._roles.pop(name).end()

    def start_afresh(self) -> None:
        """End all roles: one of them has failed, and the others may wait for it."""
        self.dismiss("")
        self._raw = None

    def has_memory(self, gigabytes: float, row: str) -> bool:
        """Whether this much is free; if not, the row is noted as skipped."""
        free = machine.available_bytes() / 1e9
        if free < gigabytes:
            needs = f"it needs {gigabytes:.1f} GB of memory and {free:.1f} GB are free"
            self.skipped.append(f"{row}: left out, {needs}")
        return free >= gigabytes

    @property
    def raw_ends(self) -> Ends:
        if self._raw is None:
            self._raw = Ends(self.role("raw", "raw-sender"), self.role("raw", "raw-receiver"))
            self._raw.connect()
            self._raw.move(self.bytes_raw)  # the first one lets the kernel's buffers grow
        return self._raw

    def raw(self) -> RawSample:
        """Measure raw TCP between two processes."""
        self.raw_samples.append(self.raw_ends.move(self.bytes_raw))
        return self.raw_samples[-1]

    @contextlib.contextmanager
    def broker(self, inside: Sequence[str] = (), **options: object) -> Iterator[BrokerProcess]:
        """A broker with these options, where True is a flag, for the time of the context.

        Workers connect over TCP, in place of a network, unless `ipc` is given. `inside` is a
        command that runs another one somewhere, in its own place (exec).
        """
        with contextlib.ExitStack() as stack:
            options = {"bind": ANYWHERE, "feed": ANYWHERE} | options
            if inside:  # its network may differ from ours, but its files do not
                # The path of a socket has at most 107 characters.
                short = stack.enter_context(TemporaryDirectory(prefix="diloco-"))
                options["feed"] = f"ipc://{short}/feed"
            options["no_ipc"] = not options.pop("ipc", False)
            options["no_save"] = "save_dir" not in options
            keys = find_keys(str(options["keys"]), Role.MONITOR) if options.get("keys") else None
            command = broker_command("serve", inside=inside, **options)
            child = self.start(f"broker-{len(self.all) + 1}", command)
            stack.callback(child.end)
            yield stack.enter_context(contextlib.closing(BrokerProcess(child, keys)))

    @contextlib.contextmanager
    def training(
        self,
        trainers: Sequence[RoleProcess],
        size: str,
        **options: Any,
    ) -> Iterator[BrokerProcess]:
        """A run of these roles, with a boundary after each step and a model of this size.

        `options` are those of `broker`; `sync_every` may be another. With the option `keys`, a folder
        of keys, each has the key of its name.
        """
        options = {"workers": len(trainers), "sync_every": 1} | options
        with self.broker(**options) as broker:
            ask_all(trainers, "build", size=size)
            folder = options.get("keys")
            for trainer in trainers:  # all before the first answer: they wait for each other
                keys = folder and f"{folder}/clients/worker-{trainer.name}.key"
                trainer.tell("join", address=broker.address, keys=keys)
            for trainer in trainers:
                trainer.hear()
            yield broker
            ask_all(trainers, "leave")
