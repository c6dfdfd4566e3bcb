"""On a real CUDA device: codecs, deltas, runs, side streams and an example. Skipped where there is none.

What needs no device is tested on one that is made up (`worker/model/test_placement`); groups on CUDA are
in `worker/model/test_spread_tensors`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_broker import Broker
from diloco_protocol import Segment, lay_out
from diloco_protocol.dtypes import WIRE_DTYPES, is_quantized
from diloco_protocol.tensors.codecs import decode_chunk, encode_chunk
from diloco_worker import DiLoCoWorker
from diloco_worker.model.feedback import Feedback
from diloco_worker.model.model_tensors import ModelTensors
from kit.examples import losses, two_train
from kit.process_kit import Processes
from kit.reference import Plan
from kit.whole_run import an_mlp, batch, make_config, options_of, sgd, strided

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QUANTIZED = [wire for wire in WIRE_DTYPES if is_quantized(wire)]
# Whose bytes do not depend on the order in which a device adds up.
EXACT = [wire for wire in WIRE_DTYPES if wire != "int4z"]


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 700), nn.BatchNorm1d(700), nn.Linear(700, 30))


@pytest.mark.parametrize("wire", QUANTIZED)
def test_bytes_that_a_device_makes_are_read_alike_on_both(wire: str) -> None:
    part = lay_out(ModelTensors.of_module(a_model()).manifest).fragments[0]
    span = part.spans[0]
    values = torch.randn(span.elements, generator=torch.Generator().manual_seed(1))
    ours, theirs = encode_chunk(span, values.cuda(), wire), encode_chunk(span, values, wire)
    if wire in EXACT:
        assert ours == theirs
    here = decode_chunk(span, ours, wire)
    there = decode_chunk(span, ours, wire, torch.empty(span.elements, device="cuda"))
    assert there.is_cuda and torch.equal(there.cpu(), here)
    usual = decode_chunk(span, theirs, wire)
    assert float((here - values).norm()) == pytest.approx(float((usual - values).norm()), rel=1e-3)


def pushed(model: nn.Module, wire: str) -> tuple[list[bytes], float]:
    """The bytes of a second delta, with what the first has left out, and its length."""
    tensors = ModelTensors.of_module(model)
    part = lay_out(tensors.manifest, chunk_elements=1 << 14).fragments[0]  # several in a launch
    feedback = Feedback(part, tensors.room)
    delta = None
    for number in range(2):
        base = tensors.capture(part)
        dice = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for tensor in model.parameters():
                # Made on the host: devices round other sums in bf16 alike, but not those with a scalar.
                change = torch.randn(tensor.shape, generator=dice).to(tensor.dtype)
                tensor.add_(change.to(tensor.device))
        delta = tensors.delta(base, wire)
        flat = feedback.joined(delta.wire) if is_quantized(wire) else delta.wire
        if not number:
            feedback.settle(number, (flat, range(part.chunks)), {})
    assert delta is not None and delta.bad is None
    return [bytes(flat.chunk(index)) for index in range(part.chunks)], delta.norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wire", EXACT)
def test_delta_of_a_model_on_a_device_has_the_bytes_of_one_on_the_host(
    wire: str, dtype: torch.dtype
) -> None:
    ours, our_norm = pushed(a_model().to(dtype).cuda(), wire)
    theirs, their_norm = pushed(a_model().to(dtype), wire)
    assert ours == theirs
    assert our_norm == pytest.approx(their_norm, rel=1e-5)


def test_what_is_sent_is_all_that_stays_on_the_device_for_a_push_in_many_bits() -> None:
    tensors = ModelTensors.of_module(a_model().cuda())
    part = lay_out(tensors.manifest).fragments[0]
    base = tensors.capture(part)
    before = torch.cuda.memory_allocated()
    wire = tensors.delta(base, "bf16").wire
    assert wire.vectors[Segment.PARAMETERS].is_pinned()
    assert torch.cuda.memory_allocated() == before


def trained(
    plan: Plan, wire: str, stream: AbstractContextManager[Any], **options: Any
) -> dict[str, Tensor]:
    """What a worker on a device comes to, training within `stream`."""
    config = make_config(workers=1, wire_dtype=wire, **options_of(plan))
    with Broker(config) as broker, stream:
        model = an_mlp(0).model.cuda()
        optimizer = sgd(model)
        with DiLoCoWorker(model, optimizer, broker.address, options=options) as hook:
            for number in range(3 * plan.sync_every):
                optimizer.zero_grad()
                model(batch(0, number).cuda()).pow(2).mean().backward()
                optimizer.step()
            assert hook.sync_metrics.pushes >= 3 and hook.sync_metrics.last_error is None
        return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


PLANS = [Plan(4, strided(1)), Plan(6, strided(3), delay=1, alpha=0.5), Plan(9, strided(3), 2, None)]


@pytest.mark.parametrize("own", [{}, {"keep_global_on": "cuda"}, {"pin_memory": False}], ids=str)
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("plan", PLANS, ids=["whole", "alpha", "rebase"])
def test_run_on_a_side_stream_is_that_of_the_usual_one_wherever_vectors_are(
    plan: Plan, wire: str, own: dict[str, Any]
) -> None:
    """Freezing and merging wait for the stream that the script trains on, not for another one."""
    usual = trained(plan, wire, nullcontext())
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    got = trained(plan, wire, torch.cuda.stream(side), **own)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, usual[name])


def test_example_trains_on_the_device(processes: Processes) -> None:
    for output in two_train(processes, "amp_compile.py", "--no-compile"):
        first, *_, last = losses(output)
        assert last < first, output
