"""Compiled kernels in several threads and torch in one make the same run, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kit.kernel_paths import SWITCH, needs_kernels

TRAIN = """
import hashlib, sys
import torch
from diloco_protocol import kernels
from diloco_worker import DiLoCoWorker, WorkerOptions
from diloco_worker.testing import LocalRun

assert (kernels.ready() is not None) == (sys.argv[1] == "compiled"), "the work is done the other way"
wire, reply, outer = sys.argv[2:]
threads = 3 if sys.argv[1] == "compiled" else 1
options = {"wire_dtype": wire, "reply_dtype": reply, "outer": outer, "tensor_threads": threads}
with LocalRun(workers=2, sync_every=3, deterministic=True, **options) as run:

    def train(number):
        dice = torch.Generator().manual_seed(number)  # the threads share torch's own
        model = torch.nn.Sequential(torch.nn.Linear(70, 60), torch.nn.ReLU(), torch.nn.Linear(60, 7))
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(0.1 * torch.randn(each.shape, generator=torch.Generator().manual_seed(9)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCoWorker(model, optimizer, run.server, worker_id=f"w{number}",
            options=WorkerOptions(tensor_threads=threads)):
            for _ in range(12):
                optimizer.zero_grad()
                (model(torch.randn(8, 70, generator=dice)) - 1).square().mean().backward()
                optimizer.step()

    run.train(train)
    values = b"".join(each.numpy().tobytes() for each in run.global_parameters().values())
    print(run.broker.rounds, hashlib.sha256(values).hexdigest())
"""


def trained(by: str, *options: str) -> str:
    """Rounds and digest of a run in a process of its own, whose kernels are these."""
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, by, *options],
        env=os.environ | {SWITCH: by},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "reply", "outer"),
    [("bf16", "fp32", "nesterov"), ("int8", "bf16", "dn"), ("int4z", "int4z", "nesterov")],
)
def test_run_has_the_same_bits_by_kernels_and_by_torch(wire: str, reply: str, outer: str) -> None:
    by_kernels, by_torch = (
        trained("compiled", wire, reply, outer),
        trained("torch", wire, reply, outer),
    )
    assert by_kernels == by_torch
    assert by_kernels.startswith("4 ")
