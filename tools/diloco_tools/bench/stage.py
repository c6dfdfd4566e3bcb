"""The processes of a benchmark: roles, which are kept for the next part, and brokers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from diloco_protocol.feed import Snapshot
from diloco_tools.bench import machine
<<<<<<< HEAD
from diloco_tools.bench.raw import Ends, RawSample, RawTcp
from diloco_tools.feed.subscriber import FeedSubscriber
from diloco_tools.processes import (
    Child,
    Children,
    ended,
    environment,
    last_lines,
    wait_for_line,
)

ANSWER_WITHIN_S = 120.0  # far above what any action takes: a hung process must not hang it all
START_WITHIN_S = 60.0  # of a broker
END_WITHIN_S = 3.0
STATE_BYTES = 12  # per parameter at the broker: parameters, momentum, accumulator, each in fp32


class ActorFailed(Exception):
    """A process of the benchmark died or hung; the message shows its last lines."""


class Actor:
    """One process that does what it is asked; see `actor`."""

    def __init__(self, role: str, name: str, log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "diloco_tools.bench.actor", role],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment(),
                start_new_session=True,  # Ctrl-C reaches the benchmark alone
            )
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, do: str, **arguments: Any) -> None:
        """Ask for an action; `hear` has to follow."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def hear(self, within_s: float = ANSWER_WITHIN_S) -> dict[str, Any]:
        """The answer to what was asked first of what is unanswered.

        Raises:
            ActorFailed: there is none within so many seconds, or the process has died.
        """
        assert self._process.stdout is not None
        reads = self._process.stdout.fileno()
        deadline = time.monotonic() + within_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([reads], [], [], left)[0]:
                raise self._failure(f"did not answer within {within_s:g} s")
            data = os.read(reads, 1 << 16)
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_WITHIN_S)
                raise self._failure()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.hear()

    def _failure(self, what: str | None = None) -> ActorFailed:
        how = what or ended(self._process.poll())
        return ActorFailed(
            f"{self.name} {how}; the last lines of {self._log}:\n{last_lines(self._log)}"
        )

    def close(self) -> None:
        """Ask for nothing any more: then it ends, as soon as it notices."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def end(self, deadline: float) -> None:
        """Wait for its end until a moment of the monotonic clock; then SIGKILL. `close` it before."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ask_all(actors: Sequence[Actor], do: str, **arguments: Any) -> list[dict[str, Any]]:
    """Ask several for the same at once; answers in the order of the actors."""
    for actor in actors:
        actor.tell(do, **arguments)
    return [actor.hear() for actor in actors]


class BrokerProcess:
    """`diloco-broker serve` on ports of its own, and what its feed says.

    Attributes:
        address: of its control socket.
        idle: its memory before it had a model.
        snapshots: all that it has published since the last `forget_turns`.
    """

    def __init__(self, child: Child) -> None:
        self._child = child
        self.address = wait_for_line(child, "control", START_WITHIN_S)
        self.snapshots: list[Snapshot] = []
        self._feed = FeedSubscriber(wait_for_line(child, "feed", START_WITHIN_S))
        self.idle = machine.memory(self.pid)
        self._is_over = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def cpu_seconds(self) -> float:
        return machine.cpu_seconds(self.pid)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def beyond_state(self, parameters: int) -> float:
        """Bytes at the peak that are neither its state nor what it had before it had a model."""
        return machine.memory(self.pid).peak - self.idle.resident - STATE_BYTES * parameters

    def forget_turns(self) -> None:
        """Let what the loop did up to now not count."""
        self.wait_for(lambda _: True)
        self.snapshots.clear()

    def longest_turn_ms(self) -> float:
        """Of all turns since `forget_turns`, in thread CPU."""
        self.wait_for(lambda _: True)  # the turns since the last snapshot are in the next
        return max(each.loop.longest_turn_ms or 0.0 for each in self.snapshots)

    def wait_for(self, what: Callable[[Snapshot], bool], within_s: float = 60.0) -> Snapshot:
        """The first snapshot from now on that is so.

        Raises:
            ActorFailed: there is none within so many seconds.
        """
        deadline, seen = time.monotonic() + within_s, len(self.snapshots)
        while time.monotonic() < deadline and self._child.running:
            for snapshot in self.snapshots[seen:]:
                if what(snapshot):
                    return snapshot
            seen = len(self.snapshots)
            time.sleep(0.02)
        raise ActorFailed(str(self._child.failure()))

    def _read(self) -> None:
        while not self._is_over:
            snapshot = self._feed.receive(0.2)
            if snapshot is not None:
                self.snapshots.append(snapshot)

    def end(self) -> None:
        self._is_over = True
        self._thread.join(END_WITHIN_S)
        self._feed.close()
        self._child.end()
=======
from diloco_tools.bench.broker_process import BrokerProcess, running_broker
from diloco_tools.bench.raw_tcp import Ends, RawSample, RawTcp
from diloco_tools.bench.role_process import RoleProcess
from diloco_tools.processes import Children
>>>>>>> cfe7cd4 (Part the benchmark into what its child processes do, what is measured and what is reported; one TCP proxy and one way to run child processes)


class Stage:
    """A context manager that starts processes and ends them all when it is left.

    Args:
        folder: for logs and checkpoints; it exists.
        bytes_raw: that each measurement of raw TCP moves.

    Attributes:
        skipped: sentences on what could not be measured.
        raw_samples: all measurements of raw TCP.
    """

    def __init__(self, folder: Path, bytes_raw: int) -> None:
        self.folder = folder
        self.skipped: list[str] = []
        self._roles: dict[str, RoleProcess] = {}
        self._children = Children(folder)
        self._bytes_raw = bytes_raw
        self._raw: RawTcp | None = None
        self.raw_samples: list[RawSample] = []

    def __enter__(self) -> Stage:
        machine.allow_many_files()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._children.__exit__(kind, error, trace)

    def role(self, role: str, name: str = "") -> RoleProcess:
        """The process of this name, started in its role if it is new."""
        name = name or role
        if name not in self._roles:
            self._roles[name] = self._children.add(RoleProcess(role, name, self.folder))
        return self._roles[name]

    def trainers(self, count: int) -> list[RoleProcess]:
        """Processes with a model, an optimizer and the hook."""
        return [self.role("trainer", f"trainer-{i}") for i in range(count)]

    def fake_workers(self, count: int) -> list[RoleProcess]:
        """Processes that speak the protocol and have no model."""
        return [self.role("fake_worker", f"fake-worker-{i}") for i in range(count)]

    def dismiss(self, *starts: str) -> None:
        """End the roles whose names start so, and with them their memory."""
        for name in [each for each in self._roles if each.startswith(starts)]:
            self._roles.pop(name).end()

    def start_afresh(self) -> None:
        """End all roles: one of them has failed, and the others may wait for it."""
        self.dismiss("")
        self._raw = None

    @property
    def raw(self) -> RawTcp:
        """Raw TCP between two processes."""
        if self._raw is None:
            ends = Ends(self.role("raw", "raw-sender"), self.role("raw", "raw-receiver"))
            self._raw = RawTcp(ends, self._bytes_raw, self.raw_samples)
        return self._raw

    def broker(self, *options: str) -> AbstractContextManager[BrokerProcess]:
        """A broker for as long as the context lasts."""
        return running_broker(self._children, options)
