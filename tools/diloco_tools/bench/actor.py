"""A process that does what it is asked: one line of JSON in, one line of JSON out.

    python -m diloco_tools.bench.actor ROLE

Each request names an action and its arguments; the answer holds what the action returned. An actor
ends when nobody can ask any more, so none outlives the benchmark. What it prints goes to its log.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
from collections.abc import Callable, Mapping
from typing import Any

Action = Callable[..., Mapping[str, Any] | None]


class Channel:
    """The way to whoever asks: this process's standard input and output."""

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


def serve(channel: Channel, actions: Mapping[str, Action]) -> None:
    """Do what is asked until nobody asks any more. An action that fails ends the actor."""
    while (request := channel.hear()) is not None:
        answer = actions[request.pop("do")](**request)
        channel.tell(answer or {})


def main(role: str) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)-7s %(message)s", level=logging.INFO)
    # Whatever is printed must not get between the answers.
    channel = Channel(os.dup(0), os.dup(1))
    os.dup2(2, 1)
    serve(channel, _actions(role, channel))


def _actions(role: str, channel: Channel) -> Mapping[str, Action]:
    """What an actor can do. Imported here: most need no torch, which takes seconds and 200 MB."""
    match role:
        case "raw":
            from diloco_tools.bench.raw import End

            return End(channel.is_asked).actions
        case "kernels":
            from diloco_tools.bench.kernels import Kernels

            return Kernels().actions
        case "transport":
            from diloco_tools.bench.transport import Peer

            return Peer().actions
        case "stand-in":
            from diloco_tools.bench.stand_in import Player

            return Player(channel.is_asked).actions
        case "crowd":
            from diloco_tools.bench.crowd import Crowd

            return Crowd().actions
        case "link":
            from diloco_tools.bench.link import Link

            return Link().actions
        case "trainer":
            from diloco_tools.bench.trainer import Trainer

            return Trainer().actions
        case _:
            raise SystemExit(f"there is no role {role!r}")


if __name__ == "__main__":
    main(sys.argv[1])
