"""A small checkpoint made up for tests, and whether two are the same."""

from dataclasses import replace

import torch

from diloco_broker.core.versions.record import FragmentRecord, RunRecord
from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_broker.tensors.parameters import FragmentTensors
from diloco_protocol.chunks import lay_out_plan
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.version import Counted, Ledger, VersionId
from kit.chunked_model import same

RUN = "0123456789abcdef"
MANIFEST = Manifest(
    (
        TensorEntry("a.weight", (5, 3), "float32", Kind.TRAINABLE, ("tied",)),
        TensorEntry("b.weight", (7,), "bfloat16", Kind.TRAINABLE),
        TensorEntry("mean", (3,), "float32", Kind.BUFFER),
        TensorEntry("count", (), "int64", Kind.BUFFER),
        TensorEntry("table", (4,), "float32", Kind.FROZEN),
    )
)
PLAN = (0, 1, 1, 1, 2)


def a_checkpoint(number: int = 4, seed: int = 0) -> Checkpoint:
    """Two fragments and the frozen one, in chunks of four elements, with some outer state."""
    torch.manual_seed(seed)
    layout = lay_out_plan(MANIFEST, PLAN, num_fragments=2, chunk_elements=4)
    records, tensors = {}, {}
    for part in layout.all:
        chunks = [
            torch.randint(0, 9, (s.elements,))
            if s.segment.value == "integers"
            else torch.randn(s.elements)
            for s in part.spans
        ]
        momentum = [
            torch.randn(s.elements) if s.segment.value == "parameters" and s.index != 1 else None
            for s in part.spans
        ]
        outer = {"momentum": momentum} if part is not layout.frozen else {}
        tensors[part.fragment] = FragmentTensors(chunks, outer)
        records[part.fragment] = FragmentRecord(
            VersionId(RUN, number + part.fragment, 2**64 - 1 - seed),
            Ledger({"w": (Counted(1), Counted(2**64 - 1, b"\x05"))}),
            gradients=number,
            round=number - 1,
            averaged=2,
            tags={number - 1: 2**64 - 1, number: seed},
        )
    record = RunRecord(
        run=RUN,
        number=number,
        epoch="e" * 16,
        manifest=MANIFEST,
        plan=PLAN,
        fragments=records,
        workers={"w": {"pushes": 3}, "x": {"pushes": 0}},
        totals={"rounds": 4},
        left=("y",),
        missing=("z",),
    )
    return Checkpoint(
        record=record,
        incarnation=2,
        num_fragments=2,
        chunk_elements=4,
        outer="nesterov",
        config={"outer_lr": 0.7},
        tensors=tensors,
    )


def assert_equal(ours: Checkpoint, theirs: Checkpoint) -> None:
    assert replace(ours, tensors={}) == replace(theirs, tensors={})
    assert same(ours.tensors, theirs.tensors)
