"""The examples for users, run by two processes in one run."""

import re

from kit.paths import ROOT
from kit.process_kit import Child, Processes

FOLDER = ROOT / "worker" / "examples"
STEPS, SYNC_EVERY = 40, 10
LAST_ROUND = f"Round {STEPS // SYNC_EVERY - 1} closed"  # they count from 0
BROKER = {"workers": 2, "sync_every": SYNC_EVERY, "chunk_elements": 1 << 16}


def started(processes: Processes, name: str, worker: str, address: str, *options: str) -> Child:
    """The example `name` as one worker of a run."""
    command = (str(FOLDER / name), "--steps", str(STEPS), *options)
    return processes.run(*command, DILOCO_SERVER=address, DILOCO_WORKER_ID=worker)


def two_train(processes: Processes, name: str, *options: str) -> list[str]:
    """What the two have written, once all rounds are done; each in the files that it has by default."""
    broker = processes.broker(**BROKER)
    address = broker.address()
    both = [started(processes, name, each, address, *options) for each in "ab"]
    for child in both:
        assert child.ends(within=90) == 0, child.output
    broker.says(LAST_ROUND)
    return [child.output for child in both]


def losses(output: str) -> list[float]:
    """The losses that it has written, in order."""
    return [float(each) for each in re.findall(r"loss(?: of|'?:)? +'?([\d.]+)", output)]
