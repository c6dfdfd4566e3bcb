"""The placement of a worker's vectors, which changes no bit of a run.

Uses a simulated second device (`kit.other_device`); `gpu/test_cuda` uses a real one.
"""

import copy
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_broker import Broker
from diloco_protocol import Segment, UsageError
from diloco_protocol.dtypes import WIRE_DTYPES, is_quantized
from diloco_worker import DiLoCoWorker
from diloco_worker.model.feedback import Feedback
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.placement import HOST, Placement
from diloco_worker.session.compatibility import cut
from kit.other_device import THERE, OtherDevice
from kit.reference import Plan
from kit.scripted_broker import run_config
from kit.whole_run import an_mlp, batch, make_config, options_of, sgd, strided

CPU, CUDA, SECOND = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))
PLANS = [Plan(4, strided(1)), Plan(6, strided(3), 1, alpha=0.5), Plan(9, strided(3), 2, alpha=None)]


@pytest.fixture
def other_device() -> Iterator[OtherDevice]:
    with OtherDevice() as device:
        yield device


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (([CPU], None, None), Placement(is_pinned=False, base=CPU)),
        (([CPU], False, "cpu"), Placement(is_pinned=False, base=CPU)),
        (([], None, None), Placement(is_pinned=False, base=CPU)),
        (([CPU, CUDA], None, None), Placement(is_pinned=True, base=CPU)),
        (([CUDA], True, "cpu"), Placement(is_pinned=True, base=CPU)),
        (([CUDA], False, None), Placement(is_pinned=False, base=CPU)),
        (([CPU, SECOND, CUDA], None, "cuda"), Placement(is_pinned=True, base=SECOND)),
        (([CUDA], False, "cuda"), Placement(is_pinned=False, base=CUDA)),
    ],
)
def test_placement_follows_the_options(given: tuple[Any, ...], wanted: Placement) -> None:
    assert Placement.of(*given) == wanted


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"pin_memory": True}, "pin_memory is True, but the model is on cpu"),
        ({"keep_global_on": "cuda"}, "keep_global_on is 'cuda', but the model is on cpu"),
    ],
)
def test_impossible_placement_is_refused_without_traces(asked: dict[str, Any], words: str) -> None:
    each = an_mlp(0)
    with Broker(make_config(workers=1)) as broker:
        hook = DiLoCoWorker(each.model, each.optimizer, server=broker.address, options=asked)
        with pytest.raises(UsageError, match=words):
            hook.start()
        again = DiLoCoWorker(each.model, each.optimizer, server=broker.address)
        again.start()
        again.close()


def odd_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.BatchNorm1d(60), nn.Linear(60, 3)).to(dtype)


Deltas = list[tuple[list[bytes], float]]  # the bytes of their chunks, and their length


def deltas(wire: str, model: nn.Module, base_on: torch.device) -> Deltas:
    """Three deltas, each with the residual of the last; the second is dropped and counts in part."""
    tensors = ModelTensors.of_module(model)
    config = run_config(sync_every=4, num_fragments=1, chunk_elements=1000)
    part = cut(tensors.manifest, config, ()).fragments[0]
    feedback = Feedback(part, tensors.room)
    found = []
    for number in range(3):
        base = tensors.capture(part)
        base.vectors[Segment.PARAMETERS].mul_(1.001)  # finer than bf16
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(0.037 * (number + 1) if tensor.is_floating_point() else 2)
        delta = tensors.delta(base.to(base_on), wire)
        assert delta.bad is None
        flat = feedback.joined(delta.wire) if is_quantized(wire) else delta.wire
        chunks = range(part.chunks)
        OtherDevice.to_host, before = 0, OtherDevice.to_host
        found.append(([bytes(flat.chunk(index)) for index in chunks], delta.norm))
        assert not OtherDevice.to_host, "the I/O thread reads nothing from the device"
        OtherDevice.to_host = before
        if number == 1:
            feedback.drop(number, flat, {0, 2})
        else:
            feedback.settle(number, (flat, set(chunks)), {1: {0}})
        at_freeze = flat.taken_from(base.to(base_on))
        values = {n: v.to(THERE) for n, v in at_freeze.by_name().items()}
        model.load_state_dict(values, strict=False)
    return found


# Each wire dtype with one of these.
KINDS = [(torch.float32, HOST), (torch.bfloat16, THERE), (torch.float64, HOST)]


@pytest.mark.parametrize(
    ("wire", "dtype", "base_on"),
    [(wire, *kind) for wire, kind in zip(WIRE_DTYPES, cycle(KINDS), strict=False)],
    ids=str,
)
def test_delta_of_a_model_on_a_device_has_the_bytes_of_one_on_the_host(
    wire: str, dtype: torch.dtype, base_on: torch.device, other_device: OtherDevice
) -> None:
    wanted = deltas(wire, odd_model(dtype), HOST)
    got = deltas(wire, odd_model(dtype).to(THERE), base_on)
    for (ours, our_norm), (theirs, their_norm) in zip(got, wanted, strict=True):
        assert ours == theirs
        assert our_norm == pytest.approx(their_norm, rel=1e-6)


@pytest.mark.parametrize(
    ("wire", "bytes_each"),
    [("fp32", 4), ("bf16", 2), ("int8", 1.01), ("int4", 0.51), ("int4z", 0.51)],
)
def test_only_sent_bytes_are_moved(wire: str, bytes_each: float, other_device: OtherDevice) -> None:
    """Besides, a number for each tensor, and for each chunk with a residual: whether it is finite."""
    torch.manual_seed(0)
    model = nn.Linear(256, 400, bias=False).to(THERE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"sync_every": 1, "wire_dtype": wire, "chunk_elements": 25_600}
    with (
        Broker(make_config(workers=1, **options)) as broker,
        DiLoCoWorker(model, optimizer, server=broker.address) as hook,
    ):
        for _ in range(3):
            OtherDevice.to_host = 0
            model(torch.ones(2, 256).to(THERE)).pow(2).sum().backward()
            optimizer.step()
            assert OtherDevice.to_host == pytest.approx(256 * 400 * bytes_each, rel=0.01)
        assert hook.sync_metrics.pushes == 3 and hook.sync_metrics.last_error is None


@pytest.mark.parametrize(("plan", "wire"), [*zip(PLANS, ("int8", "fp32", "int4z"), strict=True)])
@pytest.mark.parametrize("keep_global_on", ["model", "host"])
def test_run_is_the_same_for_any_placement(
    plan: Plan, wire: str, keep_global_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(device: torch.device) -> dict[str, Tensor]:
        each, config = an_mlp(0), make_config(workers=1, wire_dtype=wire, **options_of(plan))
        model = each.model.to(device)
        optimizer = sgd(model)
        with Broker(config) as broker, DiLoCoWorker(model, optimizer, broker.address) as hook:
            for number in range(2 * plan.sync_every + 2):
                optimizer.zero_grad()
                model(batch(0, number).to(device)).pow(2).mean().backward()
                optimizer.step()
            assert hook.sync_metrics.pushes >= 2 and hook.sync_metrics.last_error is None
        return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}

    wanted = trained(HOST)
    base = HOST if keep_global_on == "host" else THERE
    monkeypatch.setattr(Placement, "of", lambda *_: Placement(base=base))
    with OtherDevice():
        got = trained(THERE)
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_checkpoint_of_a_device_model_is_on_the_host(
    other_device: OtherDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that resumes without the second device can load it, with the same parameters."""
    each = an_mlp(0)
    config = make_config(workers=1, sync_every=2, wire_dtype="int8")
    with Broker(config) as broker:
        with monkeypatch.context() as patch:
            patch.setattr(Placement, "of", lambda *_: Placement(base=THERE))
            hook = DiLoCoWorker(each.model, each.optimizer, broker.address, worker_id="w0")
            with hook:
                for _ in range(3):
                    each.step()
                saved = copy.deepcopy(hook.state_dict())
        resumed = saved["resume"]["fragments"][0]
        for vectors in (resumed["base"], resumed["residual"]):
            assert all(type(each) is Tensor and each.device == HOST for each in vectors.values())
        later = DiLoCoWorker(each.model, each.optimizer, broker.address)
        later.load_state_dict(saved)
        with later:
            each.step()
            assert later.sync_metrics.pushes == 2
