"""A child process that plays a role of `bench.roles`, seen from the benchmark, which asks it things."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_tools.processes import Child

ANSWER_WITHIN_S = 120.0  # far above what any action takes: a hung process must not hang it all
END_WITHIN_S = 3.0


class RoleProcess(Child):
    """One process that does what it is asked; see `roles.serve`."""

    def __init__(self, role: str, name: str, folder: Path) -> None:
        command = [sys.executable, "-m", "diloco_tools.bench.roles.serve", role]
        super().__init__(name, command, folder, talks=True)
        self._rest = b""

    def tell(self, do: str, **arguments: Any) -> None:
        """Ask for an action; `hear` has to follow."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure() from None

    def hear(self, within_s: float = ANSWER_WITHIN_S) -> dict[str, Any]:
        """The answer to what was asked first of what is unanswered.

        Raises:
            ChildFailed: there is none within `within_s` seconds, or the process has died.
        """
        assert self.process.stdout is not None
        reads = self.process.stdout.fileno()
        deadline = time.monotonic() + within_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([reads], [], [], left)[0]:
                raise self.failure(f"did not answer within {within_s:g} s")
            data = os.read(reads, 1 << 16)
            if not data:
                self.wait(END_WITHIN_S)
                raise self.failure()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """`tell` and `hear`."""
        self.tell(do, **arguments)
        return self.hear()


def ask_all(processes: Sequence[RoleProcess], do: str, **arguments: Any) -> list[dict[str, Any]]:
    """Ask several for the same at once; answers in the order of the processes."""
    for process in processes:
        process.tell(do, **arguments)
    return [process.hear() for process in processes]


def join_trainers(trainers: Sequence[RoleProcess], server: str) -> None:
    """Let trainers, whose models have been built, join a run together."""
    for i, trainer in enumerate(trainers):
        trainer.tell("join", server=server, worker_id=f"w{i}")
    for trainer in trainers:
        trainer.hear()


def join_fake_workers(workers: Sequence[RoleProcess], server: str, parameters: int) -> None:
    """Let fake workers join a run one by one, with a model of this size, and learn its version."""
    for i, worker in enumerate(workers):
        worker.ask("join", address=server, worker_id=f"p{i}", parameters=parameters)
    ask_all(workers, "learn_version")
