"""What several rounds of a site to one push cost or bring: the demo's model trained in both ways.

Two sites of two workers, over loopback: only what is learnt is looked at, and how often something goes
over the line. Each way has the same steps, data and first parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from diloco_lab.bench.process_pool import BrokerProcess
from diloco_lab.driver.options import ANYWHERE, START_WITHIN_S, broker_command
from diloco_lab.network.namespaces import now
from diloco_lab.network.sites.tables import Trained
from diloco_tools.processes import Child, Children, wait_for_line

SITES, WORKERS = 2, 2
STEPS, SEEDS = 480, (0, 1, 2)
HERE: dict[str, Any] = {"bind": ANYWHERE, "feed": ANYWHERE}
OUTER: dict[str, Any] = {"outer_lr": 0.8, "outer_momentum": 0.5}
TRAIN_WITHIN_S = 600.0
LOCAL: dict[str, Any] = {"local_rounds": 4}


@dataclass(frozen=True)
class Way:
    """Steps between two rounds of a site, and the options of its relay."""

    name: str
    sync_every: int
    relay: Mapping[str, Any] = field(default_factory=dict)


WAYS_OF_TRAINING = (
    Way("each round goes up", 20),
    Way("each round goes up, four times as long", 80),
    Way("four rounds to a push", 20, LOCAL),
    Way(
        "four rounds to a push, with momentum",
        20,
        LOCAL | {"local_outer_lr": 0.7, "local_outer_momentum": 0.5},
    ),
)


def training(folder: Path, seeds: tuple[int, ...] = SEEDS, steps: int = STEPS) -> Iterator[Trained]:
    """All ways, seed by seed; raises ChildFailed. Logs go into the folder."""
    for seed in seeds:
        for number, way in enumerate(WAYS_OF_TRAINING):
            place = folder / f"seed-{seed}-way-{number}"
            place.mkdir(parents=True, exist_ok=True)
            yield _train(place, way, seed, steps)


def _train(folder: Path, way: Way, seed: int, steps: int) -> Trained:
    with Children(folder) as children:
        command = broker_command(
            "serve",
            **(HERE | OUTER),
            relays=True,
            no_save=True,
            workers=SITES,
            sync_every=way.sync_every,
        )
        with closing(BrokerProcess(children.start("hub", command))) as feed:
            relays = [_relay(children, feed.address, site, way.relay) for site in range(SITES)]
            workers = [
                _worker(children, relays[each // WORKERS], each, seed, steps)
                for each in range(SITES * WORKERS)
            ]
            for each in workers:
                if each.wait(TRAIN_WITHIN_S) != 0:
                    raise each.failure()
            pushes = feed.wait_for(lambda _: True).totals.pushes
    losses = [_last_loss(folder / f"{each.name}.jsonl") for each in workers]
    return Trained(way.name, seed, steps, fmean(losses), pushes // SITES, now())


def _relay(children: Children, hub: str, site: int, options: Mapping[str, Any]) -> str:
    name = f"relay-{site}"
    of_it = {"parent": hub, "name": name, "workers": WORKERS, **HERE, **options}
    child = children.start(name, broker_command("relay", **of_it))
    return wait_for_line(child, "control", START_WITHIN_S)


def _worker(children: Children, server: str, number: int, seed: int, steps: int) -> Child:
    name, shards = f"worker-{number}", str(SITES * WORKERS)
    words = ["--server", server, "--worker-id", name, "--log", f"{name}.jsonl"]
    words += ["--shard", str(number), "--shards", shards, "--seed", str(seed)]
    words += ["--steps", str(steps), "--eval-every", str(steps)]
    return children.start(name, [sys.executable, "-m", "diloco_tools.demo.train", *words])


def _last_loss(path: Path) -> float:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return float(next(each["val_loss"] for each in reversed(lines) if "val_loss" in each))
