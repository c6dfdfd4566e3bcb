"""Processes that play a role: they answer each request, a JSON object, with another.

    python -m diloco_lab.driver.roles ROLE

A request names an action, which is a method of the role, and its arguments; the answer is the method's
result. "rest" is not an action: it ends one that runs until the next request, which then answers. A
process ends as soon as its socket is closed, so none outlives the experiment. That socket is its
standard input; its output goes to its log.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from diloco_tools.processes import Child

ANSWER_WITHIN_S = 120.0  # far longer than any action: a hung process must not hang the experiment
END_WITHIN_S = 3.0
# A process loads only its own: most need no torch, which takes seconds and 200 MB.
ROLES = {
    "raw": "bench.roles.raw:RawEnd",
    "hearts": "bench.roles.hearts:Hearts",
    "trainer": "bench.roles.trainer:Trainer",
    "drill-worker": "chaos.worker:DrillWorker",
    "attacker": "chaos.attacks.table:Attacker",
    "attacked": "chaos.attacks.worker:Training",
}


class RoleProcess(Child):
    """A child that plays one of `ROLES`."""

    def __init__(self, role: str, name: str, folder: Path, inside: Sequence[str] = ()) -> None:
        """`inside`: a command that runs another one in its own place (exec), in a namespace say."""
        command = [*inside, sys.executable, "-m", "diloco_lab.driver.roles", role]
        self._channel, theirs = Pipe()
        with theirs:
            super().__init__(name, command, folder, stdin=theirs.fileno())

    def tell(self, do: str, **arguments: Any) -> None:
        """Ask for an action; `hear` must follow."""
        try:
            self._channel.send_bytes(json.dumps({"do": do, **arguments}).encode())
        except BrokenPipeError:
            raise self.failure() from None

    def hear(self, within_s: float = ANSWER_WITHIN_S) -> dict[str, Any]:
        """The next answer; raises ChildFailed if it is late or the process has died."""
        if not self._channel.poll(within_s):
            raise self.failure(f"did not answer within {within_s:g} s")
        try:
            answer: dict[str, Any] = json.loads(self._channel.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.wait(END_WITHIN_S)
            raise self.failure() from None
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.hear()

    def dismiss(self) -> None:
        """Ask for nothing more: the process ends by itself."""
        self._channel.close()

    def end(self) -> None:
        super().end()
        self.dismiss()


def ask_all(processes: Sequence[RoleProcess], do: str, **arguments: Any) -> list[dict[str, Any]]:
    """Ask several for the same at once; answers in the order of the processes."""
    for process in processes:
        process.tell(do, **arguments)
    return [process.hear() for process in processes]


def play(name: str) -> None:
    """Answer requests until the socket is closed. An action that fails ends the process."""
    logging.basicConfig(format="%(asctime)s %(levelname)-7s %(message)s", level=logging.INFO)
    if name not in ROLES:
        raise SystemExit(f"unknown role {name!r}")
    channel = Connection(os.dup(0))
    # `poll` is for actions that run until the next request.
    role = resolve_name(f"diloco_lab.{ROLES[name]}")(channel.poll)
    while True:
        try:
            request = json.loads(channel.recv_bytes())
        except EOFError:
            return
        action = request.pop("do")
        if action != "rest":
            answer = getattr(role, action)(**request)
            channel.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    play(sys.argv[1])
