"""Contributions that are held as they came, and work by kernels and by torch: the same bits."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import cycle

import pytest
import torch
from torch import Tensor

from diloco_broker.tensors import aggregate
from diloco_broker.tensors.aggregate import Gradient, StreamingMean
from diloco_broker.tensors.outer.chunked import ChunkOuter, DelayedNesterov, Nesterov
from diloco_broker.tensors.parameters import FragmentTensors, Parameters
from diloco_protocol import Kind, Manifest, TensorEntry, lay_out
from diloco_protocol.chunks import ModelLayout
from diloco_protocol.dtypes import REPLY_DTYPES, WIRE_DTYPES
from diloco_protocol.tensors.codecs import encode_chunk, segment_dtype
from kit.chunked_model import fold, read, same, wire
from kit.kernel_paths import by_kernels, by_torch, needs_kernels
from kit.raw_worker import DTYPES

ELEMENTS = (1 << 16) + 77
CHUNKS = 3


def a_layout() -> ModelLayout:
    entry = TensorEntry("w", (CHUNKS * ELEMENTS,), "float32", Kind.TRAINABLE)
    return lay_out(Manifest((entry,)), chunk_elements=ELEMENTS)


def fold_into(
    mean: StreamingMean, index: int, payload: bytearray, weight: float, wire: str | None = None
) -> float | None:
    """Fold a chunk, and add up what is held too long by then, as the loop does."""
    squares = mean.fold(index, payload, weight, wire)()
    while (overdue := mean.overdue()) is not None:
        mean.adding_up(overdue)()
    return squares


def added_up(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean, of whole chunks and one contribution after the other."""
    total = deltas[0].float() * weights[0]
    for delta, weight in zip(deltas[1:], weights[1:], strict=True):
        total.add_(delta.float(), alpha=weight)
    return total / sum(weights)


@pytest.mark.parametrize(
    ("held", "names"),
    [(0, ["fp32"]), (1, ["bf16"]), (4, ["fp16"]), (1, [*DTYPES]), (100, [*DTYPES])],
    ids=str,
)
def test_mean_has_the_same_bits_however_many_contributions_are_held(
    held: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregate, "HELD", held)
    dice = random.Random(held)
    mean = StreamingMean(a_layout().fragments[0], "bf16")
    weights = [1.0, 0.3, 7.0, 1.0]
    comes = [(index, n) for index in range(CHUNKS) for n in range(len(weights))]
    sent = {each: dice.choice(names) for each in comes}
    deltas = {each: torch.randn(ELEMENTS).to(DTYPES[name]) for each, name in sent.items()}
    dice.shuffle(comes)
    order: list[list[int]] = [[] for _ in range(CHUNKS)]
    for index, n in comes:
        delta, name = deltas[index, n], sent[index, n]
        assert fold_into(mean, index, wire(delta, DTYPES[name]), weights[n], name) is not None
        order[index].append(n)
        assert mean.held <= held
    for index in range(CHUNKS):
        gradient = mean.take(index, sum(weights))
        assert isinstance(gradient, Gradient)
        got = gradient.whole()
        in_order = order[index]
        wanted = added_up([deltas[index, n] for n in in_order], [weights[n] for n in in_order])
        assert torch.equal(got, wanted)
        assert mean.take(index, 1.0) is None, "it is empty now"
    assert mean.held == 0


@pytest.mark.parametrize(
    ("reply", "nesterov", "held"),
    [("fp32", True, 0), ("fp32", False, 100), ("bf16", True, 100), ("fp16", False, 0)],
)
def test_rounds_of_long_chunks_are_those_of_torch_sgd_bit_for_bit(
    reply: str, nesterov: bool, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregate, "HELD", held)
    start = torch.randn(CHUNKS * ELEMENTS)
    tensors = Parameters(
        a_layout(),
        Nesterov(0.7, 0.9, nesterov),
        wire="bf16",
        reply=reply,
        initial={"w": start.clone()},
    )
    for index in range(CHUNKS):
        tensors.place(0, index)
    parameter = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=nesterov)
    for count in range(3):
        deltas = [torch.randn(CHUNKS * ELEMENTS).bfloat16() for _ in range(2)]
        for index in range(CHUNKS):
            for delta in deltas:
                part = delta[index * ELEMENTS : (index + 1) * ELEMENTS]
                assert fold(tensors, 0, index, wire(part, torch.bfloat16), 1.0) is not None
        sent = [tensors.step(0, index, 2.0, count)()[0].wire for index in range(CHUNKS)]
        parameter.grad = added_up(deltas, [1.0, 1.0])
        sgd.step()
        got = torch.cat([read(each, DTYPES[reply]) for each in sent])
        assert torch.equal(got, parameter.detach().to(DTYPES[reply]))
        assert torch.equal(torch.cat([*tensors.fragment_tensors(0).chunks]), parameter.detach())


@pytest.mark.parametrize(
    ("reply", "place"), [("fp32", 0), ("bf16", ELEMENTS // 2), ("fp16", ELEMENTS - 1)]
)
def test_overflow_anywhere_leaves_no_trace_of_the_step(reply: str, place: int) -> None:
    tensors = Parameters(
        a_layout(),
        Nesterov(0.7, 0.9),
        wire="fp32",
        reply=reply,
        initial={"w": torch.randn(CHUNKS * ELEMENTS)},
    )
    for index in range(CHUNKS):
        tensors.place(0, index)
    assert fold(tensors, 0, 0, wire(torch.randn(ELEMENTS)), 1.0) is not None
    tensors.step(0, 0, 1.0, 0)()
    now = tensors.fragment_tensors(0)
    before, remembered = now.chunks[0], now.outer["momentum"][0]
    assert remembered is not None
    kept = before.clone(), remembered.clone()
    huge = torch.randn(ELEMENTS)
    huge[place] = 3.4e38
    squares = fold(tensors, 0, 0, wire(huge), 1.0)
    assert squares is not None, "it is finite, and still too large to step with"
    (done,) = tensors.step(0, 0, 1.0, 1)()
    assert done.overflow
    assert torch.equal(read(done.wire, DTYPES[reply]), kept[0].to(DTYPES[reply]))
    now = tensors.fragment_tensors(0)
    assert now.chunks[0] is before and now.outer["momentum"][0] is remembered
    assert torch.equal(before, kept[0]) and torch.equal(remembered, kept[1])


@pytest.mark.parametrize(
    ("place", "bad"), [(0, torch.nan), (ELEMENTS // 2, torch.inf), (-1, -torch.inf)]
)
@pytest.mark.parametrize("name", DTYPES)
def test_bad_value_anywhere_leaves_the_mean_as_it_was(name: str, bad: float, place: int) -> None:
    mean = StreamingMean(a_layout().fragments[0], name)
    good = torch.randn(ELEMENTS).to(DTYPES[name])
    poison = good.clone()
    poison[place] = bad
    assert fold_into(mean, 0, wire(poison, DTYPES[name]), 1.0) is None
    assert mean.take(0, 1.0) is None
    assert fold_into(mean, 0, wire(good, DTYPES[name]), 1.0) is not None
    assert fold_into(mean, 0, wire(poison, DTYPES[name]), 1.0) is None
    assert mean.held == 1
    gradient = mean.take(0, 1.0)
    assert gradient is not None and torch.equal(gradient.whole(), good.float())


@pytest.mark.parametrize(
    ("name", "within", "size"), [("fp32", 1e-5, 1e-6), ("bf16", 0.01, 1.0), ("fp16", 1e-3, 300.0)]
)
def test_adding_a_chunk_returns_its_squared_norm(name: str, within: float, size: float) -> None:
    values = (torch.randn(ELEMENTS) * size).to(DTYPES[name])
    mean = StreamingMean(a_layout().fragments[0], "fp32")
    squares = fold_into(mean, 0, wire(values, DTYPES[name]), 2.0, name)
    assert squares == pytest.approx(float(values.double().square().sum()), rel=within)


# Compiled kernels: the bits of a run whose chunks torch works on.

FEW = 5000
Path = Callable[[], AbstractContextManager[object]]


def two_rounds(
    outer: ChunkOuter, wire: str, reply: str, paths: tuple[Path, Path]
) -> FragmentTensors:
    """The state after two rounds of eight contributions: more than are held as they come."""
    made = torch.Generator().manual_seed(0)
    layout = lay_out(Manifest((TensorEntry("w", (FEW,), "float32", Kind.TRAINABLE),)))
    (span,) = layout.fragments[0].spans
    initial = {"w": torch.randn(FEW, generator=made)}
    tensors = Parameters(layout, outer, wire=wire, reply=reply, initial=initial)
    tensors.place(0, 0)
    for count, path in enumerate(paths):
        for number in range(8):
            delta = torch.randn(FEW, generator=made).mul_(1e-2)
            with by_torch():
                values = delta.to(segment_dtype(span.segment, wire))
                payload = bytearray(encode_chunk(span, values, wire))
            with path():
                assert tensors.fold(0, 0, payload, 1.0 + number)() is not None
                for _, _, work in tensors.overdue():
                    work()
        with path():
            (done,) = tensors.step(0, 0, 36.0, count)()
        assert not done.overflow
    return tensors.fragment_tensors(0)


@needs_kernels
@pytest.mark.parametrize(
    ("wire", "reply"), list(zip(WIRE_DTYPES, cycle(REPLY_DTYPES), strict=False))
)
def test_rounds_have_the_same_bits_by_either_path_and_by_both(wire: str, reply: str) -> None:
    outer = Nesterov(0.7, 0.9)
    wanted = two_rounds(outer, wire, reply, (by_torch, by_torch))
    assert same(two_rounds(outer, wire, reply, (by_kernels, by_kernels)), wanted)
    assert same(two_rounds(outer, wire, reply, (by_torch, by_kernels)), wanted)


@needs_kernels
@pytest.mark.parametrize(
    "outer",
    [
        Nesterov(0.7, 0.9, nesterov=False),
        Nesterov(0.7 * 0.25, 0.0),
        DelayedNesterov(0.7, 0.9, 2, 0.3),
    ],
    ids=lambda each: type(each).__name__,
)
def test_steps_of_each_outer_optimizer_have_the_same_bits(outer: ChunkOuter) -> None:
    ours, theirs = (
        two_rounds(outer, "int4z", "bf16", (path, path)) for path in (by_kernels, by_torch)
    )
    assert same(ours, theirs)
