"""The residual of a fragment: the deltas sum up to counted values and residual, exactly."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco_protocol import Segment
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.tensors.codecs import decode_chunk
from diloco_worker.model.feedback import Feedback, InFewBits
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.spread.shares import share_of
from diloco_worker.session.compatibility import cut
from kit.scripted_broker import run_config

ELEMENTS, CHUNK = 700, 300  # of a chunk a block and a part of one
EVERY = range(3)  # chunks of parameters


def layout() -> FragmentLayout:
    model = torch.nn.Sequential(torch.nn.Linear(ELEMENTS, 1, bias=False), torch.nn.BatchNorm1d(1))
    manifest = ModelTensors.of_module(model).manifest
    return cut(manifest, run_config(chunk_elements=CHUNK), ()).fragments[0]


def room(elements: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(elements, dtype=dtype)


def dyadic(part: FragmentLayout, dice: torch.Generator, wire: str) -> FlatState:
    """Few significant bits, none of them far from 1: each sum and difference is exact in fp32."""
    vectors = {
        segment: torch.randint(-64, 65, (length,), generator=dice).float() / 16
        for segment, length in part.lengths.items()
        if length
    }
    vectors[Segment.INTEGERS] = torch.ones(1, dtype=torch.int64)
    return FlatState(part, vectors, wire)


def read(delta: InFewBits, index: int) -> Tensor:
    span = delta.layout.spans[index]
    return decode_chunk(span, delta.chunk(index), delta.dtype)


@pytest.mark.parametrize("wire", ["int8", "int4", "int4z", "sparse"])
@pytest.mark.parametrize("seed", range(4))
def test_deltas_equal_counted_values_plus_residual(wire: str, seed: int) -> None:
    """For pushes that count, completely or in part, or are dropped, with merges repeated."""
    part, dice = layout(), torch.Generator().manual_seed(seed)
    choice = random.Random(seed)
    feedback = Feedback(part, room)
    spans = list(feedback.spans)
    assert len(spans) == 3
    meant = {span.index: torch.zeros(span.elements) for span in spans}
    counted = {span.index: torch.zeros(span.elements) for span in spans}
    dropped: dict[int, tuple[InFewBits, set[int]]] = {}

    def counts(delta: InFewBits, index: int) -> None:
        span = part.spans[index]
        meant[index] += delta.vectors[span.segment][span.start : span.stop]
        counted[index] += read(delta, index)

    for push in range(30):
        delta = feedback.joined(dyadic(part, dice, wire))
        fate = choice.choice(["counts", "is dropped", "counts in part", "counts twice"])
        known = {}
        some = {index for index in EVERY if choice.random() < 0.5}
        if fate == "is dropped":
            feedback.drop(push, delta, some)
            feedback.drop(push, delta, some)
            dropped[push] = delta, some
            continue
        # In part: an earlier push contributed the other chunks.
        own = some if fate == "counts in part" else EVERY
        for index in own:
            counts(delta, index)
        if dropped:
            last, (before, may_count) = dropped.popitem()
            known[last] = {index for index in may_count if choice.random() < 0.5}
            for index in known[last]:
                counts(before, index)
        landing = object()
        feedback.settle(landing, (delta, own), known)
        if fate == "counts twice":
            feedback.settle(landing, (delta, own), known)
        for span in spans:
            left = feedback.chunks.get(span.index, torch.zeros(span.elements))
            assert torch.equal(meant[span.index], counted[span.index] + left)
    assert any(bool(left.any()) for left in feedback.chunks.values())


@pytest.mark.parametrize("wire", ["int4", "sparse:32"])
def test_residual_decays_once_when_its_push_counts_at_once_or_belatedly(wire: str) -> None:
    """A push that did not count leaves the residual as it is. All values are exact."""
    part, found = layout(), []
    for is_late in (False, True):
        feedback, dice = Feedback(part, room, 0.5), torch.Generator().manual_seed(0)
        for push in range(2):
            delta = feedback.joined(dyadic(part, dice, wire))
            before = {index: each.clone() for index, each in feedback.chunks.items()}
            if is_late and push:
                feedback.drop(push, delta, EVERY)
                assert feedback.chunks.keys() == before.keys()
                assert all(torch.equal(feedback.chunks[at], before[at]) for at in before)
                feedback.settle(object(), None, {push: EVERY})
            else:
                feedback.settle(object(), (delta, EVERY), {})
        for span in feedback.spans:
            values = delta.vectors[span.segment][span.start : span.stop]
            a = before[span.index] + values
            assert torch.equal(feedback.chunks[span.index], 0.5 * (a - read(delta, span.index)))
        found.append(feedback.chunks)
    assert all(torch.equal(found[0][index], found[1][index]) for index in EVERY)


def test_settling_interrupted_between_chunks_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    part, left_out = layout(), InFewBits.left_out
    breaks_at: list[bool] = []  # for the next chunks, the last one first

    def breaks(delta: InFewBits, *arguments: Any) -> Tensor:
        if breaks_at and breaks_at.pop():
            raise KeyboardInterrupt
        return left_out(delta, *arguments)

    monkeypatch.setattr(InFewBits, "left_out", breaks)
    ends = []
    for is_broken_off in (False, True):
        feedback, dice = Feedback(part, room), torch.Generator().manual_seed(0)
        for _ in range(3):
            delta, landing = feedback.joined(dyadic(part, dice, "int4")), object()
            if is_broken_off:
                breaks_at += [True, False]
                with pytest.raises(KeyboardInterrupt):
                    feedback.settle(landing, (delta, EVERY), {})
            feedback.settle(landing, (delta, EVERY), {})
        ends.append(feedback.chunks)
    for index, values in ends[0].items():
        assert torch.equal(values, ends[1][index])


@pytest.mark.parametrize("wire", ["int8", "int4z"])
def test_chunks_encoded_ahead_have_the_same_bytes_and_residual(wire: str) -> None:
    part, made = layout(), []
    for threads in (1, 3):
        feedback, dice = Feedback(part, room), torch.Generator().manual_seed(0)
        sent = []
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(3):
                delta = feedback.joined(dyadic(part, dice, wire))
                if threads > 1:
                    delta.encode_ahead(pool)
                sent += [bytes(delta.chunk(index)) for index in (2, 0)]  # 1 is never sent
                feedback.settle(object(), (delta, EVERY), {})
        made.append((sent, {index: each.tolist() for index, each in feedback.chunks.items()}))
    assert made[0] == made[1]


@pytest.mark.parametrize("how", ["push over", "forked", "closing"])
def test_chunks_not_encoded_ahead_are_encoded_on_demand(how: str) -> None:
    part = layout()
    deltas = [
        Feedback(part, room).joined(dyadic(part, torch.Generator().manual_seed(0), "int4"))
        for _ in range(2)
    ]
    begun, go_on = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(begun.set)
        pool.submit(go_on.wait)
        begun.wait()
        deltas[0].encode_ahead(pool)
        if how == "closing":
            pool.shutdown(wait=False, cancel_futures=True)
        else:
            deltas[0].encode_here(in_child=how == "forked")
        sent = [[bytes(each.chunk(span.index)) for span in part.spans] for each in deltas]
        go_on.set()
    assert sent[0] == sent[1]


def test_residual_is_dropped_where_the_sum_overflows_fp32() -> None:
    part = layout()
    feedback = Feedback(part, room)
    length = part.lengths[Segment.PARAMETERS]
    huge = FlatState(part, {Segment.PARAMETERS: torch.full((length,), 3e38)}, "int4")
    rest = FlatState(part, {Segment.PARAMETERS: torch.full((length,), 2e38)})
    feedback.restore(rest, {})
    delta = feedback.joined(huge)
    assert bool(torch.isfinite(read(delta, 0)).all())
    feedback.settle(object(), (delta, EVERY), {})
    assert all(bool(torch.isfinite(each).all()) for each in feedback.chunks.values())


def test_process_without_chunks_sends_nothing_and_has_no_residual() -> None:
    whole = layout()
    share, _ = share_of(whole, [1] * whole.chunks, rank=0)
    feedback = Feedback(share, room)
    delta = feedback.joined(FlatState(share, {}, "int8"))
    feedback.settle(object(), (delta, ()), {})
    assert not feedback.chunks and not feedback.flat({}).vectors
