"""What workers hold where replies are quantized, and how it follows the master parameters."""

import pytest
import torch
from torch import Tensor

from diloco_broker.core.events import Stepped
from diloco_broker.core.versions.reply import Coded
from diloco_broker.tensors.outer.chunked import Nesterov
from diloco_broker.tensors.parameters import FragmentTensors, Parameters
from diloco_broker.tensors.replica import REPLICA
from diloco_protocol import Kind, Manifest, TensorEntry
from diloco_protocol.chunks import lay_out
from diloco_protocol.tensors.codecs import as_bytes, checksum
from diloco_worker.model.flat_state import FlatState
from kit import raw_codecs
from kit.chunked_model import fold
from kit.raw_worker import DTYPES

QUANTIZED = ["int8", "int4", "int4z"]
ELEMENTS, CHUNK = 400, 300
ENTRIES = (
    TensorEntry("w", (ELEMENTS,), "float32", Kind.TRAINABLE),
    TensorEntry("mean", (3,), "float32", Kind.BUFFER),
    TensorEntry("count", (), "int64", Kind.BUFFER),
)
LAYOUT = lay_out(Manifest(ENTRIES), chunk_elements=CHUNK)
PART = LAYOUT.fragments[0]
PARAMETERS = PART.spans[:2]


def broker(reply: str, model: Tensor) -> Parameters:
    made = Parameters(LAYOUT, Nesterov(1.0, 0.0), wire="fp32", reply=reply)
    for span in PARAMETERS:
        assert made.place(0, span.index, bytearray(as_bytes(cut(model, span.index)))) is not None
    made.place(0, 2, bytearray(as_bytes(torch.zeros(3))))
    made.place(0, 3, bytearray(as_bytes(torch.zeros(1, dtype=torch.int64))))
    return made


def cut(values: Tensor, index: int) -> Tensor:
    span = PART.spans[index]
    return values[span.start : span.stop].clone()


def stepped(made: Parameters, delta: Tensor | None, count: int) -> list[Stepped]:
    """The outer step of all chunks; without a delta no worker delivered."""
    done: list[Stepped] = []
    for span in PARAMETERS:
        if delta is not None:
            fold(made, 0, span.index, bytearray(as_bytes(cut(delta, span.index))), 1.0)
        done += made.step(0, span.index, 0.0 if delta is None else 1.0, count)()
    return done


def masters(made: Parameters) -> Tensor:
    return torch.cat([made.fragment_tensors(0).chunks[span.index] for span in PARAMETERS])


def wholes(made: Parameters) -> Tensor:
    wires = [made.wires(0)[span.index] for span in PARAMETERS]
    assert all(isinstance(each, Coded) and each.code is None for each in wires)
    return torch.cat([torch.frombuffer(each.whole, dtype=torch.float32) for each in wires])


@pytest.mark.parametrize("is_pruned", [False, True], ids=["any model", "negative zeros"])
@pytest.mark.parametrize("reply", QUANTIZED)
def test_replica_follows_the_master_as_in_plain_python(reply: str, is_pruned: bool) -> None:
    model = torch.randn(ELEMENTS)
    if is_pruned:  # by a mask: w * 0 is -0.0 where w is negative
        model[::2] *= 0.0
    made = broker(reply, model)
    replica = model.clone()
    reader = FlatState(PART, {PARAMETERS[0].segment: model.clone()})
    for count in range(4):
        delta = 0.1 * torch.randn(ELEMENTS)
        if is_pruned:
            delta[1::2] *= 1e3  # so that small ones are rounded to nothing
            delta[::6] = 0.0
        done = stepped(made, delta, count)
        for span, each in zip(PARAMETERS, done, strict=True):
            apart = cut(masters(made), span.index) - cut(replica, span.index)
            wanted = raw_codecs.encode(apart.tolist(), reply)
            code = each.wire.code
            assert bytes(code) == wanted or reply == "int4z"
            read = torch.tensor(raw_codecs.decode(bytes(code), reply, span.elements))
            replica[span.start : span.stop] += read
            assert each.wire.checksum == checksum(cut(replica, span.index))
            told = reader.follow(span.index, reader, memoryview(code), (code.nbytes,), reply)
            assert told == each.wire.checksum
        assert torch.equal(wholes(made), replica)
        assert torch.equal(reader.vectors[PARAMETERS[0].segment], replica)
    assert not torch.equal(masters(made), replica)


@pytest.mark.parametrize("reply", QUANTIZED)
def test_replica_comes_nearer_with_each_version_in_which_nothing_is_learnt(reply: str) -> None:
    made = broker(reply, torch.randn(ELEMENTS))
    stepped(made, torch.randn(ELEMENTS), 0)
    apart = [float((masters(made) - wholes(made)).norm())]
    for count in range(1, 6):
        stepped(made, None, count)
        apart.append(float((masters(made) - wholes(made)).norm()))
        assert apart[-1] < apart[-2] or apart[-1] == 0
    assert apart[-1] < apart[0] / 10


@pytest.mark.parametrize("reply", QUANTIZED)
def test_adopted_values_replace_master_and_replica(reply: str) -> None:
    """A broker whose checkpoint is older than what a worker holds takes the worker's values."""
    made, held = broker(reply, torch.randn(ELEMENTS)), torch.randn(ELEMENTS)
    stepped(made, torch.randn(ELEMENTS), 0)
    for span in PARAMETERS:
        made.place(0, span.index, bytearray(as_bytes(cut(held, span.index))))
    assert torch.equal(masters(made), held) and torch.equal(wholes(made), held)


def test_chunk_without_a_finite_difference_is_sent_in_full() -> None:
    made = broker("int4", torch.full((ELEMENTS,), -3e38))
    done = stepped(made, torch.full((ELEMENTS,), -3e38), 0)
    assert torch.equal(masters(made), torch.zeros(ELEMENTS)), "the master is where it should be"
    twice = stepped(made, torch.full((ELEMENTS,), -3e38), 1)
    for each in (*done, *twice):
        values = torch.frombuffer(each.wire.whole, dtype=torch.float32)
        assert bool(torch.isfinite(values).all())
    jumped = broker("int4", torch.full((ELEMENTS,), -3e38))
    jumped.put_back(0, with_masters(jumped, torch.full((ELEMENTS,), 3e38)))
    for each in stepped(jumped, None, 0):
        assert each.wire.code is None
    assert torch.equal(wholes(jumped), masters(jumped))


def with_masters(made: Parameters, values: Tensor) -> FragmentTensors:
    """What a checkpoint has, with these masters and the replica that there is."""
    kept = made.fragment_tensors(0)
    chunks = [
        cut(values, span.index) if span in PARAMETERS else kept.chunks[span.index]
        for span in PART.spans
    ]
    return FragmentTensors(chunks, kept.outer)


@pytest.mark.parametrize("reply", QUANTIZED)
def test_run_goes_on_from_a_checkpoint_with_both(reply: str) -> None:
    model, deltas = torch.randn(ELEMENTS), [torch.randn(ELEMENTS) for _ in range(3)]
    made = broker(reply, model)
    stepped(made, deltas[0], 0)
    again = Parameters(LAYOUT, Nesterov(1.0, 0.0), wire="fp32", reply=reply)
    again.put_back(0, made.fragment_tensors(0))
    assert torch.equal(wholes(again), wholes(made))
    for count in (1, 2):
        for one, other in zip(
            stepped(made, deltas[count], count), stepped(again, deltas[count], count), strict=True
        ):
            assert bytes(one.wire.code) == bytes(other.wire.code)
            assert one.wire.checksum == other.wire.checksum


def test_return_to_full_replies_continues_from_the_replica() -> None:
    made = broker("int4", torch.randn(ELEMENTS))
    stepped(made, torch.randn(ELEMENTS), 0)
    again = Parameters(LAYOUT, Nesterov(1.0, 0.0), wire="fp32", reply="fp32")
    again.put_back(0, made.fragment_tensors(0))
    assert torch.equal(masters(again), wholes(made))
    assert REPLICA not in again.fragment_tensors(0).outer


@pytest.mark.parametrize("before", ["fp32", "bf16", "fp16"])
def test_run_that_goes_on_quantized_begins_at_what_workers_hold(before: str) -> None:
    """So a version has the same contents for who has it already and for who comes now."""
    made = broker(before, torch.randn(ELEMENTS))
    stepped(made, torch.randn(ELEMENTS), 0)
    held = [each if before == "fp32" else bytes(each) for each in made.wires(0)][: len(PARAMETERS)]
    reader = torch.cat(
        [torch.frombuffer(bytearray(each), dtype=DTYPES[before]) for each in held]
    ).float()
    again = broker("int8", torch.zeros(ELEMENTS))
    again.put_back(0, made.fragment_tensors(0))
    assert torch.equal(wholes(again), reader)
    assert torch.equal(masters(again), masters(made)), "the master keeps its bits"


def test_buffers_and_integers_are_not_quantized() -> None:
    made = broker("int4", torch.zeros(ELEMENTS))
    assert not any(isinstance(wire, Coded) for wire in made.wires(0)[2:])
