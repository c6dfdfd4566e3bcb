"""Workers of several processes come to what plain ones come to, decide alike, and survive a kill."""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from diloco_worker import DiLoCoWorker
from diloco_worker.transport.sigterm import EXIT_CODE
from kit.islands import Island, gradients_of_a_pipeline, language, loss_and_gradients, spread
from kit.process_kit import PATIENCE_S, Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Chunks are so small that each process has several of each fragment, and no tensor begins with one.
ROUNDS: dict[str, Any] = {"max_rounds": 12, "chunk_elements": 777}
SYNC = {"sync_every": 3, "deterministic": True, **ROUNDS}
STREAMING = {**SYNC, "sync_every": 6, "num_fragments": 2, "fragment_sync_delay": 2}
ASYNC = {"sync_every": 3, "mode": "async", **ROUNDS}
PLAIN = ("plain", 1)
ANYWHERE = "tcp://127.0.0.1:*"


def final_model(
    processes: Processes, mode: dict[str, Any], *workers: tuple[str, int], **options: Any
) -> dict[str, Tensor]:
    """The model after a run of these workers; each is a kind and a number of processes."""
    folder = processes.folder / "-".join(f"{kind}{count}" for kind, count in workers)
    folder.mkdir()
    broker = processes.broker(workers=len(workers), save_dir=str(folder / "run"), **mode)
    address = broker.address()
    if mode.get("relays") and workers[0] != PLAIN:
        words = ("-m", "diloco_broker", "relay", "--parent", address, "--name", "north")
        address = processes.run(*words, "--bind", ANYWHERE, "--feed", ANYWHERE).address()
    islands = [
        Island(processes, folder, kind, count, address, f"worker-{number}", **options)
        for number, (kind, count) in enumerate(workers)
    ]
    for island in islands:
        island.ends_well()
        for each in island.ranks:
            assert "Traceback" not in each.output, each.output
        told = {(each["steps"], each["rounds"], each["stop"]) for each in island.results()}
        assert len(told) == 1, "all processes of a worker stop at one step, for one reason"
    assert broker.ends(PATIENCE_S) == 0, broker.output
    return load_file(folder / "run" / "final-model.safetensors")


QUANTIZED = {**SYNC, "wire_dtype": "int4z", "reply_dtype": "int4z", "feedback_decay": 0.75}
RELAYED = {**SYNC, "relays": True, "wire_dtype": "fp32"}
DDP, EVEN, RULE = ("ddp", 2), {"even": True}, {"rule": True}
AT_NIGHT = pytest.mark.nightly


@pytest.mark.parametrize(
    ("mode", "crew", "options", "by"),
    [
        # The mean of the gradients of two equal batches is that of one, so all sums are the same.
        pytest.param(QUANTIZED, [DDP, PLAIN], {}, 0.0, id="quantized-ddp"),
        pytest.param(RELAYED, [DDP, PLAIN], {}, 1e-6, id="relay-ddp"),
        pytest.param(ASYNC, [DDP], {}, 1e-6, id="async-ddp"),
        pytest.param(STREAMING, [("fsdp", 3)], {}, 1e-6, id="streaming-fsdp3-uneven"),
        pytest.param(STREAMING, [("fsdp-tp", 4)], EVEN, 1e-6, id="streaming-fsdp2-tp2"),
        # Stages of a pipeline, with a tied weight.
        pytest.param(STREAMING, [("pipeline", 2)], RULE, 0.0, id="streaming-pipeline"),
        pytest.param(
            *(STREAMING, [PLAIN, DDP, ("fsdp", 4)], {}, 1e-6), id="streaming-1-2-4", marks=AT_NIGHT
        ),
    ],
)
def test_workers_of_several_processes_come_to_what_those_of_one_come_to(
    processes: Processes,
    mode: dict[str, Any],
    crew: list[tuple[str, int]],
    options: dict[str, Any],
    by: float,
) -> None:
    plain = final_model(processes, mode, *[PLAIN] * len(crew), **options)
    found = final_model(processes, mode, *crew, **options)
    torch.testing.assert_close(found, plain, rtol=0, atol=by)


def test_process_that_leaves_after_its_leader_counts_the_same(
    processes: Processes,
) -> None:
    """What is in flight at the end is counted by the leader when the others have stopped training."""
    final_model(processes, STREAMING, ("ddp", 2), late=True)


def test_leader_waits_at_the_end_without_the_others(processes: Processes, tmp_path: Path) -> None:
    """What is in flight is counted, also in those that listen to the group no more."""
    mode = {**STREAMING, "workers": 2, "max_rounds": None}
    address = processes.broker(**mode).address()
    slow = Island(processes, tmp_path, *PLAIN, address, "slow", steps=13, pause=0.1)
    island = Island(processes, tmp_path, "ddp", 2, address, "a", steps=13)
    island.ends_well()
    assert [each["rounds"] for each in island.results()] == [4, 4]
    slow.ends_well()


@pytest.mark.parametrize(
    ("name", "rank"),
    [("state_dict", 0), ("force_sync", 1), ("load_global", 0), ("global_parameters", 1)],
)
def test_what_one_process_calls_alone_ends_all_with_a_sentence(
    processes: Processes, tmp_path: Path, name: str, rank: int
) -> None:
    """`if rank == 0: torch.save(diloco.state_dict(), ...)` would wait for half an hour."""
    _, address = processes.serve("--sync-every", "3")
    island = Island(
        *(processes, tmp_path, "pipeline", 2, address, "a"), rule=True, alone=(name, rank)
    )
    assert all(code > 0 for code in island.ends())
    one, other = (
        (f"{name}()", "optimizer.step()") if rank == 0 else ("optimizer.step()", f"{name}()")
    )
    for each in island.ranks:
        said = f"Process 0 of this worker is at {one}, and process 1 at {other}"
        assert said in each.output, each.output


def test_process_that_waits_alone_says_for_what(processes: Processes, tmp_path: Path) -> None:
    """The other process waits for it in the backward pass of DDP."""
    _, address = processes.serve("--sync-every", "3")
    island = Island(processes, tmp_path, "ddp", 2, address, "a", alone=("state_dict", 0))
    island.ranks[0].says("state_dict() waits for the other processes of this worker")
    island.kill()


def test_processes_with_different_options_are_refused(processes: Processes, tmp_path: Path) -> None:
    _, address = processes.serve("--sync-every", "3")
    island = Island(processes, tmp_path, "ddp", 2, address, "a", differs=True)
    assert all(island.ends())
    for each in island.ranks:
        assert "sync_every is None in process 0 of this worker and 2 in process 1" in each.output


def train_on(kind: str, address: str, name: str, out: str, options: dict[str, Any]) -> None:
    """A script that reads `should_stop` and goes on."""
    model = language()
    _, called, group, *_ = spread(kind, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with DiLoCoWorker(model, optimizer, address, worker_id=name, process_group=group) as diloco:
        try:
            for step in range(100_000):
                loss_and_gradients(called, optimizer, name, step)
                optimizer.step()
                print(f"step {step}, stop: {diloco.should_stop}", flush=True)
        finally:
            Path(out).write_text(str(diloco.local_step))


def test_sigterm_to_one_process_ends_all_at_one_step(processes: Processes, tmp_path: Path) -> None:
    broker = processes.broker(workers=1, save_dir=None, sync_every=4)
    island = Island(processes, tmp_path, "ddp", 2, broker.address(), "a", script=train_on)
    island.ranks[1].says("step 6")
    island.ranks[1].gets(signal.SIGTERM)
    assert island.ends() == [EXIT_CODE] * 2, "\n".join(each.output for each in island.ranks)
    assert len({island.out(rank).read_text() for rank in (0, 1)}) == 1
    assert all(each.output.count("stop: True") == 1 for each in island.ranks)


COUNT, STEPS = 4, 9


def train_in_a_part(kind: str, address: str, _: str, out: str, options: Any) -> None:
    """Processes 0 and 1 are one worker, 2 and 3 another."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "dp"))
    worker = mesh.get_local_rank("worker")
    model = language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    name = f"worker-{worker}"
    with DiLoCoWorker(
        model, optimizer, server=address, worker_id=name, process_group=mesh["dp"]
    ) as diloco:
        for step in range(STEPS):
            loss_and_gradients(model, optimizer, name, step)
            optimizer.step()
    assert diloco.worker_id == name
    torch.save({"model": model.state_dict(), "rounds": diloco.sync_count}, out)


def test_parts_of_a_mesh_are_workers_of_one_run(processes: Processes, tmp_path: Path) -> None:
    broker = processes.broker(workers=2, sync_every=3, save_dir=None, chunk_elements=777)
    ranks = Island(processes, tmp_path, "mesh", COUNT, broker.address(), "all", train_in_a_part)
    ranks.ends_well()
    first, *others = ranks.results()
    assert first["rounds"] == STEPS // 3
    for other in others:
        for name, value in first["model"].items():
            assert other["model"][name].equal(value), name
    assert "2 of 2 expected" in broker.output


def train_until_a_new_setting(kind: str, address: str, name: str, out: str, _: Any) -> None:
    dist.init_process_group("gloo")
    model = language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told: list[Any] = []
    left = 7  # steps under the new setting
    with DiLoCoWorker(model, optimizer, address, worker_id=name, process_group="world") as diloco:
        while left:
            if diloco.sync_every == 3:
                told = told or [diloco.local_step, diloco.config and diloco.config.sync_every]
                left -= 1
            gradients_of_a_pipeline(model, diloco.local_step)
            optimizer.step()
            print(f"step {diloco.local_step}", flush=True)
    told += [diloco.load_global(), diloco.force_sync()]  # these return though it has left
    Path(out).write_text(json.dumps(told))


def test_processes_use_a_new_setting_from_one_step_on(processes: Processes, tmp_path: Path) -> None:
    _, address = processes.serve("--sync-every", "8", "--workers", "1")
    island = Island(processes, tmp_path, "ddp", 2, address, "a", script=train_until_a_new_setting)
    island.ranks[0].says("step 9")
    processes.asks("set", address, "--sync-every", "3")
    island.ends_well()
    one, other = (json.loads(island.out(rank).read_text()) for rank in (0, 1))
    assert one == other
    assert one[1:] == [3, False, False]


OPTIONS: dict[str, Any] = {
    "sync_every": 3,
    "workers": 2,
    "min_workers": 1,
    "max_rounds": 30,
    "disconnect_grace": 0.2,
    "chunk_elements": 777,
    "save_dir": None,
}


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        pytest.param("freezing", 0, id="freezing-leader"),
        pytest.param("waiting", 0, id="waiting-leader", marks=AT_NIGHT),
        pytest.param("merging", 1, id="merging-other"),
    ],
)
def test_killed_process_ends_its_worker_which_comes_back(
    processes: Processes, tmp_path: Path, phase: str, rank: int
) -> None:
    broker = processes.broker(**OPTIONS)
    address = broker.address()
    whole = Island(processes, tmp_path, "plain", 1, address, "whole", pause=0.02)
    island = Island(
        processes, tmp_path, "fsdp", 2, address, "island", dies_in=phase, dies_as=rank, pause=0.02
    )
    codes = island.ends()
    assert codes[rank] == -9, island.ranks[rank].output
    survivor = island.ranks[1 - rank]
    assert codes[1 - rank] not in (0, -9), survivor.output
    assert "of this worker" in survivor.output or "onnection closed" in survivor.output
    island.start()
    island.ends_well()
    whole.ends_well()
    assert broker.ends(PATIENCE_S) == 0, broker.output
    assert "2 of 2 expected" in broker.output
    assert len({(each["steps"], each["rounds"]) for each in island.results()}) == 1


def train_with_a_frozen_block(kind: str, address: str, name: str, out: str, _: Any) -> None:
    dist.init_process_group("gloo")
    model = language()
    model.layers[0].requires_grad_(requires_grad=False)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    with DiLoCoWorker(
        model, optimizer, server=address, worker_id=name, process_group="world"
    ) as diloco:
        while diloco.sync_count < 8:
            for each in trained:
                each.grad = torch.full_like(each, 1e-3)
            optimizer.step()
            print(f"rounds {diloco.sync_count}", flush=True)
            threading.Event().wait(0.02)


def test_all_processes_seed_a_broker_that_lost_all(processes: Processes, tmp_path: Path) -> None:
    """Frozen parameters too, of which each process has its share."""
    options = {**OPTIONS, "workers": 1, "max_rounds": None, "recover_wait": 0.1}
    broker = processes.broker(**options)
    address = broker.address()
    island = Island(processes, tmp_path, "ddp", 2, address, "a", script=train_with_a_frozen_block)
    island.ranks[1].says("rounds 3")
    broker.kill()
    processes.broker(**options, bind=address)
    island.ends_well()
