"""A child process of the benchmark does what it is asked: a JSON object in, a JSON object out.

    python -m diloco_lab.bench.roles.serve ROLE

A request names an action, which is a method of the role, and its arguments; the answer is what the
method returned. "rest" is none: it ends an action that goes on until it is asked for, which then
answers. The process ends as soon as nobody can ask any more, so none outlives the benchmark. Its
standard input is the socket for both; what it prints goes to its log.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from multiprocessing.connection import Connection
from pkgutil import resolve_name

# Each is loaded only where it is played: most need no torch, which takes seconds and 200 MB.
ROLES = {
    "raw": "wire:RawEnd",
    "transport": "wire:TransportEnd",
    "line-probe": "line_probe:LineProbe",
    "kernels": "kernels:Kernels",
    "tensor-work": "tensor_work:TensorWork",
    "fake-worker": "fake_worker:FakeWorkers",
    "trainer": "trainer:Trainer",
}


def main(name: str) -> None:
    """Do what is asked until nobody asks any more. An action that fails ends the process."""
    logging.basicConfig(format="%(asctime)s %(levelname)-7s %(message)s", level=logging.INFO)
    if name not in ROLES:
        raise SystemExit(f"there is no role {name!r}")
    channel = Connection(os.dup(0))
    # `poll` is for actions that go on until the next request is there.
    role = resolve_name(f"diloco_lab.bench.roles.{ROLES[name]}")(channel.poll)
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
    main(sys.argv[1])
