"""Processes that can be killed for real and cost no import: forked from one that has torch already.

They are started by `Processes`, of which each test that needs some has one: a command line (`run`,
`serve`, `train`), a broker with options that the command line does not have (`broker`), or one of the
functions at the end of this module (`start`).
"""

import gc
import io
import itertools
import json
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from diloco_broker import Broker, BrokerConfig
from diloco_broker.cli.serve import end_on_signals
from diloco_broker.shell.process_memory import keep_freed_memory
from diloco_broker.storage import checkpoint
from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_worker import DiLoCoWorker
from kit.checkpoints import a_checkpoint
from kit.paths import KIT

PATIENCE_S = 40.0
# A broker on free ports, with an exact wire and tiny chunks, and one momentum for all rounds.
LOCAL: dict[str, Any] = {
    "bind": "tcp://127.0.0.1:*",
    "feed": "tcp://127.0.0.1:*",
    "chunk_elements": 16,
    "wire_dtype": "fp32",
    "outer_momentum_warmup": "constant",
}


def wait_for(what: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """Poll until the result is true, for a bounded time; returns it."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it did not happen in time"
        threading.Event().wait(0.005)
    return found


# Below the ports that a system gives to those who ask for any, so that no process gets one of these
# while its broker is between two lives. Each process of the tests begins at another one.
_ports = itertools.count(10_000 + os.getpid() * 101 % 20_000)


_kept: list[socket.socket] = []


def a_free_address() -> str:
    """For a broker that is to be found there again after it was killed.

    On Linux the port stays bound until the tests end, so no other process gets it: one that listens
    there with SO_REUSEADDR, as ZeroMQ does, may share it with a socket that does not listen.
    """
    for port in itertools.islice(_ports, 1000):
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", port))
        except OSError:
            holder.close()
            continue
        if sys.platform == "linux":
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _kept.append(holder)
        else:
            holder.close()
        return f"tcp://127.0.0.1:{port}"
    raise AssertionError("no port is free")


class Child:
    """A process and what it has written to its standard output and error."""

    def __init__(self, process: ForkServerProcess, output: Connection) -> None:
        self.process = process
        self._output = bytearray()
        self._reader = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reader.start()

    def _read(self, output: Connection) -> None:
        with output:
            while data := os.read(output.fileno(), 1 << 16):
                self._output += data

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def output(self) -> str:
        return bytes(self._output).decode(errors="replace")

    def says(self, words: str) -> str:
        """The first line that contains these words; waits for it."""

        def line() -> str | None:
            is_over = not self._reader.is_alive()
            whole = self.output.rpartition("\n")[0]  # what is behind it may be half a line
            found = next((line for line in whole.splitlines() if words in line), None)
            assert found or not is_over, f"it ended without {words!r}:\n{self.output}"
            return found

        return str(wait_for(line))

    def address(self) -> str:
        return self.says("control ").split()[1]

    def gets(self, which: signal.Signals) -> None:
        os.kill(self.pid, which)

    def kill(self) -> None:
        """SIGKILL, also for what a shell has started; returns when it is gone."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own
            self.gets(signal.SIGKILL)
        self.process.join(PATIENCE_S)

    def ends(self, within: float = PATIENCE_S) -> int:
        self.process.join(within)
        assert self.process.exitcode is not None, f"it has not ended in {within} s:\n{self.output}"
        self._reader.join(PATIENCE_S)
        return self.process.exitcode

    def may_write(self, size: int) -> None:
        """Limit the size of its files in bytes: a full disk. -1: any size, as before."""
        limit = resource.RLIM_INFINITY if size < 0 else size
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


# What children need, torch above all: the packages themselves load it only when it is asked for.
PRELOADED = [
    "diloco_broker.cli.app",
    "diloco_broker.shell.broker",
    "diloco_worker.client",
    "diloco_worker.hook",
    "pytest",
    "torch._dynamo",  # the first optimizer of a process imports it, for two seconds
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]


class Processes:
    """Starts processes in one folder, and ends those that are left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[Child] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def begin_with(self, *modules: str) -> None:
        """They have these modules, too, if no process of any test has been started before."""
        self._context.set_forkserver_preload([*PRELOADED, *modules])

    def start(self, work: Callable[..., None], *arguments: Any, **env: str) -> Child:
        output, end = self._context.Pipe(duplex=False)
        with end:
            process = self._context.Process(
                target=_run, args=(end, self.folder, env, work, *arguments), daemon=True
            )
            process.start()
        self._children.append(Child(process, output))
        return self._children[-1]

    def run(self, *command: str, **env: str) -> Child:
        """What `python *command` does."""
        return self.start(interpret, *command, **env)

    def broker(self, **options: Any) -> Child:
        """A broker on a free port, unless `bind` says otherwise."""
        return self.start(serve, {**LOCAL, **options})

    def serve(
        self,
        *options: str,
        bind: str = "tcp://127.0.0.1:*",
        by: Callable[..., None] | None = None,
        **env: str,
    ) -> tuple[Child, str]:
        """The daemon with these options of its command line, and its address.

        `by` interprets the command, on a disk that fails, say.
        """
        addresses = ("--bind", bind, "--feed", "tcp://127.0.0.1:*")
        words = ("serve", *addresses, "--outer-momentum-warmup", "constant", *options)
        made = self.start(by or interpret, "-m", "diloco_broker", *words, **env)
        return made, made.address()

    def train(self, name: str, address: str, steps: int, pause: float = 0.0, **env: str) -> Child:
        """A user's training script (`train_script.py`); `result(name)` has its result."""
        arguments = (str(steps), str(self.folder / f"{name}.json"), str(pause))
        script = str(KIT / "train_script.py")
        return self.run(script, *arguments, DILOCO_SERVER=address, DILOCO_WORKER_ID=name, **env)

    def result(self, name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return loaded

    def asks(self, *words: str) -> int:
        """An operator's command; returns its exit code."""
        return self.run("-m", "diloco_broker", *words).ends()

    def close(self) -> None:
        for child in self._children:
            if child.process.is_alive():
                child.kill()
            child.ends()
            child.process.close()


def _run(
    output: Connection,
    folder: Path,
    env: dict[str, str],
    work: Callable[..., None],
    *arguments: Any,
) -> None:
    gc.freeze()  # or the first full collection would copy all that it shares with the server
    with output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # Of processes under xdist each word would be a write of its own, with the log's lines between them.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    os.chdir(folder)
    os.environ.update(env)
    torch.set_num_threads(1)
    work(*arguments)


# What processes do.


def interpret(*command: str) -> None:
    """`-m MODULE ...` or `SCRIPT ...`, which Ctrl-C ends as it ends an interpreter."""
    try:
        if command[0] == "-m":
            sys.argv = [*command[1:]]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*command]
            runpy.run_path(command[0], run_name="__main__")
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def execute(*command: str) -> None:
    """Become this program, in a process group of its own."""
    os.setsid()
    os.execvp(command[0], command)


def serve(options: dict[str, Any]) -> None:
    """A broker as the daemon is, with options that the command line does not have."""
    import logging

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    broker = Broker(BrokerConfig(**options))
    keep_freed_memory()
    end_on_signals(broker)
    print("control", broker.address, flush=True)
    broker.run()


def on_a_disk_that_hangs(*command: str) -> None:
    """Interpret it where the second checkpoint is never written."""
    save = checkpoint.save
    saves = iter(range(1000))

    def hang(folder: Path, checkpoint: Checkpoint, keep: int, spared: Container[str] = ()) -> Path:
        if next(saves):
            print("hangs", flush=True)
            threading.Event().wait()
        return save(folder, checkpoint, keep, spared)

    checkpoint.save = hang
    interpret(*command)


def on_a_full_disk(*command: str) -> None:
    """Interpret it where no file may grow."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    interpret(*command)


def save_for_ever(folder: Path, incarnation: int) -> None:
    """Checkpoint after checkpoint of what `a_checkpoint(number, number)` is."""
    for number in itertools.count(1):
        made = replace(a_checkpoint(number, seed=number), incarnation=incarnation)
        checkpoint.save(folder, made, keep=2)
        print(f"saved {number} of {incarnation}", flush=True)


EVERY = 10  # rounds between two looks


def memory_kib(pid: int | str, field: str = "VmRSS") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(f"/proc/{pid}/status has no {field}")


def train_and_measure(
    address: str, broker: int, out: Path, steps: int, sizes: dict[str, int]
) -> None:
    """Train; after each tenth step write down the memory of this process and of the broker's."""
    torch.manual_seed(0)
    width = sizes["width"]
    made = [torch.nn.Linear(width, width, bias=False) for _ in range(sizes["layers"])]
    model = torch.nn.Sequential(*made)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    seen: dict[str, list[int]] = {"worker": [], "broker": []}
    with DiLoCoWorker(model, optimizer, server=address, worker_id="measured") as diloco:
        for step in range(steps):
            optimizer.step()
            if step % EVERY == 0:
                seen["worker"].append(memory_kib("self"))
                seen["broker"].append(memory_kib(broker))
    rounds, peak = diloco.sync_metrics.pushes, memory_kib("self", "VmHWM")
    out.write_text(json.dumps({"seen": seen, "rounds": rounds, "peak": peak}))
