"""The broker's tensors: means, maxima, outer steps, the model file, and chunks that never change."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from torch import Tensor

from diloco_broker.config import declaration
from diloco_broker.core.effects import WholePush
from diloco_broker.tensors.aggregate import Gradient, StagedReducer, StreamingMean
from diloco_broker.tensors.blend import Blend
from diloco_broker.tensors.outer.chunked import Nesterov
from diloco_broker.tensors.parameters import Parameters
from diloco_broker.tensors.robust import AGGREGATES
from diloco_protocol.chunks import ChunkSpan, ModelLayout, lay_out
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from kit.chunked_model import a_part, fold, read, wire
from kit.raw_worker import DTYPES

MANIFEST = Manifest(
    (
        TensorEntry("weight", (3, 5), "float32", Kind.TRAINABLE, ("tied",)),
        TensorEntry("mean", (6,), "float32", Kind.BUFFER),
        TensorEntry("bias", (4,), "bfloat16", Kind.TRAINABLE),
        TensorEntry("count", (2,), "int64", Kind.BUFFER),
    )
)
PARAMETERS, BUFFERS, INTEGERS = 0, 1, 2  # the chunks where one chunk holds a whole segment


def a_layout(chunk_elements: int = 4) -> ModelLayout:
    return lay_out(MANIFEST, chunk_elements=chunk_elements)


def some_tensors(outer: Nesterov | None = None, reply: str = "fp32", **options: Any) -> Parameters:
    outer = outer or Nesterov(0.7, 0.9)
    return Parameters(a_layout(64), outer, wire="fp32", reply=reply, **options)


def whole(gradient: Gradient | Blend | None) -> Tensor:
    assert gradient is not None
    return gradient.whole()


def test_step_moves_parameters_with_momentum_and_takes_buffers_over() -> None:
    tensors = some_tensors(Nesterov(0.5, 0.9))
    for index, values in enumerate([torch.zeros(19), torch.zeros(6), torch.tensor([1, 5])]):
        assert tensors.place(0, index, wire(values, values.dtype)) is not None
    for count in range(2):
        fold(tensors, 0, 0, wire(torch.ones(19)), 1.0)
        fold(tensors, 0, 1, wire(torch.full((6,), 3.0 + count)), 1.0)
        for counts in ([4, -9], [3, 4]):  # the largest of each
            fold(tensors, 0, 2, wire(torch.tensor(counts), torch.int64), 1.0)
        done = [tensors.step(0, index, 1.0, count)() for index in range(3)]
    assert [one.index for (one,) in done] == [0, 1, 2]
    chunks = [one.wire for (one,) in done]
    # m = 1, then 1.9; theta = -0.5 (1 + 0.9) - 0.5 (1 + 0.9 * 1.9)
    torch.testing.assert_close(read(chunks[0]), torch.full((19,), -0.95 - 1.355))
    assert read(chunks[1]).tolist() == [4.0] * 6
    assert read(chunks[2], torch.int64).tolist() == [4, 4]


@pytest.mark.parametrize("chunk_elements", [1, 4, 7, 64])
def test_model_file_is_cut_like_the_manifest(chunk_elements: int) -> None:
    file = {
        "tied": torch.randn(3, 5),  # the file may have either name of a tied tensor
        "mean": torch.randn(6, dtype=torch.float64),
        "bias": torch.randn(4).bfloat16(),
        "count": torch.tensor([3, 4], dtype=torch.int32),
    }
    layout = a_layout(chunk_elements)
    tensors = Parameters(layout, Nesterov(0.7, 0.9), wire="bf16", reply="fp32", initial=file)
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


def test_seeding_that_is_not_finite_is_not_stored() -> None:
    tensors = some_tensors()
    assert tensors.place(0, 0, wire(torch.full((19,), float("nan")))) is None


def spans() -> tuple[ChunkSpan, ...]:
    return a_layout(64).fragments[0].spans


def reduced(index: int, parts: Sequence[WholePush], aggregate: str = "mean") -> Tensor:
    return whole(StagedReducer(aggregate, 64).reduced(spans()[index], parts))


def some_parts(
    chunks: Sequence[Tensor], dtype: str = "fp32", **lists: Sequence[float]
) -> list[WholePush]:
    """One part for each chunk; `lists` has its other fields."""
    fields = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    return [
        a_part(wire(chunk, DTYPES[dtype]), wire_dtype=dtype, **field)
        for chunk, field in zip(chunks, fields or [{}] * len(chunks), strict=True)
    ]


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_staged_mean_has_the_bits_of_the_streaming_mean(workers: int, name: str) -> None:
    deltas = [torch.randn(19) for _ in range(workers)]
    weights = (torch.rand(workers) + 0.1).tolist()
    streaming = StreamingMean(a_layout(64).fragments[0], name)
    total = torch.zeros(19)
    for position, (delta, weight) in enumerate(zip(deltas, weights, strict=True)):
        streaming.fold(PARAMETERS, wire(delta, DTYPES[name]), weight)()
        travelled = delta.to(DTYPES[name]).float()
        total = travelled * weight if position == 0 else total.add(travelled, alpha=weight)
    streamed = whole(streaming.take(PARAMETERS, sum(weights)))
    parts = some_parts(deltas, name, weight=weights, scale=[1.0] * workers)
    staged = reduced(PARAMETERS, parts)
    assert torch.equal(staged, streamed)
    assert torch.equal(staged, total / sum(weights))


def test_scale_shrinks_a_contribution_and_not_the_sum_of_weights() -> None:
    chunks = [torch.randn(19) for _ in range(3)]
    weights, scales = [1.0, 2.0, 5.0], [1.0, 0.5, 0.25]
    got = reduced(PARAMETERS, some_parts(chunks, weight=weights, scale=scales))
    wanted = np.average(
        [scale * chunk.numpy() for scale, chunk in zip(scales, chunks, strict=True)],
        axis=0,
        weights=weights,
    )
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-6)


def norms_of(chunks: Sequence[Tensor]) -> list[float]:
    return [float(np.linalg.norm(chunk.numpy())) for chunk in chunks]


@pytest.mark.parametrize("workers", [1, 4, 5])
def test_pushes_are_clipped_to_the_median_norm(workers: int) -> None:
    chunks = [torch.randn(19) * (1 + n) for n in range(workers)]
    chunks[0] *= 100
    norms, weights = norms_of(chunks), [1.0 + n for n in range(workers)]
    factors = np.minimum(1, np.median(norms) / np.array(norms))
    clipped = [f * chunk.numpy() for f, chunk in zip(factors, chunks, strict=True)]
    parts = some_parts(chunks, norm=norms, weight=weights)
    got = reduced(PARAMETERS, parts, "clip-median-norm")
    wanted = np.average(clipped, axis=0, weights=weights)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_push_of_zeros_is_not_clipped() -> None:
    chunks = [torch.zeros(19), torch.ones(19), torch.zeros(19)]
    parts = some_parts(chunks, norm=[0.0, 2.0, 1.0])
    got = reduced(PARAMETERS, parts, "clip-median-norm")
    torch.testing.assert_close(got, torch.full((19,), 0.5 / 3))


def test_clipping_leaves_buffers_and_integers_alone() -> None:
    chunks = [torch.zeros(6), torch.full((6,), 9.0)]
    parts = some_parts(chunks, norm=[1.0, 100.0])
    assert reduced(BUFFERS, parts, "clip-median-norm").tolist() == [4.5] * 6
    counts = [a_part(wire(torch.tensor(c), torch.int64)) for c in ([3, 9], [5, 2], [4, 4])]
    assert reduced(INTEGERS, counts, "clip-median-norm").tolist() == [5, 9]


@pytest.mark.parametrize("index", [PARAMETERS, BUFFERS, INTEGERS])
def test_merging_does_not_change_what_was_sent(index: int) -> None:
    tensors = some_tensors()
    size, dtype = spans()[index].elements, torch.int64 if index == INTEGERS else torch.float32
    tensors.place(0, index, wire(torch.zeros(size), dtype))
    payloads = [wire(torch.randn(size) * 9, dtype) for _ in range(3)]
    copies = [bytes(payload) for payload in payloads]
    tensors.merge(0, index, [[a_part(payload) for payload in payloads]] * 2, 0)()
    assert [bytes(payload) for payload in payloads] == copies


@pytest.fixture
def pipe() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with (
        zmq.Context() as context,
        context.socket(zmq.PUSH) as push,
        context.socket(zmq.PULL) as pull,
    ):
        push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
        pull.rcvtimeo = push.sndtimeo = 5000
        push.linger = 0
        yield push, pull


def test_received_frames_are_merged_long_after_they_came_and_let_go(
    pipe: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    push, pull = pipe
    sizes, dtypes = [19, 6, 2], [torch.float32, torch.float32, torch.int64]
    sent = [
        [(torch.randn(size) * 9).to(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
        for _ in range(3)
    ]
    for chunk in (chunk for chunks in sent for chunk in chunks):
        push.send(bytes(wire(chunk, chunk.dtype)))
    frames = [[pull.recv(copy=False).buffer for _ in sizes] for _ in sent]
    assert all(isinstance(frame, memoryview) for frames_ in frames for frame in frames_)
    for _ in range(500):  # others come and go meanwhile, in memory that is used again
        push.send(bytes(76))
        pull.recv(copy=False)
    push.close()
    pull.close()
    gc.collect()
    tensors, twin = some_tensors(), some_tensors()
    for index, dtype in enumerate(dtypes):
        for one in (tensors, twin):
            one.place(0, index, wire(torch.zeros(sizes[index]), dtype))
        (got,) = tensors.merge(0, index, [[a_part(each[index]) for each in frames]], 0)()
        parts = [a_part(wire(chunks[index], dtype)) for chunks in sent]
        (wanted,) = twin.merge(0, index, [parts], 0)()
        assert bytes(got.wire) == bytes(wanted.wire)
    held = [weakref.ref(frame) for frames_ in frames for frame in frames_]
    del frames
    assert not any(frame() for frame in held), "the frames' memory is free again"


def test_every_aggregate_of_the_configuration_exists() -> None:
    assert tuple(AGGREGATES) == declaration.AGGREGATES


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_inspection_measures_parameters_and_no_buffers_nor_integers(name: str) -> None:
    tensors, values = some_tensors(), torch.randn(19)
    got = tensors.inspect(0, PARAMETERS, wire(values, DTYPES[name]), name)()
    wanted = np.square(values.to(DTYPES[name]).double().numpy()).sum()
    assert got == pytest.approx(wanted, rel=1e-12)
    assert tensors.inspect(0, BUFFERS, wire(torch.ones(6)), name)() == 0.0
    assert tensors.inspect(0, INTEGERS, wire(torch.ones(2), torch.int64), name)() == 0.0
    enormous = wire(torch.full((19,), 3e38))
    assert tensors.inspect(0, PARAMETERS, enormous, "fp32")() == pytest.approx(19 * 9e76, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("index", [PARAMETERS, BUFFERS])
def test_inspection_finds_what_is_not_finite(index: int, bad: float) -> None:
    values = torch.ones(spans()[index].elements)
    values[2] = bad
    assert some_tensors().inspect(0, index, wire(values), "fp32")() is None


def test_single_push_moves_buffers_by_its_share() -> None:
    tensors = some_tensors(share=0.25)
    tensors.place(0, BUFFERS, wire(torch.ones(6)))
    parts = [a_part(wire(torch.full((6,), 9.0)))]
    (done,) = tensors.merge(0, BUFFERS, [parts, [], parts], 0)()
    assert read(done.wire).tolist() == [4.5] * 6  # 1, then 3


@pytest.mark.parametrize("share", [1.0, 0.5])  # asynchronously one worker's is 1 as well
@pytest.mark.parametrize(("is_round", "wanted"), [(True, [4, 4]), (False, [4, 7])])
def test_integers_are_replaced_or_grow(is_round: bool, wanted: list[int], share: float) -> None:
    tensors = some_tensors(is_round=is_round, share=share)
    tensors.place(0, INTEGERS, wire(torch.tensor([1, 7]), torch.int64))
    parts = [a_part(wire(torch.tensor(c), torch.int64)) for c in ([4, -9], [3, 4])]
    (done,) = tensors.merge(0, INTEGERS, [parts], 0)()
    assert read(done.wire, torch.int64).tolist() == wanted


def test_group_that_overflows_is_left_out_and_the_others_are_applied() -> None:
    tensors = some_tensors(Nesterov(1.0, 0.0))
    groups = [[a_part(wire(torch.full((19,), value)))] for value in (-1e38, 3e38, -5e37)]
    for count, wanted in enumerate((-1e38, -1e38, -5e37), start=1):
        tensors.place(0, PARAMETERS, wire(torch.full((19,), -2e38)))
        (done,) = tensors.merge(0, PARAMETERS, groups[:count], 0)()
        assert done.overflow == (count > 1)
        torch.testing.assert_close(read(done.wire), torch.full((19,), wanted))
