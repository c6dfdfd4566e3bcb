"""The content of a checkpoint and its file formats: JSON for the record, safetensors for the tensors.

Each fragment is one safetensors file: its segments end to end, and the state of the outer optimizer.
`checkpoint.json` has everything else. A `Checkpoint` is immutable.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from diloco_broker.core.versions.record import FragmentRecord, RunRecord
from diloco_broker.tensors.parameters import FragmentTensors
from diloco_protocol.chunks import (
    CHUNK_ELEMENTS,
    MOST_CHUNKS,
    FragmentLayout,
    ModelLayout,
    Segment,
    lay_out_plan,
)
from diloco_protocol.data.spans import LARGEST, Spans
from diloco_protocol.fragments import FragmentPlan
from diloco_protocol.manifest import summarise
from diloco_protocol.messages import LONGEST_WORKER_ID, is_data_set_name, is_worker_id
from diloco_protocol.records import from_plain, to_plain
from diloco_protocol.tensors.codecs import as_bytes, segment_dtype
from diloco_protocol.version import Ledger, VersionId

FORMAT = 1
# Fields of a `RunRecord` that are written only if they have a value, and all keys in their order.
_WHERE_USED = ("shards", "data_sets", "term", "standby", "left", "missing")
_KEYS = (
    "format", "run", "number", "life", "manifest", "plan", "num_fragments", "chunk_elements", "outer",
    "epoch", "workers", "config", "totals", *_WHERE_USED, "fragments", "files",
)  # fmt: skip
_NAMES = {torch.float32: "F32", torch.int64: "I64"}  # of dtypes in safetensors


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a broker needs to continue a run."""

    record: RunRecord
    incarnation: int  # number of the broker's incarnation, from 1
    num_fragments: int
    chunk_elements: int
    outer: str  # kind of the outer optimizer
    config: Mapping[str, Any]  # options of the broker, for people and for `inspect`
    # By fragment, the frozen one last; empty if only the record was read.
    tensors: Mapping[int, FragmentTensors]
    saved_at: float | None = None  # when its file was written, seconds since 1970; None: unknown

    @property
    def number(self) -> int:
        """The number of the next round."""
        return self.record.number

    @property
    def layout(self) -> ModelLayout:
        return lay_out_plan(
            self.record.manifest,
            self.record.plan,
            num_fragments=self.num_fragments,
            chunk_elements=self.chunk_elements,
        )


class TensorStore(Protocol):
    """The source and target of a checkpoint's tensors: `Parameters`, or a stub in tests."""

    def fragment_tensors(self, fragment: int) -> FragmentTensors: ...
    def wires(self, fragment: int) -> Sequence[Any]: ...
    def put_back(self, fragment: int, kept: FragmentTensors) -> None: ...


# The record, as JSON.


def plain(checkpoint: Checkpoint, files: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `checkpoint.json`; `files` has size and checksum of each fragment's file."""
    record = checkpoint.record
    fragments = {}
    for fragment, each in record.fragments.items():
        tensors = checkpoint.tensors[fragment]
        fragments[str(fragment)] = {
            "version": to_plain(each.version),
            "ledger": each.ledger.plain(in_hex=False),
            "gradients": each.gradients,
            "round": each.round,
            "averaged": each.averaged,
            "tags": [list(pair) for pair in each.tags.items()],
            "outer": {
                name: [state is not None for state in states]
                for name, states in tensors.outer.items()
            },
            "optimizer": _plain_optimizer(tensors.optimizer),
        }
    values = {
        **to_plain(replace(record, fragments={})),
        "format": FORMAT,
        "life": checkpoint.incarnation,
        "num_fragments": checkpoint.num_fragments,
        "chunk_elements": checkpoint.chunk_elements,
        "outer": checkpoint.outer,
        "config": dict(checkpoint.config),
        "fragments": fragments,
        "files": dict(files),
    }
    return {name: values[name] for name in _KEYS if values[name] or name not in _WHERE_USED}


def without_tensors(plain: Mapping[str, Any]) -> Checkpoint:
    """Read a checkpoint's record from its JSON. Raises ValueError or other errors if it is malformed."""
    record = from_plain(RunRecord, {**plain, "fragments": {}}, "checkpoint")
    fragments = {int(number): _fragment_record(each) for number, each in plain["fragments"].items()}
    found = Checkpoint(
        record=replace(record, fragments=fragments, standby=record.standby[:LONGEST_WORKER_ID]),
        incarnation=int(plain["life"]),
        num_fragments=int(plain["num_fragments"]),
        chunk_elements=int(plain["chunk_elements"]),
        outer=str(plain["outer"]),
        config=dict(plain["config"]),
        tensors={},
    )
    _check(found, plain)
    return found


def _check(found: Checkpoint, plain: Mapping[str, Any]) -> None:
    """Raise ValueError or ProtocolError for a record that no broker writes, before using it."""
    record, pieces = found.record, found.num_fragments
    problems = record.manifest.problems()
    if problems:
        raise ValueError(summarise(problems))
    elements = sum(entry.elements for entry in record.manifest.entries)
    if not 0 < found.chunk_elements <= CHUNK_ELEMENTS:
        raise ValueError(f"chunks of {found.chunk_elements} elements")
    if elements > MOST_CHUNKS * found.chunk_elements:
        raise ValueError(f"{elements} elements in chunks of {found.chunk_elements}")
    if pieces > 1:
        FragmentPlan.from_numbers(record.manifest, record.plan, pieces)
    elif pieces != 1:
        raise ValueError(f"{pieces} fragments")
    numbers = {record.number, found.incarnation, record.term}
    for each in record.fragments.values():
        if not each.version.is_valid or each.version.run != record.run:
            raise ValueError(f"{each.version!r:.100} is not a version of run {record.run!r:.40}")
        numbers |= {each.gradients, each.round + 1, each.averaged, *each.tags, *each.tags.values()}
    counts = [each for of in (record.totals, *record.workers.values()) for each in of.values()]
    are_counts = all(0 <= each < 1 << 63 for each in counts)
    if not are_counts or not all(0 <= number < 1 << 64 for number in numbers):
        raise ValueError("a count is out of range")
    for name, data in record.data_sets.items():
        fits = data.size > 0 and Spans.read(data.uncounted, None).stop <= data.next < LARGEST
        if not is_data_set_name(name) or not fits:
            raise ValueError(f"{name!r:.80} is not a valid data set")
    # As they are in the file: records have only printable texts.
    names = [name for of in ("workers", "shards", "left", "missing") for name in plain.get(of, ())]
    wrong = [name for name in names if not is_worker_id(name)]
    if wrong:
        raise ValueError(f"a worker named {wrong[0]!r:.80}")


def _fragment_record(plain: Mapping[str, Any]) -> FragmentRecord:
    return FragmentRecord(
        version=from_plain(VersionId, plain["version"], "version"),
        ledger=Ledger.from_plain(plain["ledger"]),
        gradients=int(plain["gradients"]),
        round=int(plain["round"]),
        averaged=int(plain["averaged"]),
        tags={int(counter): int(tag) for counter, tag in plain.get("tags", ())},
    )


def _plain_optimizer(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A torch optimizer's state with shapes instead of its tensors, which the fragment's file has."""
    if state is None:
        return None
    values = {
        str(number): {
            name: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
            if isinstance(value, Tensor)
            else {"value": value}
            for name, value in each.items()
        }
        for number, each in state["state"].items()
    }
    return {"state": values, "param_groups": state["param_groups"]}


# The tensors of a fragment, as a file.


def save_tensors(path: Path, layout: FragmentLayout, fragment: FragmentTensors) -> tuple[int, str]:
    """Write the file of one fragment and flush it to the disk. Returns size in bytes and SHA-256.

    The format is eight bytes of header length, a JSON header, and the tensors' bytes end to end
    (github.com/huggingface/safetensors, "Format"). The library writes contiguous tensors; ours are in
    chunks, so using it would need another copy of the model.
    """
    header: dict[str, object] = {}
    offset = 0
    tensors = _tensors_of_file(layout, fragment)
    for name, chunks in tensors.items():
        dtype, elements = chunks[0].dtype, sum(chunk.numel() for chunk in chunks)
        end = offset + elements * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": [elements], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # align the tensors to eight bytes
    total = hashlib.sha256()
    with open(path, "xb") as file:
        for piece in _pieces(text, tensors.values()):
            total.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), total.hexdigest()


def _pieces(text: bytes, tensors: Iterable[Sequence[Tensor]]) -> Iterable[bytes | memoryview]:
    yield struct.pack("<Q", len(text))
    yield text
    for chunks in tensors:
        yield from (as_bytes(chunk) for chunk in chunks if chunk.numel())


def _tensors_of_file(
    layout: FragmentLayout, fragment: FragmentTensors
) -> dict[str, Sequence[Tensor]]:
    """The segments of a fragment and the state of its outer optimizer, each as a list of chunks."""
    tensors: dict[str, Sequence[Tensor]] = {}
    for segment in Segment:
        chunks = [fragment.chunks[span.index] for span in layout.spans if span.segment is segment]
        if chunks:
            tensors[segment.value] = chunks
    for name, states in fragment.outer.items():
        known = [state for state in states if state is not None]
        if known:
            tensors[f"outer.{name}"] = known
    for number, values in (fragment.optimizer or {}).get("state", {}).items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                flat = value.detach().to("cpu", torch.float32).contiguous().reshape(-1)
                tensors[f"optimizer.{number}.{name}"] = [flat]
    return tensors


def load_tensors(path: Path, layout: FragmentLayout, plain: Mapping[str, Any]) -> FragmentTensors:
    """Read the file of one fragment, each chunk into its own memory; `plain` is its part of the JSON.

    Raises ValueError, or an error of the library, if the file does not match the layout.
    """
    with safe_open(path, framework="pt") as file:
        segments = {s: file.get_tensor(s.value) for s in Segment if layout.lengths[s]}
        for segment, tensor in segments.items():
            if tensor.numel() != layout.lengths[segment] or tensor.dtype != segment_dtype(segment):
                raise ValueError(
                    f"{tensor.numel()} {segment.value} of {tensor.dtype} in {path.name}"
                )
        chunks = [segments[s.segment][s.start : s.stop].clone() for s in layout.spans]
        outer = {}
        for name, known in plain["outer"].items():
            joined = file.get_tensor(f"outer.{name}") if any(known) else torch.empty(0)
            outer[name] = _split(joined, layout, known)
        optimizer = _load_optimizer(file, plain["optimizer"])
    return FragmentTensors(chunks, outer, optimizer)


def _split(joined: Tensor, layout: FragmentLayout, known: Sequence[bool]) -> list[Tensor | None]:
    """Split the outer state by chunk; `known` says which chunks have one."""
    found: list[Tensor | None] = []
    start = 0
    for span, is_known in zip(layout.spans, known, strict=True):
        stop = start + span.elements if is_known else start
        found.append(joined[start:stop].clone() if is_known else None)
        start = stop
    if joined.numel() != start or joined.dtype != torch.float32:
        raise ValueError(f"{joined.numel()} of {start} elements of the outer state")
    return found


def _load_optimizer(file: Any, plain: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Read a torch optimizer's state; `plain` is its part of the JSON."""
    if plain is None:
        return None
    state: dict[int, dict[str, Any]] = {}
    for number, values in plain["state"].items():
        state[int(number)] = {}
        for name, value in values.items():
            if "shape" in value:
                flat = file.get_tensor(f"optimizer.{number}.{name}")
                dtype = getattr(torch, value["dtype"])
                if not isinstance(dtype, torch.dtype):
                    raise ValueError(f"{value['dtype']!r:.40} is not a dtype")
                state[int(number)][name] = flat.reshape(value["shape"]).to(dtype).clone()
            else:
                state[int(number)][name] = value["value"]
    return {"state": state, "param_groups": plain["param_groups"]}
