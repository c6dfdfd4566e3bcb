"""`top64`: the 64 largest of 4096, in 84 bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_broker import BrokerConfig
from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.dtypes import TOP_BLOCK, TOP_BYTES, TOP_KEPT, span_bytes
from diloco_protocol.errors import ProtocolError, UsageError
from diloco_protocol.tensors.codecs import ENCODERS, decode_chunk
from kit.paths import ROOT
from kit.raw_codecs import bf16_of, bits_of, fp32, from_bf16

LENGTHS = [1, 63, 64, 65, 4095, 4096, 4097, 3 * 4096, 10_000]


# In plain Python, of exact numbers: what the layout in docs/codecs.md says, and nothing more.

BLOCK, KEPT, SIZE = 4096, 64, 84


def raw_encode(values: Sequence[float]) -> bytes:
    """The bytes of a chunk of which no two magnitudes in a block are the same."""
    payload = b""
    for start in range(0, len(values), BLOCK):
        block = [*values[start : start + BLOCK]]
        block += [0.0] * (BLOCK - len(block))
        largest = sorted(range(BLOCK), key=lambda i: -abs(block[i]))[:KEPT]
        indices = sorted(largest)
        magnitudes = [Fraction(abs(block[i])) for i in indices]
        middle = sum(magnitudes) / KEPT
        groups = [[m for m in magnitudes if m < middle], [m for m in magnitudes if m >= middle]]
        means = [bf16_of(fp32(sum(group) / len(group))) if group else 0.0 for group in groups]
        payload += number(sum((at % 64) << 6 * i for i, at in enumerate(indices)), 48)
        payload += number(sum(1 << (at // 64 + i) for i, at in enumerate(indices)), 16)
        payload += number(sum((block[at] < 0) << i for i, at in enumerate(indices)), 8)
        payload += number(sum((m >= middle) << i for i, m in enumerate(magnitudes)), 8)
        payload += bits_of(means[0]) + bits_of(means[1])
    return payload


def raw_decode(payload: bytes, elements: int) -> list[float]:
    """The values of a chunk; exact."""
    values: list[float] = []
    for start in range(0, len(payload), SIZE):
        row = payload[start : start + SIZE]
        low, high, signs, larger = (
            int.from_bytes(row[a:b], "little") for a, b in ((0, 48), (48, 64), (64, 72), (72, 80))
        )
        means = [from_bf16(each) for each in struct.unpack("<HH", row[80:])]
        block = [0.0] * BLOCK
        places = [place for place in range(128) if high >> place & 1]
        for i, place in enumerate(places):
            value = means[larger >> i & 1]
            block[(place - i) * 64 + (low >> 6 * i) % 64] = -value if signs >> i & 1 else value
        values += block
    return values[:elements]


def number(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def read(payload: bytes, elements: int) -> torch.Tensor:
    span = ChunkSpan(0, Segment.PARAMETERS, 0, elements)
    assert span_bytes(span, "top64") == len(payload)
    return decode_chunk(span, bytearray(payload), "top64")


def sent(values: torch.Tensor) -> bytes:
    return bytes(ENCODERS["top64"](values).payload)


@pytest.mark.parametrize("elements", LENGTHS)
def test_layout_is_that_of_plain_python(elements: int) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements)) * 1e-3
    payload, wanted = sent(values), raw_encode(values.tolist())
    assert len(payload) == -(-elements // TOP_BLOCK) * TOP_BYTES
    for start in range(0, len(payload), TOP_BYTES):
        # Of chunks with zeros behind them it is not told which of these are taken.
        if start + TOP_BYTES <= elements // TOP_BLOCK * TOP_BYTES:
            assert payload[start : start + 80] == wanted[start : start + 80]
    # A mean is a sum, whose order is not specified: it may be rounded to the next bf16.
    both = (torch.tensor(raw_decode(each, elements)) for each in (payload, wanted))
    torch.testing.assert_close(*both, rtol=2**-7, atol=0)
    for each in (payload, wanted):
        assert read(each, elements).tolist() == raw_decode(each, elements)


@pytest.mark.parametrize("elements", LENGTHS)
def test_the_largest_are_kept_and_the_rest_is_none(elements: int) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    found = read(sent(values), elements)
    for block, of in zip(
        torch.split(values, TOP_BLOCK), torch.split(found, TOP_BLOCK), strict=True
    ):
        kept = of.nonzero().view(-1)
        assert len(kept) == min(TOP_KEPT, len(block))
        least = block[kept].abs().min()
        others = torch.ones(len(block), dtype=torch.bool)
        others[kept] = False
        assert (block[others].abs() <= least).all()
        assert (of[kept].sign() == block[kept].sign()).all()
        assert len(set(of[kept].abs().tolist())) <= 2
        assert (block - of).norm() < block.norm()


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(5000),
        -torch.zeros(5000),
        torch.full((4096,), 3e38),
        torch.full((4096,), -1e-45),
        torch.eye(1, 4096).view(-1),
        torch.cat([torch.full((100,), 2.0), torch.zeros(3996)]),
    ],
    ids=["zeros", "negative zeros", "largest", "smallest", "one", "equal ones"],
)
def test_odd_values_are_read_as_something_finite_without_negative_zeros(
    values: torch.Tensor,
) -> None:
    encoded = ENCODERS["top64"](values)
    found = read(bytes(encoded.payload), values.numel())
    assert torch.isfinite(found).all()
    assert not [each for each in found.tolist() if each == 0 and math.copysign(1, each) < 0]
    assert torch.equal(found.view(torch.int32), encoded.read().view(torch.int32))


def spoilt(payload: bytes, at: int, byte: int) -> bytes:
    return payload[:at] + bytes([byte]) + payload[at + 1 :]


def test_indices_that_are_none_are_refused() -> None:
    payload = sent(torch.randn(TOP_BLOCK))
    twice = bytes(48) + b"\xff" * 8 + bytes(8) + payload[64:]  # 64 times index 0
    too_few = payload[:48] + bytes(16) + payload[64:]
    too_many = payload[:48] + b"\xff" * 16 + payload[64:]
    for bad in (twice, too_few, too_many):
        with pytest.raises(ProtocolError, match="ascending order"):
            read(bad, TOP_BLOCK)


@given(st.binary(min_size=TOP_BYTES, max_size=TOP_BYTES), st.integers(0, 83), st.integers(0, 255))
def test_whatever_comes_is_refused_or_64_values_of_two_magnitudes(
    noise: bytes, at: int, byte: int
) -> None:
    good = sent(torch.randn(TOP_BLOCK, generator=torch.Generator().manual_seed(at)))
    for payload in (noise, spoilt(good, at, byte)):
        try:
            found = read(payload, TOP_BLOCK)
        except ProtocolError:
            continue
        assert found.numel() == TOP_BLOCK
        assert (found != 0).sum() <= TOP_KEPT
        assert len({abs(each) for each in found.tolist() if not math.isnan(each)}) <= 3


def test_it_is_for_the_way_up_alone() -> None:
    assert BrokerConfig(wire_dtype="top64").wire_dtype == "top64"
    with pytest.raises(UsageError, match="--reply-dtype is top64"):
        BrokerConfig(reply_dtype="top64")


def test_dump_of_the_page_is_what_is_sent() -> None:
    values = torch.arange(1.0, 65.0)
    values[0] = -1.0
    payload = sent(values)
    rows = [payload[start : start + 16].hex(" ") for start in range(0, len(payload), 16)]
    dump = "\n".join(
        [f"top64: {len(payload)} bytes", *(f"  {16 * i:04x}  {row}" for i, row in enumerate(rows))]
    )
    assert dump in (ROOT / "docs" / "codecs.md").read_text(), dump
