"""Means that a relay makes, beside plain torch: what quantization omits of one is in the next."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diloco_broker.relay.core import Term
from diloco_broker.relay.sums import TensorSums
from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.tensors.codecs import decode_chunk, encode_chunk

SIZE = 700
WEIGHTS = (1.0, 3.0, 0.5)
QUANTIZED = ("int8", "int4", "int4z", "sparse")


def a_span(segment: Segment = Segment.PARAMETERS, index: int = 0) -> ChunkSpan:
    return ChunkSpan(index, segment, 0, SIZE)


def values(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def dyadic(seed: int) -> Tensor:
    """Few significant bits, so that sums of these are exact."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 65, (SIZE,), generator=dice) / 16


def coded(span: ChunkSpan, given: Tensor, dtype: str) -> Any:
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)
    if narrow is not None and span.segment is Segment.PARAMETERS:
        given = given.to(narrow)
    return encode_chunk(span, given, dtype)


def read(span: ChunkSpan, code: Any, dtype: str) -> Tensor:
    return decode_chunk(span, code, dtype).clone().float()


def terms_of(span: ChunkSpan, given: list[Tensor], dtype: str) -> tuple[list[Term], Tensor]:
    """What workers have sent, and the mean of that in fp64."""
    codes = [coded(span, each, dtype) for each in given]
    parts = [(read(span, c, dtype).double(), w) for c, w in zip(codes, WEIGHTS, strict=False)]
    total = sum(weight for _, weight in parts)
    mean = sum((part * weight for part, weight in parts), torch.zeros(SIZE).double()) / total
    return [Term(c, dtype, w) for c, w in zip(codes, WEIGHTS, strict=False)], mean


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", *QUANTIZED])
def test_mean_is_that_of_what_the_workers_sent(dtype: str) -> None:
    span = a_span()
    terms, mean = terms_of(span, [values(seed) for seed in range(3)], dtype)
    found = decode_chunk(span, TensorSums().mean(0, span, terms, "fp32"), "fp32")
    torch.testing.assert_close(found, mean.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_mean_is_rounded_once(dtype: str) -> None:
    span = a_span()
    terms, mean = terms_of(span, [dyadic(seed) for seed in range(2)], "fp32")
    code = TensorSums().mean(0, span, terms, dtype)
    assert torch.equal(read(span, code, dtype), read(span, coded(span, mean.float(), dtype), dtype))


def test_mean_may_have_terms_of_several_dtypes() -> None:
    """Of workers with a wire dtype of their own, and of relays behind this one."""
    span, parts, sum_ = a_span(), [], torch.zeros(SIZE).double()
    for seed, dtype in enumerate(("fp32", "int4z", "bf16", "sparse")):
        code = coded(span, values(seed), dtype)
        parts.append(Term(code, dtype, 1.0 + seed))
        sum_ += (1.0 + seed) * read(span, code, dtype).double()
    found = decode_chunk(span, TensorSums().mean(0, span, parts, "fp32"), "fp32")
    torch.testing.assert_close(found, (sum_ / 10).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "int4z"])
def test_buffers_travel_as_means_in_fp32_between_the_least_and_the_greatest(dtype: str) -> None:
    span = a_span(Segment.BUFFERS)
    given = [values(seed).abs() for seed in range(3)]
    terms, mean = terms_of(span, given, dtype)
    found = decode_chunk(span, TensorSums().mean(0, span, terms, dtype), dtype)
    torch.testing.assert_close(found, mean.float(), rtol=1e-5, atol=1e-6)
    stacked = torch.stack(given)
    assert bool(((found >= stacked.amin(0)) & (found <= stacked.amax(0))).all())


def test_integers_are_the_largest() -> None:
    span = a_span(Segment.INTEGERS)
    given = [torch.arange(SIZE) - 300, 2**60 - torch.arange(SIZE), torch.full((SIZE,), -7)]
    terms = [Term(encode_chunk(span, each, "fp32"), "fp32", 1.0) for each in given]
    found = decode_chunk(span, TensorSums().mean(0, span, terms, "fp32"), "fp32")
    assert torch.equal(found, torch.stack(given).amax(0))
    assert torch.equal(decode_chunk(span, terms[0].payload, "fp32"), given[0])


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_residual_of_a_mean_is_in_later_means(dtype: str) -> None:
    """After any number of rounds what was sent and the sum of means differ by one residual."""
    span, sums = a_span(), TensorSums()
    meant, sent, worst = torch.zeros(SIZE), torch.zeros(SIZE), []
    for number in range(12):
        given = [dyadic(10 * number), dyadic(10 * number + 1)]
        terms = [Term(coded(span, each, "fp32"), "fp32", 1.0) for each in given]
        meant += (given[0] + given[1]) / 2
        sent += read(span, sums.mean(0, span, terms, dtype), dtype)
        worst.append(float((meant - sent).norm()))
    alone = read(span, TensorSums().mean(0, span, terms, dtype), dtype)
    one = float(((given[0] + given[1]) / 2 - alone).norm())
    assert one > 0
    assert worst[-1] < 12 * one  # that of each round by itself would have added up
    if dtype != "sparse":
        assert max(worst) < 3 * one


def test_residual_is_sent_to_the_bit_where_there_is_nothing_new() -> None:
    """`int8` of a mean, then of zeros until nothing is left to send."""
    span, sums = a_span(), TensorSums()
    mean, zeros = dyadic(1), torch.zeros(SIZE)
    sent = torch.zeros(SIZE)
    for given in (mean, *[zeros] * 8):
        terms = [Term(coded(span, given, "fp32"), "fp32", 1.0)] * 2
        sent += read(span, sums.mean(0, span, terms, "int8"), "int8")
    torch.testing.assert_close(sent, mean, rtol=0, atol=1e-6)


def test_each_chunk_has_a_residual_of_its_own() -> None:
    places = [(0, 0), (0, 1), (1, 0)]
    shared, alone = TensorSums(), {place: TensorSums() for place in places}
    for number in range(3):
        for seed, (fragment, index) in enumerate(places):
            span = a_span(index=index)
            terms, _ = terms_of(span, [values(7 * seed + number), values(seed)], "fp32")
            one = shared.mean(fragment, span, terms, "int4")
            other = alone[fragment, index].mean(fragment, span, terms, "int4")
            assert bytes(one) == bytes(other)


def test_residuals_are_forgotten_with_the_model() -> None:
    span, sums = a_span(), TensorSums()
    terms, _ = terms_of(span, [values(1), values(2)], "fp32")
    first = bytes(sums.mean(0, span, terms, "int4"))
    assert bytes(sums.mean(0, span, terms, "int4")) != first
    sums.reset()
    assert bytes(sums.mean(0, span, terms, "int4")) == first


def test_mean_beyond_the_range_gives_the_residual_up_and_stays_finite() -> None:
    span, sums = a_span(), TensorSums()
    huge = values(1).clamp(-3, 3) * 1e38
    for given in (huge, huge, huge, values(2)):
        terms = [Term(coded(span, given, "fp32"), "fp32", 1.0)]
        assert bool(read(span, sums.mean(0, span, terms, "int4"), "int4").isfinite().all())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", *QUANTIZED])
def test_squares_are_those_of_what_was_sent(dtype: str) -> None:
    span = a_span()
    code = coded(span, values(3), dtype)
    squares, fingerprint = TensorSums().inspect(span, code, dtype)
    expected = float(read(span, code, dtype).double().square().sum())
    assert squares == pytest.approx(expected, rel=1e-5)
    assert fingerprint == TensorSums().inspect(span, code, dtype)[1]
    assert fingerprint != TensorSums().inspect(span, coded(span, values(4), dtype), dtype)[1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("segment", [Segment.PARAMETERS, Segment.BUFFERS])
def test_chunk_with_a_value_that_is_not_finite_has_no_squares(segment: Segment, bad: float) -> None:
    span, given = a_span(segment), values(1)
    given[-1] = bad
    assert TensorSums().inspect(span, coded(span, given, "fp32"), "fp32")[0] is None


@pytest.mark.parametrize("dtype", ["fp32", "int4z", "sparse"])
def test_chunk_that_cannot_be_read_has_no_squares(dtype: str) -> None:
    span = a_span()
    assert TensorSums().inspect(span, memoryview(b"xyz"), dtype)[0] is None
