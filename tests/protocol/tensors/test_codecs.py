"""How each codec writes and reads a chunk, and how the broker uses it."""

from __future__ import annotations

import pytest
import torch

from diloco_broker.tensors.outer.chunked import Nesterov
from diloco_broker.tensors.parameters import Parameters
from diloco_protocol.chunks import ChunkSpan, Segment, lay_out
from diloco_protocol.dtypes import REPLY_DTYPES, SIZES, in_few_bits, least_bytes, span_bytes
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.tensors.codecs import (
    CODECS,
    as_bytes,
    decode_chunk,
    encode_chunk,
    is_finite,
    segment_dtype,
)
from diloco_worker.model.encoding import encode
from diloco_worker.model.flat_state import FlatState
from kit import raw_codecs
from kit.chunked_model import fold


@pytest.mark.parametrize("wire", [name for name in REPLY_DTYPES if not in_few_bits(name)])
@pytest.mark.parametrize("segment", Segment)
def test_chunk_is_read_as_it_was_rounded_and_takes_the_bytes_that_it_should(
    segment: Segment, wire: str
) -> None:
    values = (torch.randn(1000) * 3).to(segment_dtype(segment, wire))
    span = ChunkSpan(0, segment, 0, 1000)
    payload = encode_chunk(span, values, wire)
    assert payload.nbytes == span_bytes(span, wire)
    assert torch.equal(decode_chunk(span, bytearray(payload), wire), values)


def test_every_codec_has_both_halves_of_its_row() -> None:
    assert CODECS.keys() == SIZES.keys()


@pytest.mark.parametrize("wire", ["int8", "int4", "int4z"])
def test_model_moves_by_what_a_delta_of_few_bits_reads_as(wire: str) -> None:
    """Each chunk has blocks of its own: here one of 300 elements and one of 100."""
    entries = (TensorEntry("w", (400,), "float32", Kind.TRAINABLE),)
    layout = lay_out(Manifest(entries), chunk_elements=300)
    part = layout.fragments[0]
    model, delta = torch.randn(400), torch.randn(400)
    sent = encode(part, {"w": delta}, wire).wire
    broker = Parameters(layout, Nesterov(1.0, 0.0), wire=wire, reply="fp32")
    arrived = FlatState.empty(part)
    expected = torch.empty(400)
    for span in part.spans:
        chunk = model[span.start : span.stop].clone()
        assert broker.place(0, span.index, bytearray(as_bytes(chunk))) is not None
        payload = bytearray(sent.chunk(span.index))
        assert least_bytes(span, wire) <= len(payload) <= span_bytes(span, wire)
        read = torch.tensor(raw_codecs.decode(bytes(payload), wire, span.elements))
        expected[span.start : span.stop] = chunk - read
        assert fold(broker, 0, span.index, payload, 1.0) == pytest.approx(float(read.dot(read)))
        (done,) = broker.step(0, span.index, 1.0, 0)()
        arrived.store(span.index, memoryview(bytearray(done.wire)), "fp32")
    assert torch.equal(arrived.by_name()["w"], expected)


@pytest.mark.parametrize("aggregate", ["mean", "clip-median-norm"])
def test_chunk_that_cannot_be_read_is_refused_as_one_that_is_not_finite(aggregate: str) -> None:
    layout = lay_out(Manifest((TensorEntry("w", (256,), "float32", Kind.TRAINABLE),)))
    broker = Parameters(layout, Nesterov(1.0, 0.0), wire="int4z", reply="fp32", aggregate=aggregate)
    garbage = bytearray(b"\x80\x3f" + bytes(60))
    assert fold(broker, 0, 0, garbage, 1.0) is None
    assert broker.inspect(0, 0, garbage, "int4z")() is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 57, 99])
def test_one_bad_value_is_found_wherever_it_is(bad: float, position: int) -> None:
    values = torch.randn(100)
    assert is_finite(values)
    values[position] = bad
    assert not is_finite(values)
