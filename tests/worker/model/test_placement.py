"""Where a worker's vectors lie, and that nothing of a run depends on it.

No second device is here to try: where the global parameters are kept "elsewhere" their vectors are still
on the CPU and only say that they are not. So all is run but the copies themselves; the last test makes
them, where there is a CUDA device.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_broker import Broker
from diloco_protocol import Segment, UsageError
from diloco_protocol.tensors.tensor_pool import mapped
from diloco_worker import DiLoCoWorker
from diloco_worker.model.encoding import encode, encode_there
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.placement import Placement
from diloco_worker.session.compatibility import cut
from kit.reference import Plan, streaming
from kit.scripted_broker import run_config
from kit.whole_run import (
    an_mlp,
    assert_same,
    make_config,
    mlp,
    options_of,
    run,
    strided,
    trainees,
)

CPU, CUDA, SECOND = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))
PLANS = [
    Plan(4, strided(1)),
    Plan(6, strided(3), delay=1, alpha=0.5),
    Plan(9, strided(3), delay=2, alpha=None),
]


class Elsewhere(FlatState):
    """Says that it is on a device of which there is none here."""

    @property
    def device(self) -> torch.device:
        return CUDA

    def to(self, device: torch.device) -> FlatState:
        if device == CUDA:
            return self
        return FlatState(self.layout, _copies(self), self.dtype)


def _copies(state: FlatState) -> dict[Any, Tensor]:
    return {segment: vector.clone() for segment, vector in state.vectors.items()}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[FlatState]:
    """The global parameters are kept elsewhere; what has been brought there."""
    brought: list[FlatState] = []
    stay = FlatState.to

    def to(self: FlatState, device: torch.device) -> FlatState:
        if device != CUDA:
            return stay(self, device)
        brought.append(Elsewhere(self.layout, _copies(self), self.dtype))
        return brought[-1]

    monkeypatch.setattr(FlatState, "to", to)
    monkeypatch.setattr(Placement, "of", lambda *_: Placement(base=CUDA))
    return brought


# The choice.


@pytest.mark.parametrize(
    ("devices", "pin_memory", "keep_global_on", "wanted"),
    [
        ([CPU], None, None, Placement(is_pinned=False, base=CPU)),
        ([CPU], False, "cpu", Placement(is_pinned=False, base=CPU)),
        ([], None, None, Placement(is_pinned=False, base=CPU)),
        ([CPU, CUDA], None, None, Placement(is_pinned=True, base=CPU)),
        ([CUDA], True, "cpu", Placement(is_pinned=True, base=CPU)),
        ([CUDA], False, None, Placement(is_pinned=False, base=CPU)),
        ([CPU, SECOND, CUDA], None, "cuda", Placement(is_pinned=True, base=SECOND)),
        ([CUDA], False, "cuda", Placement(is_pinned=False, base=CUDA)),
    ],
)
def test_place_is_what_was_asked_for(
    devices: list[torch.device],
    pin_memory: bool | None,
    keep_global_on: str | None,
    wanted: Placement,
) -> None:
    assert Placement.of(devices, pin_memory, keep_global_on) == wanted


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"pin_memory": True}, "pin_memory is True, but the model is on cpu"),
        ({"keep_global_on": "cuda"}, "keep_global_on is 'cuda', but the model is on cpu"),
    ],
)
def test_place_that_cannot_be_had_is_refused_and_leaves_nothing_behind(
    asked: dict[str, Any], words: str
) -> None:
    each = an_mlp(0)
    with Broker(make_config(workers=1)) as broker:
        hook = DiLoCoWorker(each.model, each.optimizer, server=broker.address, **asked)
        with pytest.raises(UsageError, match=words):
            hook.start()
        again = DiLoCoWorker(each.model, each.optimizer, server=broker.address)
        again.start()
        again.close()


# The same numbers.


def odd_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).to(dtype)


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_delta_that_is_made_beside_the_model_has_the_same_bits(
    dtype: torch.dtype, wire: str
) -> None:
    model = odd_model(dtype)
    tensors = ModelTensors.of_module(model)
    part = cut(tensors.manifest, run_config(sync_every=4, num_fragments=1), ()).fragments[0]
    base = tensors.capture(part)
    base.vectors[Segment.PARAMETERS].mul_(1.001)  # finer than a model in bf16 holds it
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.37 if tensor.is_floating_point() else 2)
    live = model.state_dict()
    ours, theirs = encode_there(base, live, wire, mapped), encode(part, live, wire, base)
    for segment, vector in theirs.wire.vectors.items():
        assert torch.equal(ours.wire.vectors[segment], vector)
    assert ours.norm == pytest.approx(theirs.norm, rel=1e-6)
    assert ours.bad is theirs.bad is None


@pytest.mark.parametrize("plan", PLANS)
def test_run_is_the_same_wherever_the_global_parameters_are_kept(
    plan: Plan, elsewhere: list[FlatState]
) -> None:
    steps = 2 * plan.sync_every + 2
    with Broker(make_config(workers=2, deterministic=True, **options_of(plan))) as broker:
        got = run(broker, trainees(2), steps)
    assert_same(got, streaming(trainees(2), steps, plan), exact=True)
    assert len(elsewhere) > 2 * len(plan.fragments), "the first versions, and those of rounds"


def test_checkpoint_of_a_worker_is_for_the_host(elsewhere: list[FlatState]) -> None:
    """A script that goes on without the second device can load it, and has the same parameters."""
    each = an_mlp(0)
    with Broker(make_config(workers=1, sync_every=2)) as broker:
        hook = DiLoCoWorker(each.model, each.optimizer, server=broker.address, worker_id="w0")
        with hook:
            for _ in range(3):
                each.step()
            saved = copy.deepcopy(hook.state_dict())
        base = saved["resume"]["fragments"][0]["base"]
        newest = elsewhere[-1]
        assert elsewhere and all(
            torch.equal(base[segment.value], vector) for segment, vector in newest.vectors.items()
        )
        later = DiLoCoWorker(each.model, each.optimizer, server=broker.address)
        later.load_state_dict(saved)
        with later:
            each.step()
            assert later.sync_metrics.rounds == 2


# What the I/O thread holds.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("own", [{"keep_global_on": "cuda"}, {"pin_memory": False}])
def test_run_on_a_cuda_device_is_that_of_the_default_placement(own: dict[str, Any]) -> None:
    def trained(**options: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = mlp().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(1)).cuda()
        with (
            Broker(make_config(workers=1, sync_every=3)) as broker,
            DiLoCoWorker(model, optimizer, server=broker.address, **options) as hook,
        ):
            for batch in data:
                optimizer.zero_grad()
                model(batch).pow(2).mean().backward()
                optimizer.step()
            assert hook.sync_metrics.last_error is None
            base = hook._driver._fragments[0].base if hook._driver else None
            assert base is not None
            assert base.device.type == options.get("keep_global_on", "cpu")
        return {name: tensor.cpu() for name, tensor in model.state_dict().items()}

    usual = trained()
    for name, tensor in trained(**own).items():
        torch.testing.assert_close(tensor, usual[name])
