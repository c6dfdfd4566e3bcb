"""Tensor work that is lent to threads: the same events in the same order, and the same bits."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.shell.tensor_work.executor import TensorExecutor
from diloco_broker.shell.tensor_work.threads import TensorThreads
from diloco_broker.tensors import aggregate
from diloco_broker.tensors.outer.make import make_outer
from diloco_broker.tensors.piece import Scratch
from diloco_protocol import Kind, Manifest, TensorEntry, lay_out
from diloco_protocol.chunks import ModelLayout, Segment
from diloco_protocol.tensors.codecs import encode_chunk, segment_dtype

WORKERS = ("a", "b", "c")
ELEMENTS = 700  # of a chunk
ROUNDS = 3


def a_layout() -> ModelLayout:
    entries = (
        TensorEntry("w", (6, ELEMENTS), "float32", Kind.TRAINABLE),
        TensorEntry("v", (ELEMENTS // 2,), "float32", Kind.BUFFER),
        TensorEntry("n", (3,), "int64", Kind.BUFFER),
    )
    return lay_out(Manifest(entries), chunk_elements=ELEMENTS)


def the_model() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "w": torch.randn(6, ELEMENTS),
        "v": torch.rand(ELEMENTS // 2),
        "n": torch.tensor([1, 2, 3]),
    }


class InAnyOrder(TensorThreads):
    """Calls what it is given in an order of its own, as threads do at their worst."""

    def __init__(self, seed: int, at_a_time: int) -> None:
        super().__init__(1)
        self.at_a_time = at_a_time
        self._dice = random.Random(seed)
        self.most = 0

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        self.most = max(self.most, len(calls))
        order = list(range(len(calls)))
        self._dice.shuffle(order)
        found = {number: calls[number]() for number in order}
        return [found[number] for number in range(len(calls))]


def executor(
    layout: ModelLayout, threads: TensorThreads | None = None, **options: Any
) -> TensorExecutor:
    config = BrokerConfig(workers=len(WORKERS), **options)
    made = TensorExecutor(config, make_outer(config), the_model(), None)
    if threads is not None:
        made._threads = threads
    for fragment in layout.all:
        for span in fragment.spans:
            made.add(effects.StoreInitial(fragment.fragment, span.index, None))
    while made:
        assert all(isinstance(each, events.InitialStored) for each in made.do_some(layout))
    return made


def payloads(layout: ModelLayout, number: int, wire: str) -> list[list[bytearray]]:
    """By worker and chunk; worker c of round 1 has brought something that is not finite."""
    torch.manual_seed(number)
    found = []
    for worker in WORKERS:
        chunks = []
        for span in layout.fragments[0].spans:
            values = torch.randn(span.elements)
            if span.segment is Segment.BUFFERS:
                values = values.abs()
            if (worker, number, span.index, span.segment) == ("c", 1, 2, Segment.PARAMETERS):
                values[5] = torch.inf if wire not in ("int8", "int4", "int4z") else 1e30
            if span.segment is Segment.INTEGERS:
                values = torch.randint(9, (span.elements,))
            chunks.append(
                bytearray(encode_chunk(span, values.to(segment_dtype(span.segment, wire)), wire))
            )
        found.append(chunks)
    return found


def rounds(made: TensorExecutor, layout: ModelLayout, wire: str) -> list[str]:
    """Rounds of streamed means; the events, in order."""
    told: list[str] = []
    spans = layout.fragments[0].spans
    for number in range(ROUNDS):
        sent = payloads(layout, number, wire)
        order = [(w, span.index) for span in spans for w in range(len(WORKERS))]
        random.Random(number).shuffle(order)
        for w, index in order:
            made.add(effects.Fold(0, index, WORKERS[w], number, 1.0 + w, wire, sent[w][index]))
        looked_at = [0] * len(spans)
        weights = [0.0] * len(spans)
        while made:
            for event in made.do_some(layout):
                if isinstance(event, events.Stepped):
                    told.append(f"{number}: {event.index} {event.overflow}")
                    continue
                assert isinstance(event, events.WorkDone | events.WorkRefused)
                work = event.work
                assert isinstance(work, effects.Fold)
                squares = event.squares if isinstance(event, events.WorkDone) else None
                told.append(f"{number}: {work.index} {work.worker_id} {squares!r}")
                looked_at[work.index] += 1
                weights[work.index] += 0.0 if squares is None else work.weight
                if looked_at[work.index] == len(WORKERS):
                    made.add(effects.Step(0, work.index, weights[work.index], number))
    return told


def whole(made: TensorExecutor, layout: ModelLayout) -> list[bytes]:
    return [bytes(getattr(each, "whole", each)) for each in made.of(layout).wires(0)]


@pytest.mark.parametrize(
    ("outer", "wire", "reply", "held"),
    [
        ("nesterov", "bf16", "fp32", 0),
        ("nesterov", "int8", "int4z", 100),
        ("dn", "fp32", "bf16", 2),
        ("dn", "int4z", "int4z", 0),
        ("fedbuff", "int8", "int4z", 2),
        ("fedbuff", "bf16", "fp32", 100),
        ("sgd", "fp32", "bf16", 0),
        ("sgd", "int4z", "int4z", 2),
    ],
)
def test_order_of_threads_changes_no_bit(
    outer: str, wire: str, reply: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregate, "HELD", held)
    layout = a_layout()
    options: dict[str, Any] = {"wire_dtype": wire, "reply_dtype": reply, "outer": outer}
    if outer in ("dn", "fedbuff"):
        options["dn_buffer"] = 2
    if outer == "sgd":
        options["outer_momentum"] = 0.0
    one = executor(layout, **options)
    told = rounds(one, layout, wire)
    for seed in range(3):
        threads = InAnyOrder(seed, at_a_time=2 + 3 * seed)
        other = executor(layout, threads, **options)
        # Steps come sooner or later, never with other contents; looks at one chunk keep their order.
        assert sorted(rounds(other, layout, wire)) == sorted(told)
        assert whole(other, layout) == whole(one, layout)
        assert threads.most > 1, "nothing was lent"


@pytest.mark.parametrize("aggregate_", ["mean", "clip-median-norm", "trimmed-mean", "rda"])
def test_complete_pushes_merged_in_parallel_have_the_same_bits(aggregate_: str) -> None:
    layout = a_layout()
    found = []
    for threads in (None, InAnyOrder(1, 4), InAnyOrder(2, 7)):
        made = executor(layout, threads, aggregate=aggregate_, wire_dtype="bf16")
        sent = payloads(layout, 0, "bf16")
        spans = layout.fragments[0].spans
        for w, worker in enumerate(WORKERS):
            for span in spans:
                made.add(effects.Inspect(0, span.index, worker, 0, "bf16", sent[w][span.index]))
        parts = tuple(
            effects.WholePush(worker, 1, 1.0 + w, 1.0, 10.0 + w, "bf16", sent[w])
            for w, worker in enumerate(WORKERS)
        )
        for count, groups in enumerate(((parts,), (parts[:1], parts[1:]))):
            for span in spans:
                made.add(effects.AggregateAndStep(0, span.index, groups, 2 * count))
        told = []
        while made:
            told += [type(event).__name__ for event in made.do_some(layout)]
        found.append((told, whole(made, layout)))
    assert found[0] == found[1] == found[2]


def test_real_threads_take_part_and_come_to_the_same_bits() -> None:
    layout = a_layout()
    one, three = executor(layout), executor(layout, tensor_threads=3)
    assert rounds(three, layout, "bf16")
    rounds(one, layout, "bf16")
    assert whole(one, layout) == whole(three, layout)
    three.close()
    one.close()


def has_four_steps_due(made: TensorExecutor, layout: ModelLayout) -> None:
    """The first four chunks have been added up; their outer steps wait."""
    for index, chunk in enumerate(payloads(layout, 0, "bf16")[0][:4]):
        made.add(effects.Fold(0, index, "a", 0, 1.0, "bf16", chunk))
    list(made.do_some(layout))
    for index in range(4):
        made.add(effects.Step(0, index, 1.0, 0))


def test_each_result_is_in_its_place_when_it_is_told_and_none_behind_it() -> None:
    """So a checkpoint that is made on an event is the one that a single thread would make."""
    layout = a_layout()
    made = executor(layout, InAnyOrder(0, 8))
    before = whole(made, layout)
    has_four_steps_due(made, layout)
    told = 0
    for event in made.do_some(layout):
        assert isinstance(event, events.Stepped)
        now = whole(made, layout)
        assert event.index == told
        assert [a != b for a, b in zip(before, now, strict=True)][:4] == [
            index <= told for index in range(4)
        ]
        told += 1
    assert told == 4


def test_finished_steps_precede_an_order_that_changes_tensors() -> None:
    """Buffered gradients are forgotten: those of steps that were done at the same time, as well."""
    layout = a_layout()
    made = executor(layout, InAnyOrder(0, 8), outer="dn", dn_buffer=3)
    has_four_steps_due(made, layout)
    told: list[events.Event] = []
    for event in made.do_some(layout):
        if not told:
            made.add(effects.ForgetBuffer(0))
        told.append(event)
    assert [each.index for each in told if isinstance(each, events.Stepped)] == [0, 1, 2, 3]
    assert not any(
        tensor is not None
        for tensor in made.of(layout).fragment_tensors(0).outer.get("delayed", [])
    )


def test_failure_of_a_thread_is_raised_where_the_work_was_asked_for_once_all_are_done() -> None:
    threads = TensorThreads(3)
    at_work = threading.Barrier(3, timeout=10)
    ended = []

    def fails() -> None:
        at_work.wait()
        raise MemoryError("no room")

    def goes_on() -> None:
        at_work.wait()
        ended.append(threading.current_thread().name)

    for order in ([fails, goes_on, goes_on], [goes_on, fails, goes_on], [goes_on, goes_on, fails]):
        with pytest.raises(MemoryError, match="no room"):
            threads.run(order)
    assert len(ended) == 6
    assert threads.run([lambda: 1, lambda: 2, lambda: 3, lambda: 4]) == [1, 2, 3, 4]
    threads.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("diloco-tensors")]


def test_no_two_threads_write_to_the_same_scratch() -> None:
    scratch = Scratch(1, 4)
    scratch.rows.fill_(1.0)
    threads = TensorThreads(2)
    at_work = threading.Barrier(2, timeout=10)

    def fill() -> float:
        at_work.wait()
        scratch.rows.add_(1.0) if threading.current_thread() is main else scratch.rows.fill_(7.0)
        at_work.wait()
        return float(scratch.rows.sum())

    main = threading.current_thread()
    assert sorted(threads.run([fill, fill])) == [8.0, 28.0]
    threads.close()
