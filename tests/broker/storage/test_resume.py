"""A broker that is stopped or killed goes on from its checkpoint as if nothing had happened."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_broker import Broker, BrokerConfig
from diloco_broker.storage.checkpoint import found, load, save
from diloco_broker.storage.resume import newest_checkpoint
from diloco_protocol import FragmentPlan, UsageError
from diloco_worker import DiLoCoClient
from diloco_worker.model.model_tensors import ModelTensors
from kit.checkpoints import a_checkpoint
from kit.process_kit import LOCAL
from kit.reference import State
from kit.whole_run import mlp


def a_config(folder: Path, **options: Any) -> BrokerConfig:
    return BrokerConfig(**{**LOCAL, "save_dir": str(folder), **options})


def gradients(number: int, like: State) -> State:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(t.shape, generator=generator) for name, t in like.items()}


def trained(config: BrokerConfig, rounds: range) -> State:
    """The parameters after these rounds of one worker; the broker is stopped then."""
    torch.manual_seed(3)
    model, pieces = mlp(), config.num_fragments
    plan = FragmentPlan.of(ModelTensors.of_module(model).manifest, pieces)
    with (
        Broker(config) as broker,
        DiLoCoClient(broker.address, worker_id="w", timeout=20) as client,
    ):
        start = client.join(model).tensors
        for number in rounds:
            fragment = number % pieces
            part = {name: start[name] for name in plan.fragments[fragment]}
            client.push(gradients(number, part), fragment=fragment)
            client.pull()
        return dict(client.pull().tensors)


OUTERS: dict[str, dict[str, Any]] = {
    "dn": {"mode": "async", "workers": 3, "outer": "dn"},
    "fedbuff": {"mode": "async", "workers": 3, "outer": "fedbuff"},
    "two fragments": {"num_fragments": 2, "sync_every": 8},
    "quantized replies": {"reply_dtype": "int4z"},
    "schedules": {"outer_lr_schedule": "cosine:10:0.2", "outer_momentum_warmup": "linear:7"},
}


@pytest.mark.parametrize("name", OUTERS)
def test_run_that_is_stopped_and_resumed_is_bit_for_bit_the_run_that_is_not(
    tmp_path: Path, name: str
) -> None:
    calm = trained(a_config(tmp_path / "calm", **OUTERS[name]), range(8))
    for first in range(0, 8, 3):
        rounds = range(first, min(8, first + 3))
        broken = trained(a_config(tmp_path / "broken", **OUTERS[name]), rounds)
    assert all(torch.equal(calm[key], broken[key]) for key in calm)
    newest = [load(found(tmp_path / each)[0]) for each in ("calm", "broken")]
    assert newest[0].number == newest[1].number == 8
    assert newest[1].incarnation == 3
    assert newest[1].record.run != newest[0].record.run
    assert newest[0].record.totals["rounds"] == newest[1].record.totals["rounds"] == 8


def test_damaged_checkpoint_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(a_config(tmp_path), range(4))
    newest, before = found(tmp_path)[:2]
    damaged = newest / "fragment-0.safetensors"
    damaged.unlink()  # it may be a link to the file of the one before
    damaged.write_bytes(b"nothing")
    config = a_config(tmp_path, recover_wait=0.2)
    with Broker(config) as broker, DiLoCoClient(broker.address, timeout=20) as client:
        client.join(mlp())
        assert client.pull().version.counter == load(before).number
    assert f"Skipped a checkpoint: {newest}" in caplog.text


def test_folder_without_a_sound_checkpoint_stops_the_start_with_a_way_out(tmp_path: Path) -> None:
    bad = tmp_path / "checkpoint-0001-000000000001"
    bad.mkdir()
    with pytest.raises(UsageError, match="--fresh"):
        Broker(a_config(tmp_path))
    with pytest.raises(UsageError, match="nowhere"):
        Broker(a_config(tmp_path, resume=str(tmp_path / "nowhere")))
    Broker(a_config(tmp_path, resume="none")).close()


def test_buffer_of_other_size_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With N = 3, two gradients are in the buffer; a mean of four would divide them by four."""

    def pushes(first: int, last: int, dn_buffer: int) -> None:
        options: dict[str, Any] = {"mode": "async", "outer": "fedbuff", "dn_buffer": dn_buffer}
        trained(a_config(tmp_path, **options), range(first, last))

    pushes(0, 2, dn_buffer=3)
    assert "delayed" in load(found(tmp_path)[0]).tensors[0].outer
    pushes(2, 3, dn_buffer=3)  # the third: a momentum step
    pushes(3, 5, dn_buffer=3)
    pushes(5, 5, dn_buffer=4)
    assert "had 3 gradients" in caplog.text
    assert "has 4 now (--dn-buffer)" in caplog.text
    pushes(5, 6, dn_buffer=4)
    collected = load(found(tmp_path)[0]).tensors[0].outer["delayed"]
    alone = gradients(5, mlp().state_dict())
    total = sum(float(t.double().sum()) for t in collected if t is not None)
    assert total == pytest.approx(sum(float(t.double().sum()) for t in alone.values()), rel=1e-4)


@pytest.mark.parametrize(("workers", "left"), [(2, ("y",)), (3, ())])
def test_restart_with_other_workers_forgets_leavers(
    tmp_path: Path, workers: int, left: tuple[str, ...]
) -> None:
    save(tmp_path, replace(a_checkpoint(), config={"workers": 2}), keep=1)
    cut = {"num_fragments": 2, "chunk_elements": 4, "sync_every": 4}
    found = newest_checkpoint(a_config(tmp_path, workers=workers, **cut))
    assert found is not None and found.record.left == left
