"""The broker's tensors: means, maxima, outer steps, the model file, and chunks that never change."""

from __future__ import annotations

import pytest
import torch
from raw_worker import DTYPES
from torch import Tensor

from diloco_broker.outer import Nesterov
from diloco_broker.parameters import Parameters
from diloco_broker.reduce import StreamingMean
from diloco_protocol.chunks import ModelLayout, lay_out
from diloco_protocol.codecs import as_bytes
from diloco_protocol.manifest import Kind, Manifest, TensorEntry

MANIFEST = Manifest(
    (
        TensorEntry("weight", (3, 5), "float32", Kind.TRAINABLE, ("tied",)),
        TensorEntry("mean", (6,), "float32", Kind.BUFFER),
        TensorEntry("bias", (4,), "bfloat16", Kind.TRAINABLE),
        TensorEntry("count", (2,), "int64", Kind.BUFFER),
    )
)


def a_layout(chunk_elements: int = 4) -> ModelLayout:
    return lay_out(MANIFEST, chunk_elements=chunk_elements)


def wire(values: Tensor, dtype: torch.dtype = torch.float32) -> bytearray:
    """What arrives: bytes of its own, as a received frame has."""
    return bytearray(as_bytes(values.to(dtype)))


def read(chunk: memoryview, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.frombuffer(bytearray(chunk), dtype=dtype)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_mean_is_weighted_by_what_reached_the_chunk(name: str) -> None:
    mean = StreamingMean(a_layout().fragments[0], DTYPES[name])
    for _round in range(2):  # the accumulator is used again
        deltas, weights = [torch.randn(4) for _ in range(3)], [1.0, 0.25, 7.0]
        for delta, weight in zip(deltas, weights, strict=True):
            assert mean.fold(1, wire(delta, DTYPES[name]), weight)
        travelled = [delta.to(DTYPES[name]).double() for delta in deltas]
        wanted = sum(w * d for w, d in zip(weights, travelled, strict=True)) / sum(weights)
        got = mean.take(1, sum(weights))
        assert got is not None
        assert isinstance(wanted, Tensor)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)
    assert mean.take(1, 1.0) is None, "it is empty now"


def test_integers_take_the_largest_value_whatever_the_order() -> None:
    layout = a_layout().fragments[0]
    index = next(span.index for span in layout.spans if span.segment.value == "integers")
    mean = StreamingMean(layout, torch.bfloat16)
    for values in ([3, -9], [7, -11], [5, -10]):
        assert mean.fold(index, wire(torch.tensor(values), torch.int64), 2.0)
    got = mean.take(index, 6.0)
    assert got is not None
    assert got.tolist() == [7, -9]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_chunk_that_is_not_finite_leaves_the_accumulator_as_it_was(bad: float, name: str) -> None:
    mean = StreamingMean(a_layout().fragments[0], DTYPES[name])
    poison = torch.tensor([0.0, bad, 0.0, 0.0])
    assert not mean.fold(0, wire(poison, DTYPES[name]), 1.0)
    assert mean.fold(0, wire(torch.ones(4), DTYPES[name]), 1.0)
    assert not mean.fold(0, wire(poison, DTYPES[name]), 1.0)
    got = mean.take(0, 1.0)
    assert got is not None
    assert got.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.5, True), (0.9, False), (0.9, True)]
)
def test_outer_step_is_torch_s_sgd_bit_for_bit(momentum: float, nesterov: bool) -> None:
    theta = torch.randn(1000)
    parameter = torch.nn.Parameter(theta.clone())
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=momentum, nesterov=nesterov)
    outer = Nesterov(0.7, momentum, nesterov)
    buffer: Tensor | None = None
    for _ in range(5):
        gradient = torch.randn(1000)
        parameter.grad = gradient.clone()
        reference.step()
        before = theta.clone()
        stepped, buffer = outer.step(theta, gradient, buffer)
        assert torch.equal(theta, before), "the old parameters must not change"
        assert torch.equal(stepped, parameter)
        theta = stepped


def test_step_moves_parameters_with_momentum_and_buffers_without() -> None:
    tensors = Parameters(a_layout(64), Nesterov(0.5, 0.9), "fp32", "fp32")
    for index, values in enumerate([torch.zeros(19), torch.zeros(6), torch.tensor([1, 5])]):
        assert tensors.place(0, index, wire(values, values.dtype)) is not None
    for _ in range(2):
        tensors.fold(0, 0, wire(torch.ones(19)), 1.0)
        tensors.fold(0, 1, wire(torch.ones(6)), 1.0)
        tensors.fold(0, 2, wire(torch.tensor([4, 4]), torch.int64), 1.0)
        chunks = [tensors.step(0, index, 1.0)[0] for index in range(3)]
    # m = 1, then 1.9; theta = -0.5 (1 + 0.9) - 0.5 (1 + 0.9 * 1.9)
    torch.testing.assert_close(read(chunks[0]), torch.full((19,), -0.95 - 1.355))
    assert read(chunks[1]).tolist() == [-2.0] * 6
    assert read(chunks[2], torch.int64).tolist() == [4, 4]


def test_chunk_that_was_handed_out_never_changes() -> None:
    tensors = Parameters(a_layout(64), Nesterov(0.7, 0.9), "fp32", "fp32")
    first = tensors.place(0, 0, wire(torch.zeros(19)))
    assert first is not None
    handed_out = [first]
    for _ in range(5):
        tensors.fold(0, 0, wire(torch.randn(19)), 1.0)
        handed_out.append(tensors.step(0, 0, 1.0)[0])
        copies = [bytes(chunk) for chunk in handed_out]
        tensors.fold(0, 0, wire(torch.randn(19)), 1.0)
        tensors.step(0, 0, 1.0)
        assert [bytes(chunk) for chunk in handed_out] == copies


def test_reply_is_the_master_itself_when_no_conversion_is_needed() -> None:
    tensors = Parameters(a_layout(64), Nesterov(0.7, 0.9), "fp32", "fp32")
    first = tensors.place(0, 0, wire(torch.zeros(19)))
    again, _ = tensors.step(0, 0, 0.0)  # nobody delivered: the same chunk, not a copy
    address = [torch.frombuffer(chunk, dtype=torch.float32).data_ptr() for chunk in (first, again)]
    assert address[0] == address[1]


def test_mean_that_overflows_leaves_parameters_and_momentum_as_they_were() -> None:
    tensors = Parameters(a_layout(64), Nesterov(1.0, 0.9), "fp32", "fp32")
    tensors.place(0, 0, wire(torch.zeros(19)))
    for _ in range(2):
        tensors.fold(0, 0, wire(torch.full((19,), 3e38)), 1.0)
    chunk, overflow = tensors.step(0, 0, 2.0)
    assert overflow
    assert read(chunk).tolist() == [0.0] * 19
    tensors.fold(0, 0, wire(torch.ones(19)), 1.0)
    chunk, overflow = tensors.step(0, 0, 1.0)
    assert not overflow
    torch.testing.assert_close(read(chunk), torch.full((19,), -1.9))


@pytest.mark.parametrize("reply", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("index", [0, 1])  # parameters, buffers
def test_finite_push_that_would_make_parameters_infinite_leaves_no_trace(
    reply: str, index: int
) -> None:
    enormous = 3e38 if reply != "fp16" else 1e5
    tensors = Parameters(a_layout(64), Nesterov(2.0, 0.9), "fp32", reply)
    size = a_layout(64).fragments[0].spans[index].elements
    tensors.place(0, index, wire(torch.full((size,), -enormous / 2)))
    tensors.fold(0, index, wire(torch.full((size,), enormous)), 1.0)
    chunk, overflow = tensors.step(0, index, 1.0)
    dtype = DTYPES[reply] if index == 0 else torch.float32
    if reply != "fp16" or index == 0:
        assert overflow
        assert torch.equal(read(chunk, dtype), torch.full((size,), -enormous / 2).to(dtype))
    tensors.fold(0, index, wire(torch.zeros(size)), 1.0)
    assert not tensors.step(0, index, 1.0)[1]


@pytest.mark.parametrize("chunk_elements", [1, 4, 7, 64])
def test_model_file_is_cut_like_the_manifest(chunk_elements: int) -> None:
    file = {
        "tied": torch.randn(3, 5),  # the file may have either name of a tied tensor
        "mean": torch.randn(6, dtype=torch.float64),
        "bias": torch.randn(4).bfloat16(),
        "count": torch.tensor([3, 4], dtype=torch.int32),
    }
    layout = a_layout(chunk_elements)
    tensors = Parameters(layout, Nesterov(0.7, 0.9), "bf16", "fp32", file)
    parts: dict[str, list[Tensor]] = {"parameters": [], "buffers": [], "integers": []}
    for span in layout.fragments[0].spans:
        dtype = torch.int64 if span.segment.value == "integers" else torch.float32
        chunk = tensors.place(0, span.index)
        assert chunk is not None
        parts[span.segment.value].append(read(chunk, dtype))
    flat = {segment: torch.cat(chunks) for segment, chunks in parts.items()}
    assert torch.equal(
        flat["parameters"], torch.cat([file["tied"].reshape(-1), file["bias"].float()])
    )
    assert torch.equal(flat["buffers"], file["mean"].float())
    assert flat["integers"].tolist() == [3, 4]


def test_donation_that_is_not_finite_is_not_stored() -> None:
    tensors = Parameters(a_layout(64), Nesterov(0.7, 0.9), "fp32", "fp32")
    assert tensors.place(0, 0, wire(torch.full((19,), float("nan")))) is None
