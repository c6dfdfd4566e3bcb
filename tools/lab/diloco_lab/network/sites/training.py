"""What several rounds of a site to one push cost or bring: the demo's model trained in both ways.

Two sites of two workers, over loopback: only what is learnt is looked at, and how often something goes
over the line. Each way has the same steps, data and first parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.driver.options import ANYWHERE, START_WITHIN_S, broker_command
from diloco_lab.network.namespaces import now
from diloco_lab.network.sites.tables import Trained
from diloco_tools.processes import wait_for_line

SITES, WORKERS = 2, 2
STEPS, SEEDS = 480, (0, 1, 2)
OUTER: Mapping[str, Any] = {"outer_lr": 0.8, "outer_momentum": 0.5}
TRAIN_WITHIN_S = 600.0


class Way(NamedTuple):
    """Steps between two rounds of a site, and the options of its relay."""

    name: str
    sync_every: int
    relay: Mapping[str, Any] = {}


LOCAL: Mapping[str, Any] = {"local_rounds": 4}
MOMENTUM: Mapping[str, Any] = {"local_outer_lr": 0.7, "local_outer_momentum": 0.5}
WAYS_OF_TRAINING = (
    Way("each round goes up", 20),
    Way("each round goes up, four times as long", 80),
    Way("four rounds to a push", 20, LOCAL),
    Way("four rounds to a push, with momentum", 20, {**LOCAL, **MOMENTUM}),
)


def training(
    pool: ProcessPool, seeds: tuple[int, ...] = SEEDS, steps: int = STEPS
) -> Iterator[Trained]:
    """All ways, seed by seed; raises ChildFailed."""
    for seed in seeds:
        for way in WAYS_OF_TRAINING:
            yield _train(pool, way, seed, steps)


def _train(pool: ProcessPool, way: Way, seed: int, steps: int) -> Trained:
    logs = []
    with pool.broker(relays=True, workers=SITES, sync_every=way.sync_every, **OUTER) as hub:
        run = f"{hub.child.name}-seed-{seed}"
        relays = [
            pool.start(
                f"{run}-relay-{site}",
                broker_command(
                    "relay",
                    parent=hub.address,
                    name=f"relay-{site}",
                    workers=WORKERS,
                    bind=ANYWHERE,
                    feed=ANYWHERE,
                    **way.relay,
                ),
            )
            for site in range(SITES)
        ]
        servers = [wait_for_line(each, "control", START_WITHIN_S) for each in relays]
        workers = []
        for number in range(SITES * WORKERS):
            logs.append(pool.folder / f"{run}-worker-{number}.jsonl")
            words = ["--server", servers[number // WORKERS], "--worker-id", f"worker-{number}"]
            words += ["--shard", str(number), "--shards", str(SITES * WORKERS)]
            words += ["--steps", str(steps), "--eval-every", str(steps)]
            words += ["--seed", str(seed), "--log", str(logs[-1])]
            command = [sys.executable, "-m", "diloco_tools.demo.train", *words]
            workers.append(pool.start(f"{run}-worker-{number}", command))
        for each in workers:
            if each.wait(TRAIN_WITHIN_S) != 0:
                raise each.failure()
        pushes = hub.wait_for(lambda _: True).totals.pushes
        for each in relays:
            each.end()
    loss = fmean(map(_last_loss, logs))
    return Trained(way.name, seed, steps, loss, pushes // SITES, now())


def _last_loss(path: Path) -> float:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return float(next(each["val_loss"] for each in reversed(lines) if "val_loss" in each))
