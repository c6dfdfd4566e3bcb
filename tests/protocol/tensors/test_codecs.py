"""How a chunk is written and read: every codec that there is, and one that there might be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_broker import Broker
from diloco_broker.tensors.outer.chunked import Nesterov
from diloco_broker.tensors.parameters import Parameters
from diloco_protocol import dtypes
from diloco_protocol.chunks import ChunkSpan, Segment, lay_out
from diloco_protocol.clients import observer
from diloco_protocol.dtypes import SIZES, WIRE_DTYPES, WireSize, span_bytes
from diloco_protocol.errors import UsageError
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.records import from_plain
from diloco_protocol.tensors.codecs import (
    CODECS,
    Codec,
    as_bytes,
    decode_chunk,
    encode_chunk,
    is_finite,
    segment_dtype,
)
from diloco_worker import DiLoCoClient
from diloco_worker.model.encoding import encode
from diloco_worker.model.flat_state import FlatState
from kit.whole_run import make_config


@pytest.mark.parametrize("wire", WIRE_DTYPES)
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


def test_unknown_wire_dtype_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'int3'; choose one of fp32, bf16, fp16"):
        segment_dtype(Segment.PARAMETERS, "int3")


@pytest.mark.parametrize("other", ["int8", "int64"])
def test_reader_of_a_broker_with_another_wire_dtype_says_so(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    def by_a_later_release(record: type[Any], plain: Any, where: str) -> Any:
        return from_plain(
            record, plain | ({"reply_dtype": other} if where == "config" else {}), where
        )

    monkeypatch.setattr(observer, "from_plain", by_a_later_release)
    with (
        Broker(make_config(), {"weight": torch.ones(2, 2)}) as broker,
        DiLoCoClient(broker.address, timeout=20) as client,
        observer.Observer(broker.address) as reader,
    ):
        client.join(nn.Linear(2, 2, bias=False))
        with pytest.raises(UsageError, match=f"'{other}'; choose one of fp32, bf16, fp16"):
            reader.read()


def in_steps(values: Tensor) -> memoryview:
    """Signed bytes, behind the fp32 step that they count."""
    step = (values.abs().max() / 127).reshape(1)
    return memoryview(bytes(as_bytes(step)) + bytes(as_bytes((values / step).round().char())))


def out_of_steps(payload: Any) -> Tensor:
    step = torch.frombuffer(payload, dtype=torch.float32, count=1)
    return torch.frombuffer(payload, dtype=torch.int8, offset=4) * step


def test_codec_with_a_scale_in_each_chunk_is_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "int8", WireSize(1, chunk=4))
    monkeypatch.setitem(CODECS, "int8", Codec(torch.float32, in_steps, out_of_steps))
    monkeypatch.setattr(dtypes, "WIRE_DTYPES", (*WIRE_DTYPES, "int8"))
    layout = lay_out(
        Manifest((TensorEntry("w", (10,), "float32", Kind.TRAINABLE),)), chunk_elements=4
    )
    part = layout.fragments[0]
    model, delta = torch.randn(10), torch.randn(10)
    sent = encode(part, {"w": delta}, "int8").wire
    broker = Parameters(layout, Nesterov(1.0, 0.0), wire="int8", reply="int8")
    arrived = FlatState.empty(part)
    for span in part.spans:
        chunk = model[span.start : span.stop].clone()
        assert broker.place(0, span.index, bytearray(as_bytes(chunk))) is not None
        payload = bytearray(sent.chunk(span.index))
        assert len(payload) == span_bytes(span, "int8") == 4 + span.elements
        assert broker.fold(0, span.index, payload, 1.0) is not None
        (done,) = broker.step(0, span.index, 1.0, 0)
        arrived.store(span.index, memoryview(bytearray(done.wire)), "int8")
    steps = 2 * max(float(t.abs().max()) for t in (model, delta, model - delta)) / 127
    assert torch.allclose(arrived.by_name()["w"], model - delta, rtol=0, atol=steps)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 57, 99])
def test_one_bad_value_is_found_wherever_it_is(bad: float, position: int) -> None:
    values = torch.randn(100)
    assert is_finite(values)
    values[position] = bad
    assert not is_finite(values)
