"""A child process of the benchmark does what it is asked: a line of JSON in, a line of JSON out.

    python -m diloco_tools.bench.roles.serve ROLE

A request names an action, which is a method of the role, and its arguments; the answer is what the
method returned. The process ends as soon as nobody can ask any more, so none outlives the benchmark.
What it prints goes to its log.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import select
import sys
from collections.abc import Mapping
from typing import Any

# Each is a module beside this one with a class `Role`, loaded only where it is played: most need no
# torch, which takes seconds and 200 MB.
ROLES = ("raw", "kernels", "transport", "fake_worker", "idle_workers", "link", "trainer")


class Channel:
    """Requests and answers, through the standard input and output that the process started with."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads = reads
        self._out = os.fdopen(writes, "w", encoding="utf-8")
        self._rest = b""

    def is_asked(self) -> bool:
        """Whether the next request is there; for actions that go on until then."""
        return b"\n" in self._rest or bool(select.select([self._reads], [], [], 0)[0])

    def hear(self) -> dict[str, Any] | None:
        """The next request; None when there will be none any more."""
        while b"\n" not in self._rest:
            data = os.read(self._reads, 1 << 16)
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        request: dict[str, Any] = json.loads(line)
        return request

    def tell(self, answer: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()


def main(name: str) -> None:
    """Do what is asked until nobody asks any more. An action that fails ends the process."""
    logging.basicConfig(format="%(asctime)s %(levelname)-7s %(message)s", level=logging.INFO)
    # Whatever is printed must not get between the answers.
    channel = Channel(os.dup(0), os.dup(1))
    os.dup2(2, 1)
    if name not in ROLES:
        raise SystemExit(f"there is no role {name!r}")
    role = importlib.import_module(f"diloco_tools.bench.roles.{name}").Role(channel.is_asked)
    while (request := channel.hear()) is not None:
        channel.tell(getattr(role, request.pop("do"))(**request) or {})


if __name__ == "__main__":
    main(sys.argv[1])
