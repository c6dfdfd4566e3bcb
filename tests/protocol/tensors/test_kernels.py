"""Compiled kernels make what torch makes, bit for bit: at the edges of fp32, at any address and size."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco_broker.tensors.outer.chunked import DELAYED, DelayedNesterov
from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.errors import ProtocolError
from diloco_protocol.kernels import Source
from diloco_protocol.tensors.codecs import (
    BLOCKS,
    add_code,
    checksum,
    decode_chunk,
    encode_sum,
    follow,
    is_finite,
)
from kit.kernel_paths import by_kernels, by_torch, needs_kernels
from kit.raw_worker import DTYPES

pytestmark = needs_kernels

Found = TypeVar("Found")
BY_SCALES = ["int8", "int4", "int4z"]
QUANTIZED = [*BY_SCALES, "sparse", "sparse:512"]
WIRES = ["fp32", "bf16", "fp16", *QUANTIZED]
TINY, HUGE = 2.0**-149, (2 - 2**-23) * 2.0**127
EDGES = [0.0, -0.0, TINY, -TINY, 2.0**-126, 1e-30, 65504.0, 65520.0, -1e19, HUGE, -HUGE]

anything = st.floats(width=32)
normal = st.floats(width=32, allow_nan=False, allow_infinity=False)
finite = st.one_of(normal, st.sampled_from(EDGES))
lengths = st.sampled_from([1, 2, 255, 256, 257, 1023, 1024, 1025, 3001, 4097])


@st.composite
def vectors(draw: st.DrawFn, elements: st.SearchStrategy[float] = finite) -> Tensor:
    """A few values of any kind among normal ones of some magnitude."""
    count, seed = draw(lengths), draw(st.integers(0, 9))
    made = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    made *= draw(st.sampled_from([1e-3, 1.0, 1e-44, 1e-20, 1e20, 0.0]))
    for value in draw(st.lists(elements, max_size=8)):
        made[draw(st.integers(0, count - 1))] = value
    return made


def both(work: Callable[[], Found]) -> tuple[Found, Found]:
    with by_torch():
        theirs = work()
    with by_kernels():
        return work(), theirs


def same(ours: Tensor, theirs: Tensor) -> bool:
    """The same bits; of NaN there are many, and one is as good as another."""
    is_nan = theirs.isnan()
    fits = torch.equal(ours.isnan(), is_nan)
    return fits and torch.equal(ours[~is_nan].view(torch.int32), theirs[~is_nan].view(torch.int32))


def span_of(elements: int) -> ChunkSpan:
    return ChunkSpan(0, Segment.PARAMETERS, 0, elements)


def shifted(payload: bytes, by: int) -> memoryview:
    """At an address that nothing can be said of."""
    return memoryview(bytearray(by) + payload)[by:]


@pytest.mark.parametrize("wire", QUANTIZED)
@given(values=vectors())
def test_encoders_make_the_same_bytes(wire: str, values: Tensor) -> None:
    ours, theirs = both(lambda: BLOCKS[wire].encode(values.clone()))
    assert bytes(ours.payload) == bytes(theirs.payload)
    read, wanted = both(ours.read)
    assert same(read, wanted)


@pytest.mark.parametrize("wire", QUANTIZED)
@given(values=vectors(), other=vectors(anything))
def test_encoders_of_a_sum_make_the_same_bytes(wire: str, values: Tensor, other: Tensor) -> None:
    count = min(values.numel(), other.numel())
    values, other = values[:count].clone(), other[:count].clone()
    ours, theirs = both(lambda: encode_sum(wire, values, other))
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert bytes(ours.payload) == bytes(theirs.payload)


@pytest.mark.parametrize("wire", QUANTIZED)
@given(values=vectors(anything), held=vectors())
def test_held_versions_follow_alike(wire: str, values: Tensor, held: Tensor) -> None:
    count = min(values.numel(), held.numel())
    values, held = values[:count].clone(), held[:count].clone()

    def followed() -> tuple[tuple[Any, int] | None, Tensor]:
        out = torch.empty(count)
        return follow(wire, values, held, out), out

    (ours, out), (theirs, wanted) = both(followed)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert bytes(ours[0]) == bytes(theirs[0])
        assert ours[1] == theirs[1] == checksum(wanted)
        assert same(out, wanted)


@pytest.mark.parametrize("wire", BY_SCALES)
@given(data=st.binary(min_size=8, max_size=64), elements=lengths, by=st.integers(0, 7))
def test_decoders_read_the_same_values(wire: str, data: bytes, elements: int, by: int) -> None:
    blocks = -(-elements // 256)
    size = blocks * (2 + (256 if wire == "int8" else 128))
    payload = (data * (size // len(data) + 1))[:size]
    if wire == "int4z":
        with by_torch():
            numbers = torch.frombuffer(bytearray(payload * 2), dtype=torch.int8)[:elements].float()
            payload = data[:2] + bytes(BLOCKS[wire].encode(numbers).payload)[2:]

    def read() -> Tensor:
        return decode_chunk(span_of(elements), shifted(payload, by), wire)

    ours, theirs = both(read)
    assert same(ours, theirs)


@given(
    values=vectors(),
    spoilt=st.lists(st.tuples(st.integers(0, 115), st.integers(0, 255)), max_size=3),
    by=st.integers(0, 7),
)
def test_sparse_chunks_are_refused_alike_or_read_alike(
    values: Tensor, spoilt: list[tuple[int, int]], by: int
) -> None:
    payload = bytearray(BLOCKS["sparse"].encode(values).payload)
    for at, byte in spoilt:
        payload[at] = byte

    def read() -> Tensor | None:
        try:
            return decode_chunk(span_of(values.numel()), shifted(bytes(payload), by), "sparse")
        except ProtocolError:
            return None

    ours, theirs = both(read)
    assert (ours is None) == (theirs is None)
    assert ours is None or theirs is None or same(ours, theirs)


@pytest.mark.parametrize("wire", QUANTIZED)
@given(values=vectors(), start=vectors(), by=st.integers(0, 3), sign=st.sampled_from([1.0, -1.0]))
def test_codes_are_added_alike(
    wire: str, values: Tensor, start: Tensor, by: int, sign: float
) -> None:
    count = min(values.numel(), start.numel())
    values, start = values[:count].clone(), start[:count].clone()
    with by_torch():
        payload = bytes(BLOCKS[wire].encode(values).payload)

    def added() -> tuple[int | None, Tensor]:
        out = torch.empty(count + by)[by:]
        return add_code(wire, shifted(payload, by), start, out, other=values, sign=sign), out

    (found, out), (theirs, wanted) = both(added)
    assert found == theirs
    assert same(out, wanted)
    if found is not None:
        assert found == checksum(wanted)


def chunk_in(wire: str, values: Tensor, by: int = 0) -> tuple[Source, Tensor]:
    """As kernels read it, and its values in fp32."""
    with by_torch():
        if wire in DTYPES:
            payload = bytes(values.to(DTYPES[wire]).view(torch.uint8).numpy())
            source = Source.of(torch.frombuffer(shifted(payload, by), dtype=DTYPES[wire]))
        else:
            payload = bytes(BLOCKS[wire].encode(values).payload)
            source = BLOCKS[wire].source(shifted(payload, by), values.numel())
        return source, decode_chunk(span_of(values.numel()), bytearray(payload), wire).float()


weights = st.sampled_from([1.0, 0.3, 7.0, 1e-3])


@given(
    chunks=st.lists(st.tuples(st.sampled_from(WIRES), vectors(), weights), min_size=1, max_size=4),
    divisor=st.sampled_from([1.0, 3.0, 0.7]),
    by=st.integers(0, 3),
)
def test_weighted_sums_are_alike(
    chunks: list[tuple[str, Tensor, float]], divisor: float, by: int
) -> None:
    count = min(values.numel() for _, values, _ in chunks)
    made = [(*chunk_in(wire, values[:count], by), weight) for wire, values, weight in chunks]
    total = made[0][1].mul(made[0][2])
    for _, values, weight in made[1:]:
        total.add_(values, alpha=weight)
    out = torch.empty(count)
    with by_kernels() as kernels:
        kernels.add_up([(source, weight) for source, _, weight in made], divisor, out)
    assert same(out, total.div_(divisor))


@pytest.mark.parametrize("wire", QUANTIZED)
@given(values=vectors(), scale=st.sampled_from([None, b"\xff\x7f", b"\x80\xff", b"\x7f\x7f"]))
def test_squares_are_those_of_fp64(wire: str, values: Tensor, scale: bytes | None) -> None:
    source, read = chunk_in(wire, values)
    if scale is not None:
        at = 0 if wire in BY_SCALES else source.data.numel() - 4
        source.data[at : at + 2] = torch.frombuffer(bytearray(scale), dtype=torch.uint8)
    with by_kernels() as kernels:
        found = kernels.squares(source)
    if scale is not None or not is_finite(read):
        assert found is None
    elif found is not None:
        exact = read.double()
        assert math.isclose(found, float(exact.dot(exact)), rel_tol=1e-12)
    else:
        assert read.abs().max() > 1e35


@given(
    theta=vectors(),
    gradient=vectors(anything),
    momentum=st.one_of(st.none(), vectors()),
    settings=st.tuples(st.sampled_from([0.0, 0.9]), st.sampled_from([0.7, 1.0]), st.booleans()),
    wire=st.sampled_from(list(DTYPES)),
    by=st.integers(0, 3),
)
def test_outer_steps_are_the_same(
    theta: Tensor,
    gradient: Tensor,
    momentum: Tensor | None,
    settings: tuple[float, float, bool],
    wire: str,
    by: int,
) -> None:
    count = min(theta.numel(), gradient.numel(), 10**9 if momentum is None else momentum.numel())
    theta, g = theta[:count].clone(), gradient[:count].clone()
    m = None if momentum is None else momentum[:count].clone()
    mu, lr, is_nesterov = settings
    after = g.clone() if m is None else m.mul(mu).add_(g)
    moved = theta.add(g.add(after, alpha=mu) if is_nesterov else after, alpha=-lr)
    out = torch.empty(count + by)[by:], torch.empty(count + by)[by:]
    sent = out[0] if wire == "fp32" else torch.empty(count, dtype=DTYPES[wire])
    with by_kernels() as kernels:
        terms = [(Source.of(g), 1.0)]
        fine = kernels.nesterov(terms, 1.0, theta, m, settings=settings, out=(*out, sent))
    assert same(out[0], moved)
    assert same(out[1], after)
    assert fine == is_finite(moved.to(DTYPES[wire]))
    if fine:
        assert torch.equal(sent.view(torch.uint8), moved.to(DTYPES[wire]).view(torch.uint8))


@given(
    theta=vectors(),
    gradients=st.lists(vectors(anything), min_size=1, max_size=4),
    c=st.sampled_from([0.0, 0.25, 0.5]),
    rates=st.tuples(st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, 0.9])),
    wire=st.sampled_from(list(DTYPES)),
)
def test_delayed_steps_are_the_same(
    theta: Tensor, gradients: list[Tensor], c: float, rates: tuple[float, float], wire: str
) -> None:
    lr, mu = rates
    count = min(each.numel() for each in (theta, *gradients))
    outer = DelayedNesterov(lr, mu, 2, c)
    moved, state = theta[:count].clone(), dict[str, Tensor]()
    for turn, given_ in enumerate(gradients):
        g, dtype = given_[:count].clone(), DTYPES[wire]
        with by_kernels() as kernels:
            terms = [(Source.of(g), 0.5)]
            given = (kernels, moved, (terms, 2.0), state)
            ours, sent = outer.step_by_kernel(*given, count=turn, wire=dtype)
        theirs = outer.step(moved, g.mul(0.5).div_(2.0), state, turn)
        assert same(ours[0], theirs[0])
        assert ours[1].keys() == theirs[1].keys()
        assert all(same(ours[1][name], theirs[1][name]) for name in ours[1])
        buffer = theirs[1].get(DELAYED)
        fine = is_finite(theirs[0].to(dtype)) and (buffer is None or is_finite(buffer))
        assert (sent is not None) == fine
        if sent is not None:
            assert torch.equal(sent.view(torch.uint8), theirs[0].to(dtype).view(torch.uint8))
        moved, state = theirs[0], dict(theirs[1])


def test_delayed_step_at_a_rate_of_0_has_the_same_zeros() -> None:
    outer, theta, g = DelayedNesterov(0.0, 0.9, 2, 0.25), torch.tensor([-0.0]), torch.tensor([1.0])
    state = {DELAYED: torch.tensor([-3.0])}  # so the momentum is negative
    with by_kernels() as kernels:
        terms = [(Source.of(g), 1.0)]
        given = (kernels, theta, (terms, 1.0), state)
        ours, _ = outer.step_by_kernel(*given, count=1, wire=torch.float32)
    theirs, _ = outer.step(theta, g.clone(), state, 1)
    assert same(ours[0], theirs)
