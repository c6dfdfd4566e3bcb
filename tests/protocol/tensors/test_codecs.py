"""Quantized codecs against the same in plain Python, at the edges of fp32, and with hostile bytes."""

import math

import pytest
import torch
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from diloco_broker.tensors.outer.chunked import Nesterov
from diloco_broker.tensors.parameters import Parameters
from diloco_protocol.chunks import ChunkSpan, Segment, lay_out
from diloco_protocol.dtypes import REPLY_DTYPES, SIZES, is_quantized, least_bytes, span_bytes
from diloco_protocol.errors import ProtocolError
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.tensors.codecs import (
    BLOCKS,
    CODECS,
    decode_chunk,
    encode_chunk,
    segment_dtype,
)
from kit.chunked_model import fold
from kit.paths import ROOT
from kit.raw_codecs import decode, encode

QUANTIZED = ["int8", "int4", "int4z"]
TINY, HUGE = 2.0**-149, (2 - 2**-23) * 2.0**127


def span_of(elements: int) -> ChunkSpan:
    return ChunkSpan(0, Segment.PARAMETERS, 0, elements)


def sent(values: torch.Tensor, wire: str) -> bytes:
    return bytes(encode_chunk(span_of(values.numel()), values, wire))


def read(payload: bytes, wire: str, elements: int) -> torch.Tensor:
    return decode_chunk(span_of(elements), bytearray(payload), wire)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("wire", QUANTIZED)
@example([HUGE, -HUGE] * 128)
@example([-HUGE, HUGE * 0.62] * 128)
@given(st.lists(floats | st.sampled_from([TINY, -TINY, HUGE, -HUGE]), min_size=1, max_size=600))
def test_values_of_any_size_have_the_documented_bytes(wire: str, values: list[float]) -> None:
    given_ = torch.tensor(values, dtype=torch.float32)
    payload = sent(given_, wire)
    found = read(payload, wire, len(values))
    assert found.tolist() == decode(payload, wire, len(values)), "decoding is exact"
    assert found.dtype is torch.float32
    assert torch.isfinite(found).all() and (found * given_ >= 0).all()
    if wire != "int4z":  # its scale is a sum, whose order is not specified
        assert payload == encode(values, wire)
    assert least_bytes(span_of(len(values)), wire) <= len(payload)
    assert len(payload) <= span_bytes(span_of(len(values)), wire)


@pytest.mark.parametrize("elements", [1, 128, 255, 256, 257, 70_000])
def test_int4z_reads_as_in_plain_python_but_for_values_between_two_steps(elements: int) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    theirs = torch.tensor(decode(encode(values.tolist(), "int4z"), "int4z", elements))
    found = read(sent(values, "int4z"), "int4z", elements)
    assert torch.isclose(found, theirs, rtol=1e-2, atol=0).float().mean() > 0.99


def test_normal_values_take_the_documented_number_of_bits() -> None:
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    bits = {wire: 8 * len(sent(values, wire)) / values.numel() for wire in QUANTIZED}
    assert (round(bits["int8"], 2), round(bits["int4"], 2)) == (8.06, 4.06)
    assert 2.0 < bits["int4z"] < 2.3
    for wire in QUANTIZED:
        assert 8 * SIZES[wire].element == pytest.approx(bits[wire], abs=0.1)
    random = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0)).mul_(15).floor_() - 7
    assert len(sent(random, "int4z")) <= span_bytes(span_of(1 << 18), "int4z"), "zstd adds some"


def hostile() -> list[tuple[str, bytes]]:
    right = bytes([0x88]) * 128
    scale = b"\x80\x3f"
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(right)
    return [
        ("nothing", scale),
        ("no frame", scale + bytes(range(60))),
        ("fewer codes", scale + zstandard.compress(right[:-1], 1)),
        ("more codes", scale + zstandard.compress(right + b"\x88", 1)),
        ("a gigabyte of codes", scale + zstandard.compress(bytes(1 << 30), 1)),
        ("no size told", scale + unsized),
        ("cut off", scale + zstandard.compress(right, 1)[:-3]),
        ("too long", scale + zstandard.compress(right, 1) + bytes(1000)),
    ]


@pytest.mark.parametrize(
    ("what", "payload"), hostile(), ids=lambda each: each if isinstance(each, str) else ""
)
def test_codes_that_cannot_be_unpacked_are_refused(what: str, payload: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"unpack|cannot be 200 elements"):
        read(payload, "int4z", 200)


@pytest.mark.parametrize("scale", [b"\x80\x7f", b"\xc0\x7f"], ids=["infinity", "nan"])
def test_scale_that_is_not_finite_makes_values_that_are_not(scale: bytes) -> None:
    codes = torch.full((256,), 3, dtype=torch.int8).numpy().tobytes()
    assert not torch.isfinite(read(scale + codes, "int8", 256)).any()


def dump_of(wire: str) -> str:
    """As in the page: only rows that differ from the one before."""
    few, many = [1.0, -2.0, 0.5], [-1.0, *range(2, 65)]
    payload = sent(torch.tensor(many if wire == "sparse" else few), wire)
    lines, former = [f"{wire}: {len(payload)} bytes"], b""
    for start in range(0, len(payload), 16):
        row = payload[start : start + 16]
        if row == former:
            lines += ["  *"] if lines[-1] != "  *" else []
            continue
        former = row
        lines.append(f"  {start:04x}  {row.hex(' ')}")
    return "\n".join(lines)


@pytest.mark.parametrize("wire", [*QUANTIZED, "sparse"])
def test_documented_dumps_equal_the_sent_bytes(wire: str) -> None:
    assert dump_of(wire) in (ROOT / "docs" / "codecs.md").read_text()


def bits(values: torch.Tensor) -> list[int]:
    return [int(each) for each in values.view(torch.int32)]


@pytest.mark.parametrize("wire", list(BLOCKS))
@pytest.mark.parametrize("elements", [1, 255, 256, 700, 1024])
def test_encoder_and_decoder_read_the_same_codes(wire: str, elements: int) -> None:
    torch.manual_seed(elements)
    values = torch.randn(elements)
    values[::3] *= 1e-3  # rounded to 0 from below as well as from above
    values[::5] = -0.0
    encoded = BLOCKS[wire].encode(values.clone())
    payload = bytearray(encoded.payload)
    decoded = decode_chunk(span_of(elements), payload, wire)
    out = torch.full((elements,), torch.nan)
    assert decode_chunk(span_of(elements), payload, wire, out).data_ptr() == out.data_ptr()
    found = encoded.read(values)
    assert found.data_ptr() == values.data_ptr(), "the memory of the encoded values can be used"
    assert bits(found) == bits(decoded) == bits(out)
    assert not [each for each in decoded.tolist() if each == 0 and math.copysign(1, each) < 0]


@pytest.mark.parametrize("wire", list(BLOCKS))
def test_encoding_another_chunk_changes_no_earlier_result(wire: str) -> None:
    first, second = torch.randn(600), torch.randn(600)
    encoded = BLOCKS[wire].encode(first)
    read, payload = encoded.read(), bytes(encoded.payload)
    before = read.clone()
    BLOCKS[wire].encode(second).read()
    assert torch.equal(read, before)
    assert bytes(encoded.payload) == payload


@pytest.mark.parametrize("wire", [name for name in REPLY_DTYPES if not is_quantized(name)])
@pytest.mark.parametrize("segment", Segment)
def test_chunk_is_read_as_it_was_rounded(segment: Segment, wire: str) -> None:
    values = (torch.randn(1000) * 3).to(segment_dtype(segment, wire))
    span = ChunkSpan(0, segment, 0, 1000)
    payload = encode_chunk(span, values, wire)
    assert payload.nbytes == span_bytes(span, wire)
    assert torch.equal(decode_chunk(span, bytearray(payload), wire), values)


def test_every_codec_has_both_halves_of_its_row() -> None:
    assert CODECS.keys() == SIZES.keys()


@pytest.mark.parametrize("aggregate", ["mean", "clip-median-norm"])
def test_undecodable_chunk_is_refused_like_a_non_finite_one(aggregate: str) -> None:
    layout = lay_out(Manifest((TensorEntry("w", (256,), "float32", Kind.TRAINABLE),)))
    broker = Parameters(layout, Nesterov(1.0, 0.0), wire="int4z", reply="fp32", aggregate=aggregate)
    garbage = bytearray(b"\x80\x3f" + bytes(60))
    assert fold(broker, 0, 0, garbage, 1.0) is None
    assert broker.inspect(0, 0, garbage, "int4z")() is None
