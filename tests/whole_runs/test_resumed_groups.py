"""A worker of several processes goes on from its checkpoint, also with another number of them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from diloco_worker import DiLoCoWorker
from kit.islands import Island, language, loss_and_gradients
from kit.process_kit import PATIENCE_S, Processes

pytestmark = pytest.mark.slow

# Deterministic, so that a push of a worker that is killed counts whole or not at all.
SYNC: dict[str, Any] = {
    "sync_every": 4,
    "max_rounds": 12,
    "chunk_elements": 777,
    "deterministic": True,
}
# All processes but one own nothing.
ONE_CHUNK = {**SYNC, "chunk_elements": 100_000}
# After step 18 a fragment is in flight.
STREAMING: dict[str, Any] = {
    **SYNC,
    "sync_every": 6,
    "num_fragments": 2,
    "fragment_sync_delay": 2,
    "fragment_merge": "rebase",
    "max_rounds": 14,
}
# With a residual, and chunks in flight whose bytes are kept.
QUANTIZED = {**STREAMING, "wire_dtype": "int4z", "reply_dtype": "int4z"}
MODES = {"sync": SYNC, "streaming": STREAMING, "one-chunk": ONE_CHUNK, "quantized": QUANTIZED}


def train_from_checkpoint(
    kind: str, address: str, worker_id: str, out: str, options: dict[str, Any]
) -> None:
    """It saves after step `save_at`, and dies after `dies_at`.

    Model and optimizer are saved whole. `load` says which state of the worker each process loads: its
    "own", "all", or that of "dcp". If it is `spoilt`, the model differs from the saved state.
    """
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
            loss = loss_and_gradients(model, optimizer, worker_id, step)
            optimizer.step()
            diloco.report(loss=loss, tokens=8)
            step += 1
            if step == options["save_at"] and not folder.exists():
                made = folder.with_suffix(".made")
                saves(diloco, step, model, optimizer, made, options["load"])
                if rank == 0:
                    made.rename(folder)
            if step == options["dies_at"] and "RESUMED" not in os.environ:
                print("dies", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        tokens = diloco.state_dict()["tokens"]
    told = {"steps": step, "rounds": diloco.sync_count, "stop": diloco.stop_reason}
    torch.save({**told, "tokens": tokens}, out)


def saves(
    diloco: DiLoCoWorker, step: int, model: nn.Module, optimizer: Optimizer, folder: Path, how: str
) -> None:
    """When it returns, all processes have saved."""
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
    """Load the checkpoint, and return its step."""
    saved = [torch.load(each, weights_only=True) for each in sorted(folder.glob("*.pt"))]
    model.load_state_dict(saved[0]["model"])
    optimizer.load_state_dict(saved[0]["optimizer"])
    states = [each["diloco"] for each in saved if "diloco" in each]
    if options.get("spoilt"):
        with torch.no_grad():
            next(model.parameters())[-1].add_(0.5)
    if options["load"] == "dcp":
        diloco.load_dcp(folder / "dcp")
    else:
        rank = int(os.environ["RANK"])
        diloco.load_state_dict(states[rank] if options["load"] == "own" else states)
    return int(saved[0]["step"])


def kind_of(count: int) -> str:
    return "ddp" if count > 1 else "plain"


# Each mode, each way to load and each change of the number: not their product.
@pytest.mark.parametrize(
    ("mode", "before", "after", "load"),
    [
        ("sync", 2, 1, "all"),
        *(("streaming", 3, 2, "all"), ("streaming", 1, 2, "dcp")),
        *(("quantized", 2, 2, "own"), ("quantized", 2, 3, "all"), ("quantized", 2, 1, "dcp")),
        ("one-chunk", 1, 3, "all"),
    ],
)
def test_worker_goes_on_as_if_nothing_had_happened(
    processes: Processes, tmp_path: Path, mode: str, before: int, after: int, load: str
) -> None:
    """Gradients are those of one process, so the model is bit for bit that of a run without a stop."""
    models = []
    for name, dies_at in (("stopped", 19), ("whole", -1)):
        folder = tmp_path / name
        folder.mkdir()
        broker = processes.broker(save_dir=str(folder / "run"), **MODES[mode])
        island = Island(
            *(processes, folder, kind_of(before), before),
            *(broker.address(), "a", train_from_checkpoint),
            save_at=18,
            dies_at=dies_at,
            load=load,
        )
        codes = island.ends()
        if dies_at > 0:
            assert -9 in codes, island.ranks[0].output
            island.go_on(kind_of(after), after)
            codes = island.ends()
            assert "goes on at 18" in island.ranks[0].output
        assert not any(codes), "\n".join(each.output for each in island.ranks)
        assert broker.ends(PATIENCE_S) == 0, broker.output
        results = island.results()
        counted, then = sum(each["tokens"] for each in results), 18 * 8 * before
        now = (results[0]["steps"] - 18) * 8 * (after if dies_at > 0 else before)
        assert counted == then + now, "tokens of all processes together are those of the worker"
        models.append(load_file(folder / "run" / "final-model.safetensors"))
    torch.testing.assert_close(*models, rtol=0, atol=0)


@pytest.mark.parametrize(("before", "after", "load"), [(2, 2, "own"), (1, 2, "all")])
def test_model_of_another_checkpoint_is_refused_by_all(
    processes: Processes, tmp_path: Path, before: int, after: int, load: str
) -> None:
    """The distance of a stale model from its base would be pushed as if it had been trained."""
    broker = processes.broker(save_dir=None, **SYNC)
    island = Island(
        *(processes, tmp_path, kind_of(before), before),
        *(broker.address(), "a", train_from_checkpoint),
        save_at=18,
        dies_at=19,
        load=load,
    )
    assert -9 in island.ends()
    island.go_on(kind_of(after), after, spoilt=True)
    codes = island.ends()
    assert all(code > 0 for code in codes), codes
    for each in island.ranks:
        assert "tensors differ (embed.weight)" in each.output, each.output
