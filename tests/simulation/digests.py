"""Digests of all messages of simulated runs: while they stay equal, behaviour has not changed.

    PYTHONPATH=tests python -m simulation.digests before.json       # on the commit to compare with
    PYTHONPATH=tests python -m simulation.digests after.json before.json

Each run is one of a mode, a way to split the model and a seed; its digest covers every message in both
directions with its sender and its time, the checkpoints, and how often dice were thrown. The fields
`progress` and `loss` of a `released` and the share of the data in a `welcome` are left out: no decision
depends on them. The second call names the runs that differ and exits with 1. About a minute
on two cores.
"""

import hashlib
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from diloco_protocol.messages import Message, Released, Welcome, encode
from simulation import week
from simulation.network import Connection
from simulation.scenarios import MODES, a_scenario
from simulation.simulator import Simulation

Job = tuple[str, bool | float]
# Of each mode a run of the whole model, one in fragments, and a quarter of a day of 32 workers.
JOBS: list[Job] = [
    *((mode, streams) for mode in MODES for streams in (False, True)),
    *((mode, 0.25) for mode in week.MODES),
]


def digest(job: Job) -> str:
    """Simulate a run; the digest of all its messages in 64 hexadecimal digits."""
    mode, how = job
    said = hashlib.sha256()

    def listening(way: str) -> Any:
        send = getattr(Connection, way)

        def sent(self: Connection, message: Message, payload: Any = None) -> None:
            decided = message
            if isinstance(message, Released):
                decided = replace(message, progress=None, loss=None)
            if isinstance(message, Welcome):  # for samplers; a simulated worker has none
                decided = replace(message, shard=None, num_shards=None)
            line = f"{self.world.now!r} {self.owner} {way} {encode(decided).hex()}\n"
            said.update(line.encode())
            send(self, message, payload)

        return patch.object(Connection, way, sent)

    with listening("up"), listening("down"):
        if isinstance(how, bool):
            run = Simulation(a_scenario(mode, how, seed=0), 0).run()
        else:
            with week.coarse():
                run = Simulation(week.a_week(mode, how), 1).run()
    disk = run.disk
    saved = None if disk is None else (sorted(disk.checkpoints), disk.writes, disk.failures)
    said.update(repr((saved, run.world.dice.getstate())).encode())
    return said.hexdigest()


def main() -> None:
    out, *before = map(Path, sys.argv[1:])
    with ProcessPoolExecutor() as pool:
        names = [f"{mode} {how}" for mode, how in JOBS]
        found = dict(zip(names, pool.map(digest, JOBS), strict=True))
    out.write_text(json.dumps(found, indent=1))
    for file in before:
        other = json.loads(file.read_text())
        names = sorted(found.keys() | other.keys())
        differing = [name for name in names if found.get(name) != other.get(name)]
        if differing:
            sys.exit(f"{len(differing)} of {len(found)} runs differ: {', '.join(differing)}")
        print(f"All {len(found)} runs are equal.")


if __name__ == "__main__":
    main()
