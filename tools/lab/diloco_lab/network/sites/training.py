"""What several rounds of a site to one push cost or bring: the demo's model trained in both ways.

Two sites of two workers, over loopback: only what is learnt is looked at, and how often something goes
over the line. Each way has the same steps, data and first parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from diloco_lab.bench.process_pool import BrokerProcess
from diloco_lab.network.place import now
from diloco_lab.network.sites.records import Trained
from diloco_tools.processes import Child, Children, wait_for_line

SITES, WORKERS = 2, 2
STEPS, SEEDS = 480, (0, 1, 2)
OUTER = ("--outer-lr", "0.8", "--outer-momentum", "0.5")
START_WITHIN_S, TRAIN_WITHIN_S = 60.0, 600.0
LOCAL = ("--local-rounds", "4")


@dataclass(frozen=True)
class Way:
    """Steps between two rounds of a site, and the options of its relay."""

    name: str
    sync_every: int
    relay: tuple[str, ...] = ()


WAYS_OF_TRAINING = (
    Way("each round goes up", 20),
    Way("each round goes up, four times as long", 80),
    Way("four rounds to a push", 20, LOCAL),
    Way(
        "four rounds to a push, with momentum",
        20,
        (*LOCAL, "--local-outer-lr", "0.7", "--local-outer-momentum", "0.5"),
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
        words = ["serve", "--relays", "--no-save", "--workers", str(SITES), *OUTER]
        hub = _broker(children, "hub", *words, "--sync-every", str(way.sync_every))
        with closing(BrokerProcess(hub)) as feed:
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


def _broker(children: Children, name: str, *words: str) -> Child:
    anywhere = ("--bind", "tcp://127.0.0.1:*", "--feed", "tcp://127.0.0.1:*")
    return children.start(name, [sys.executable, "-m", "diloco_broker", *words, *anywhere])


def _relay(children: Children, hub: str, site: int, options: tuple[str, ...]) -> str:
    name = f"relay-{site}"
    words = ["relay", "--parent", hub, "--name", name, "--workers", str(WORKERS), *options]
    return wait_for_line(_broker(children, name, *words), "control", START_WITHIN_S)


def _worker(children: Children, server: str, number: int, seed: int, steps: int) -> Child:
    name, shards = f"worker-{number}", str(SITES * WORKERS)
    words = ["--server", server, "--worker-id", name, "--log", f"{name}.jsonl"]
    words += ["--shard", str(number), "--shards", shards, "--seed", str(seed)]
    words += ["--steps", str(steps), "--eval-every", str(steps)]
    return children.start(name, [sys.executable, "-m", "diloco_tools.demo.train", *words])


def _last_loss(path: Path) -> float:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return float(next(each["val_loss"] for each in reversed(lines) if "val_loss" in each))
