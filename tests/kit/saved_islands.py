"""A training script of several processes that dies, and goes on from what it has saved."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional
from torch.optim import Optimizer

from diloco_worker import DiLoCoWorker
from kit.islands import a_batch, language


def train_from_checkpoint(
    kind: str, address: str, worker_id: str, out: str, options: dict[str, Any]
) -> None:
    """It saves behind step `save_at`, and dies behind `dies_at`.

    Model and optimizer are saved whole. `load` says what each process loads of the worker: its
    "own" state, "all" of them, or what "dcp" has saved; `spoilt` what is not what was saved then: the
    "model", or the "moment" of the last process.
    """
    torch.set_num_threads(1)
    model, group = language(), None
    rank = int(os.environ["RANK"])
    if kind == "ddp":
        dist.init_process_group("gloo")
        group = "world"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    diloco = DiLoCoWorker(
        model, optimizer, server=address, worker_id=worker_id, process_group=group
    )
    folder, step = Path(out).parent / "saved", 0
    if folder.exists():
        step = goes_on(diloco, model, optimizer, folder, options)
        print(f"goes on at {step} with {os.environ['WORLD_SIZE']}", flush=True)
    with diloco:
        while not diloco.should_stop:
            words = a_batch(worker_id, step)
            loss = functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            diloco.report(loss=loss, tokens=8)
            step += 1
            if step == options["save_at"] and not folder.exists():
                made = folder.with_suffix(".made")
                saves(diloco, model, optimizer, made, step=step, how=options["load"])
                if rank == 0:
                    made.rename(folder)
            if step == options["dies_at"] and "RESUMED" not in os.environ:
                print("dies", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        tokens = diloco.state_dict()["tokens"]
    told = {"steps": step, "rounds": diloco.sync_count, "stop": diloco.stop_reason}
    torch.save({**told, "tokens": tokens}, out)


def saves(
    diloco: DiLoCoWorker,
    model: nn.Module,
    optimizer: Optimizer,
    folder: Path,
    *,
    step: int,
    how: str,
) -> None:
    """All processes have saved when it returns."""
    folder.mkdir(exist_ok=True)
    of_worker = {"diloco": diloco.state_dict()}
    kept: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if how == "dcp":
        save(of_worker, checkpoint_id=folder / "dcp")
    else:
        kept |= of_worker
    torch.save({**kept, "step": step}, folder / f"{os.environ['RANK']}.pt")
    if dist.is_initialized():
        dist.barrier()


def goes_on(
    diloco: DiLoCoWorker,
    model: nn.Module,
    optimizer: Optimizer,
    folder: Path,
    options: dict[str, Any],
) -> int:
    """Returns the step that was saved."""
    saved = [torch.load(each, weights_only=True) for each in sorted(folder.glob("*.pt"))]
    model.load_state_dict(saved[0]["model"])
    optimizer.load_state_dict(saved[0]["optimizer"])
    states = [each["diloco"] for each in saved if "diloco" in each]
    if options.get("spoilt") == "model":
        with torch.no_grad():
            next(model.parameters())[-1].add_(0.5)
    elif options.get("spoilt") == "moment":
        states[-1]["local_step"] -= 1
    if options["load"] == "dcp":
        diloco.load_dcp(folder / "dcp")
    else:
        rank = int(os.environ["RANK"])
        diloco.load_state_dict(states[rank] if options["load"] == "own" else states)
    return int(saved[0]["step"])
