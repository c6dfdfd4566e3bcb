"""Values that cannot be averaged: infinities of constant buffers are sent as they are, NaN never."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from typer.testing import CliRunner

from diloco_broker import Broker
from diloco_broker.cli.app import app
from diloco_protocol import Refused, UsageError
from diloco_worker import DiLoCoClient, DiLoCoWorker
from kit.raw_worker import RawWorker
from kit.reference import Trainee, state_of
from kit.whole_run import make_config, run

INF = float("inf")


class Masked(nn.Module):
    """Attention's additive mask, as many models register it, and a frozen parameter with an infinity."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
        self.bound = nn.Parameter(torch.tensor([1.0, INF]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.layer(x) @ torch.softmax(self.mask, -1))
        return normed


def masked(seed: int = 0, bound: float = 1.0) -> Trainee:
    torch.manual_seed(seed)
    model = Masked()
    model.bound.data[0] = bound
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).pow(2).sum().backward()
        optimizer.step()

    return Trainee(model, optimizer, step)


MASK = Masked().mask


@pytest.mark.parametrize("options", [{}, {"mode": "async"}, {"num_fragments": 2}])
def test_causal_mask_is_part_of_the_model(options: dict[str, Any]) -> None:
    """Each worker receives the run's mask, and so does a reader."""
    config = make_config(workers=2, sync_every=4, reply_dtype="bf16", **options)
    workers = [masked(), masked(seed=1, bound=5.0)]
    with Broker(config) as broker:
        final = run(broker, workers, 8).final
    assert torch.equal(final["mask"], MASK)
    for each in workers:
        assert torch.equal(state_of(each.model)["mask"], MASK)
        assert torch.equal(state_of(each.model)["bound"], final["bound"])
    assert final["bound"][1] == INF
    assert all(tensor.isfinite().all() for n, tensor in final.items() if n not in ("mask", "bound"))


def exported(source: str, to: Path) -> None:
    result = CliRunner().invoke(app, ["export", source, "--to", str(to)])
    assert result.exit_code == 0, result.output


def test_constants_are_in_checkpoints_and_in_exports(tmp_path: Path) -> None:
    config = make_config(workers=1, sync_every=2, save_dir=str(tmp_path / "run"), recover_wait=0.1)
    with Broker(config) as broker:
        run(broker, [masked()], 4)
        exported(broker.address, tmp_path / "live.safetensors")
    exported(str(tmp_path / "run"), tmp_path / "saved.safetensors")
    for name in ("live", "saved"):
        assert torch.equal(load_file(tmp_path / f"{name}.safetensors")["mask"], MASK)
    with Broker(config) as again:
        final = run(again, [masked(seed=3)], 2).final
    assert torch.equal(final["mask"], MASK) and final["bound"][1] == INF


def test_model_file_with_nan_is_refused() -> None:
    state = state_of(Masked())
    state["mask"][0, 0] = torch.nan
    with pytest.raises(UsageError, match="NaN in mask"):
        Broker(make_config(workers=1), state)


@pytest.mark.parametrize("name", ["layer.weight", "norm.running_var"])
def test_infinities_of_a_model_file_in_what_is_averaged_are_named(name: str) -> None:
    state = state_of(Masked())
    state[name].view(-1)[1] = INF
    with (
        Broker(make_config(workers=1), state) as broker,
        DiLoCoClient(broker.address, timeout=20) as client,
        pytest.raises(Refused, match=f"{name} has infinities"),
    ):
        client.join(Masked())


def spoilt(model: nn.Module, name: str, value: float) -> nn.Module:
    model.state_dict()[name].view(-1)[1] = value
    return model


BAD: list[tuple[str, float, torch.dtype, str]] = [
    ("layer.weight", torch.nan, torch.float32, "layer.weight holds NaN"),
    ("layer.weight", torch.nan, torch.bfloat16, "layer.weight holds NaN"),
    ("norm.running_var", torch.nan, torch.float32, "norm.running_var holds NaN"),
    ("mask", torch.nan, torch.float32, "mask holds NaN"),
    ("bound", torch.nan, torch.float16, "bound holds NaN"),
    ("layer.bias", -INF, torch.float32, "layer.bias is trained and holds infinities"),
    (
        "norm.running_var",
        INF,
        torch.float32,
        "norm.running_var is a buffer that is averaged, and holds infinities",
    ),
    ("norm.running_var", 1e300, torch.float64, "beyond the range of fp32"),
    ("bound", 1e300, torch.float64, "beyond the range of fp32"),
]


@pytest.mark.parametrize(("name", "value", "dtype", "words"), BAD)
def test_invalid_values_are_named(name: str, value: float, dtype: torch.dtype, words: str) -> None:
    model = masked().model.to(dtype)
    optimizer = SGD(model.parameters(), lr=0.1)
    worker = DiLoCoWorker(model, optimizer, server="tcp://127.0.0.1:1")
    if name == "bound":
        model.get_parameter("bound").data.fill_(1.0)
    spoilt(model, name, value)
    with pytest.raises(UsageError, match=words):
        worker.start()


def test_buffer_that_becomes_infinite_is_reset_and_named(caplog: pytest.LogCaptureFixture) -> None:
    trainee = masked()
    with (
        Broker(make_config(workers=1, sync_every=2)) as broker,
        DiLoCoWorker(trainee.model, trainee.optimizer, server=broker.address) as worker,
    ):
        trainee.step()
        trainee.model.get_submodule("norm").get_buffer("running_mean")[1] = INF
        trainee.step()
        assert "norm.running_mean, a buffer" in str(worker.sync_metrics.last_error)
        assert "norm.running_mean, a buffer" in caplog.text
        for _ in range(2):
            trainee.step()
        assert worker.sync_count == 1, "the buffer is back at the global value"


def test_changed_constant_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """For example a running minimum, which begins at infinity."""
    trainee = masked()
    with (
        Broker(make_config(workers=1, sync_every=1)) as broker,
        DiLoCoWorker(trainee.model, trainee.optimizer, server=broker.address),
    ):
        trainee.step()
        assert "mask has changed" not in caplog.text
        for number in range(3):
            trainee.model.get_buffer("mask").fill_(float(number))
            trainee.step()
    said = [r for r in caplog.records if "mask has changed" in r.message]
    assert len(said) == 1 and said[0].levelno == logging.WARNING


@pytest.mark.parametrize(("value", "is_taken"), [(-INF, True), (torch.nan, False)])
def test_frozen_seeding_push_may_have_infinities_but_not_nan(value: float, is_taken: bool) -> None:
    entry = {"shape": [4], "dtype": "float32"}
    kinds = {"weight": "trainable", "mask": "frozen"}
    entries = [{"name": name, "kind": kind, **entry} for name, kind in kinds.items()]
    with (
        Broker(make_config(workers=1, chunk_elements=4)) as broker,
        RawWorker(broker.address, "a") as worker,
    ):
        worker.join(entries)
        for fragment, values in enumerate((torch.ones(4), torch.full((4,), value))):
            worker.receive("notice")
            about: dict[str, Any] = {"push_id": 40 + fragment, "fragment": fragment}
            push = {"chunks": 1, "wire_dtype": "fp32", "purpose": "seeding", **about}
            worker.send("push", session=worker.session, **push)
            worker.receive("grant")
            payload = bytes(values.view(torch.uint8).numpy())
            worker.send_chunk(40 + fragment, 0, payload, {"fragment": fragment})
            if fragment and not is_taken:
                error = worker.receive("error")
                assert error["code"] == "non_finite" and "in mask;" in error["text"]
                return
            worker.receive("ack")
        worker.send("pull", session=worker.session, fragment=1)
        got = worker.receive("chunk", on=worker.bulk)["payload"]
        assert torch.frombuffer(bytearray(got), dtype=torch.float32).tolist() == [value] * 4
