"""A local run from start to end: watches its programs and the feed, and stops them in order."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from diloco_protocol.clients.address_file import NoAddress, read_address
from diloco_protocol.feed import FeedError, Snapshot
from diloco_tools.launch.local.program import Program
from diloco_tools.launch.local.status import Status, rounds_of, status_line
from diloco_tools.monitor.feed.listener import FeedSubscriber
from diloco_tools.options import option
from diloco_tools.processes import Children, environment
from diloco_tools.terminal import installed
from diloco_worker.launching import INTERRUPTED, RUN_IS_OVER, TERMINATED

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_S = 0.2  # seconds between two polls of the programs
# Seconds for the workers to leave, and then for the broker to save, before they are killed.
LEAVE_WITHIN_S = 30.0
# Seconds that scripts may go on after the broker has ended: a worker that missed its end waits for it.
AFTER_THE_END_S = 60.0
ALL_WELL, FAILED = 0, 1
# Exit codes that are not failures: done, run over, stopped by Ctrl-C, stopped by SIGTERM.
MEANT = (0, RUN_IS_OVER, INTERRUPTED, TERMINATED)


@dataclass(frozen=True)
class LocalRun:
    """A local run. Fields declared as options are those of `diloco-launch local`.

    Attributes:
        folder: holds all files of the run; absolute.
        command: starts the script of a worker, in the current folder.
        serve: further options of `diloco-broker serve`.
    """

    folder: Path
    command: tuple[str, ...]
    workers: int = option(2, "Workers.", "--workers", "-n", min=1)
    # Few, so that the first rounds close soon. Over a network larger values save bytes.
    sync_every: int = option(50, "H: inner steps between two rounds.", min=1)
    restarts: int = option(3, "Consecutive restarts of a program that fails.", min=0)
    serve: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "broker"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def ends(self) -> Path:
        return self.folder / "ends"

    @property
    def address_file(self) -> Path:
        return self.folder / "address"

    @property
    def serve_options(self) -> list[str]:
        """Options of `diloco-broker serve`: ours, then the user's, which override them."""
        own = {
            "--workers": str(self.workers),
            "--sync-every": str(self.sync_every),
            "--bind": "tcp://127.0.0.1:*",
            "--feed": "tcp://127.0.0.1:*",
            "--save-dir": str(self.checkpoints),
            "--address-file": str(self.address_file),
        }
        return [each for pair in own.items() for each in pair] + list(self.serve)

    def worker_environment(self, index: int) -> dict[str, str]:
        """The environment of one worker: ours, without the keys of another run."""
        ours = {name: value for name, value in os.environ.items() if name != "DILOCO_KEYS"}
        threads = max(1, cores() // self.workers)
        return {
            "PYTHONUNBUFFERED": "1",  # its output reaches the log at once
            "OMP_NUM_THREADS": str(threads),
            **ours,
            "PATH": search_path(),
            "DILOCO_SERVER": f"file://{self.address_file}",
            "DILOCO_WORKER_ID": f"w{index}",
            "DILOCO_SHARD_INDEX": str(index),
            "DILOCO_NUM_SHARDS": str(self.workers),
        }


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def search_path() -> str:
    """PATH with this Python first, so that `python` is this one even in an inactive environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


class Signals:
    """Records the signals that end the run: the first stops it in order, the second at once."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.is_urgent = False

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.is_urgent = self.first is not None
        self.first = self.first or number

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch them in this context, except those that are ignored, by nohup for instance."""
        meant = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        former = {number: signal.signal(number, self._take) for number in meant}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


class BrokerFeed:
    """The feed of a broker that writes its address to a file, and may restart at another address."""

    def __init__(self, address_file: Path) -> None:
        self.newest: Snapshot | None = None
        self.has_seen_a_round = False  # closed, since the start of this run
        self._file = address_file
        self._feed: FeedSubscriber | None = None

    def look(self, seconds: float) -> None:
        """Wait at most `seconds` for the next snapshot."""
        try:
            address = read_address(self._file, line=1)
        except NoAddress:
            time.sleep(seconds)
            return
        if self._feed is None or self._feed.address != address:
            self.close()
            self._feed = FeedSubscriber(address)
        try:
            self.newest = self._feed.receive(seconds) or self.newest
            if self.newest is not None and self.newest.last_round is not None:
                self.has_seen_a_round = True
        except FeedError:  # keys and versions match within one package
            time.sleep(seconds)

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()


class Supervisor:
    """The programs of a run while it lasts."""

    def __init__(self, run: LocalRun, children: Children, status: Status, signals: Signals) -> None:
        self._run = run
        self._status = status
        self._signals = signals
        self._feed = BrokerFeed(run.address_file)
        self._began = time.monotonic()
        self._ended_at: float | None = None  # when the broker ended for good
        self._failures: list[str] = []  # names of the programs whose failure has been reported
        self._is_stuck = False  # whether too few workers are left
        serve = [sys.executable, "-m", "diloco_broker", "serve", *run.serve_options]
        self.broker = Program(
            children,
            "broker",
            serve,
            env=environment(),
            end_file=run.ends / "broker",
            restarts=run.restarts,
        )
        self.workers = [
            Program(
                children,
                f"w{index}",
                run.command,
                env=run.worker_environment(index),
                end_file=run.ends / f"w{index}",
                restarts=run.restarts,
            )
            for index in range(run.workers)
        ]

    def supervise(self) -> int:
        """Run until all workers have ended, a signal arrives or the run is stuck; the exit code."""
        while self._signals.first is None and not self._is_over():
            self._look()
        if self._signals.first is not None:
            name = signal.Signals(self._signals.first).name
            self._status.say(
                f"Received {name}; stopping the workers, then the broker. A second signal kills them."
            )
        self._stop(self.workers)
        self._stop([self.broker])
        self._report_failure(self.broker)
        self._feed.close()
        if self._signals.first is not None:
            return 128 + self._signals.first
        return self._verdict()

    def _look(self) -> None:
        self._feed.look(LOOK_S)
        for program in (self.broker, *self.workers):
            if notice := program.look():
                self._status.say(notice)
            self._report_failure(program)
        if self.broker.code is not None and self._ended_at is None:
            self._ended_at = time.monotonic()
            for worker in self.workers:  # a restarted one would wait for a broker that is gone
                worker.start_no_more()
        self._status.show(status_line(self._feed.newest, self._run.workers))

    def _report_failure(self, program: Program) -> None:
        if program.code is None or program.code in MEANT or program.name in self._failures:
            return
        self._failures.append(program.name)
        self._status.say(str(program.child.failure()))

    def _is_over(self) -> bool:
        left = sum(worker.code is None for worker in self.workers)
        if not left:
            return True
        if self._ended_at is not None:
            return (
                self.broker.code not in MEANT or time.monotonic() > self._ended_at + AFTER_THE_END_S
            )
        newest = self._feed.newest
        if newest is None or left == len(self.workers):
            return False
        has_begun = rounds_of(newest) > 0 or newest.mode == "async"
        needed = (newest.min_workers if has_begun else newest.workers_wanted) or 1
        # A worker that has not joined may train alone, and ends by itself.
        if not left <= newest.counts.alive < needed:
            return False
        what, verb = "a round" if has_begun else "round one", "is" if left == 1 else "are"
        self._status.say(
            f"The run cannot go on: {what} needs {needed} workers, and {left} {verb} left."
        )
        self._is_stuck = True
        return True

    def _stop(self, programs: Sequence[Program]) -> None:
        """Send SIGTERM to all programs, and kill those that do not end in time."""
        for program in programs:
            program.ask_to_end()
        deadline = time.monotonic() + LEAVE_WITHIN_S
        while any(program.is_running for program in programs):
            if self._signals.is_urgent or time.monotonic() > deadline:
                for program in programs:
                    if program.is_running:
                        self._status.say(f"{program.name} has not ended; killing it")
                        program.child.kill()
            left = [program.name for program in programs if program.is_running]
            self._status.show(f"waiting for {', '.join(left)} to end")
            self._feed.look(LOOK_S)
        for program in programs:
            program.look()

    def _verdict(self) -> int:
        """Report each failure not reported yet; returns the exit code of the launcher."""
        wrong = bool(self._failures) or self._is_stuck
        for worker in self.workers:
            if worker.code in (0, RUN_IS_OVER) and not worker.has_joined:
                wrong = True
                self._status.say(
                    f"{worker.name} ended without joining the run: its script never entered a "
                    f"DiLoCoWorker (its log: {_shown(worker.child.log)}). For a script that has none: "
                    "-- python -m diloco_worker.auto SCRIPT"
                )
        if not wrong and not self._feed.has_seen_a_round:
            wrong = True
            self._status.say(
                f"No round closed: each worker ended in fewer than {self._run.sync_every} steps. "
                "Train for longer, or lower --sync-every."
            )
        return FAILED if wrong else ALL_WELL

    def summarise(self) -> None:
        """Print rounds, loss and duration, how to export the model, and where the logs are."""
        newest = self._feed.newest
        rounds = 0 if newest is None else rounds_of(newest)
        loss = newest.last_round.loss if newest is not None and newest.last_round else None
        last = "" if loss is None else f", loss {loss:.4f} in the last"
        seconds = time.monotonic() - self._began
        self._status.say(f"{rounds} round{'s'[: rounds != 1]}{last}; {seconds:.0f} s")
        if any(self._run.checkpoints.glob("checkpoint-*")):
            folder = shlex.quote(str(_shown(self._run.checkpoints)))
            export = f"{installed('diloco-broker')} export {folder} --to model.safetensors"
            self._status.say(f"model: {export}")
        self._status.say(f"logs: {_shown(self._run.logs)}")


def _shown(path: Path) -> Path:
    """Relative to the current folder where it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def make_folders(run: LocalRun) -> None:
    """Create the missing folders of the run. Raises OSError."""
    for folder in (run.folder, run.logs, run.ends):
        folder.mkdir(parents=True, exist_ok=True)
    run.address_file.unlink(missing_ok=True)  # of an earlier run


def start(run: LocalRun, status: Status) -> int:
    """Start the programs and supervise them to their end; the exit code."""
    signals = Signals()
    with signals.caught():
        with Children(run.logs) as children, status:
            status.say(f"{run.workers} workers; everything of the run is in {_shown(run.folder)}")
            supervisor = Supervisor(run, children, status, signals)
            code = supervisor.supervise()
        supervisor.summarise()
    return code
