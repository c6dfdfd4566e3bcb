"""The role "drill-worker": trains the demo's model until it is told to leave, or is killed.

It records each inner step at once, so that the work of a killed process is known; and it leaves the run
only after all of its work was sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from diloco_lab.chaos.audit import log_of, read_lines
from diloco_tools.demo.data import training_batches
from diloco_tools.demo.model import GPTConfig, Recipe, build_model, build_optimizer, inner_step
from diloco_worker import DiLoCoClient, DiLoCoWorker, GlobalParameters, WorkerOptions

CONTEXT = 32  # bytes that the model sees at once: half of the demo's, so that rounds are short
BATCH = 4
LEARNING_RATE = 2e-3
WARMUP = 10  # steps of each incarnation: AdamW has no state in the beginning
PATIENCE_S = 30.0  # without a sign of life of the broker
FORCES = 3  # attempts to get the last steps in


class StepCount:
    """Records each optimizer step before other hooks see it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.steps = 0

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        self.steps += 1
        os.pwrite(self._file, self.steps.to_bytes(8, "little"), 0)


class DrillWorker:
    """One incarnation of a worker."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        torch.set_num_threads(1)  # several of these share one machine
        self._is_asked = is_asked

    def train(  # noqa: PLR0917  by name
        self, server: str, worker: str, steps: str, audit: str, shard: str, seed: int, pause: float
    ) -> dict[str, Any]:
        """Take part in the run until the next request, and leave it.

        Args:
            steps: file for the number of steps, 8 bytes.
            audit: file for the worker's own log of its pushes.
            shard: file with the text to train on.
            seed: of the batches.
            pause: seconds of sleep after each step, in place of a larger model.

        Returns:
            `held`: by the name of each version of this worker a checksum of its values.
        """
        text = torch.frombuffer(bytearray(Path(shard).read_bytes()), dtype=torch.uint8)
        model = build_model(0, GPTConfig(context=CONTEXT))
        optimizer = build_optimizer(model, Recipe(0, BATCH, CONTEXT, LEARNING_RATE, "constant"))
        count = StepCount(Path(steps))
        optimizer.register_step_post_hook(count)  # before the hook's, so it is called first
        with DiLoCoWorker(
            model,
            optimizer,
            server=server,
            worker_id=worker,
            timeout=PATIENCE_S,
            options=WorkerOptions(audit=audit),
        ) as diloco:
            for tokens, targets in training_batches(text, BATCH, CONTEXT, seed):
                if self._is_asked():
                    break
                for group in optimizer.param_groups:
                    group["lr"] = LEARNING_RATE * min(1.0, (count.steps + 1) / WARMUP)
                loss = inner_step(model, [optimizer], tokens, targets)
                diloco.report(loss=loss, tokens=tokens.numel())
                time.sleep(pause)
            bring_in(diloco, Path(audit))
            return {"held": copies(diloco)}

    def pull(self, broker: str) -> dict[str, str]:
        """The checksum of the final version."""
        with DiLoCoClient(broker, timeout=PATIENCE_S) as client:
            return {"checksum": checksum(client.pull())}


def copies(diloco: DiLoCoWorker) -> dict[str, str]:
    """By the name of each version that this worker holds, SHA-256 over every bit of its values."""
    found = {}
    resume = diloco.state_dict()["resume"]
    for number, each in enumerate(resume["fragments"] if resume else ()):
        digest = hashlib.sha256()
        for segment, vector in sorted(each["base"].items()):
            digest.update(segment.encode() + b"\0")
            digest.update(vector.view(torch.uint8).numpy().data)
        found[f"{number} {' '.join(map(str, each['version']))}"] = digest.hexdigest()
    return found


def bring_in(diloco: DiLoCoWorker, audit: Path) -> None:
    """Send the steps since the last pseudo-gradient of each fragment."""
    config = diloco.config
    assert config is not None
    for _ in range(FORCES):
        log = log_of("", 0, read_lines(audit.read_text()))
        sent = {each["fragment"]: each["step"] for each in log.frozen.values()}
        if all(sent.get(f, 0) == diloco.local_step for f in range(config.num_fragments)):
            return
        diloco.force_sync()


def named(parameters: GlobalParameters) -> list[list[Any]]:
    """The version of each fragment as the audit logs write it."""
    ordered = (parameters.versions[fragment] for fragment in sorted(parameters.versions))
    return [version.plain() for version in ordered]


def checksum(parameters: GlobalParameters) -> str:
    """SHA-256 over the names of the versions, and names and every bit of the values."""
    digest = hashlib.sha256(json.dumps(named(parameters)).encode())
    for name, tensor in sorted(parameters.tensors.items()):
        digest.update(name.encode() + b"\0")
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
