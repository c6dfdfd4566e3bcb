"""A run whose chunks are worked on by compiled kernels has the bits of one that torch works on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from diloco_broker.tensors.outer.chunked import ChunkOuter, DelayedNesterov, Nesterov, Sgd
from diloco_broker.tensors.parameters import FragmentTensors, Parameters
from diloco_protocol import Kind, Manifest, TensorEntry, lay_out
from diloco_protocol.dtypes import REPLY_DTYPES, WIRE_DTYPES
from diloco_protocol.tensors.codecs import encode_chunk, segment_dtype
from kit.kernel_paths import by_kernels, by_torch, needs_kernels

pytestmark = needs_kernels
ELEMENTS = 5000
Path = Callable[[], AbstractContextManager[object]]


def two_rounds(
    outer: ChunkOuter, wire: str, reply: str, paths: tuple[Path, Path]
) -> FragmentTensors:
    """The state after two rounds of eight contributions: more than are held as they come."""
    made = torch.Generator().manual_seed(0)
    layout = lay_out(Manifest((TensorEntry("w", (ELEMENTS,), "float32", Kind.TRAINABLE),)))
    (span,) = layout.fragments[0].spans
    initial = {"w": torch.randn(ELEMENTS, generator=made)}
    tensors = Parameters(layout, outer, wire=wire, reply=reply, initial=initial)
    tensors.place(0, 0)
    for count, path in enumerate(paths):
        for number in range(8):
            delta = torch.randn(ELEMENTS, generator=made).mul_(1e-2)
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


def same(one: FragmentTensors, other: FragmentTensors) -> bool:
    def all_of(kept: FragmentTensors) -> list[Tensor | None]:
        return [*kept.chunks, *(each for name in sorted(kept.outer) for each in kept.outer[name])]

    pairs = zip(all_of(one), all_of(other), strict=True)
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("reply", REPLY_DTYPES)
@pytest.mark.parametrize("wire", WIRE_DTYPES)
def test_rounds_have_the_same_bits_by_either_path_and_by_both(wire: str, reply: str) -> None:
    outer = Nesterov(0.7, 0.9)
    wanted = two_rounds(outer, wire, reply, (by_torch, by_torch))
    assert same(two_rounds(outer, wire, reply, (by_kernels, by_kernels)), wanted)
    assert same(two_rounds(outer, wire, reply, (by_torch, by_kernels)), wanted)


@pytest.mark.parametrize(
    "outer",
    [Nesterov(0.7, 0.9, nesterov=False), Sgd(0.7, 0.25), DelayedNesterov(0.7, 0.9, 2, 0.3)],
    ids=lambda each: type(each).__name__,
)
def test_steps_of_each_outer_optimizer_have_the_same_bits(outer: ChunkOuter) -> None:
    ours, theirs = (
        two_rounds(outer, "int4z", "bf16", (path, path)) for path in (by_kernels, by_torch)
    )
    assert same(ours, theirs)
