"""The manifest of a model that several processes have together.

It is that of the whole model, as one process would have it, so that workers of any kind can share a
run. All processes get the same one, or raise the same UsageError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diloco_protocol import Kind, Manifest, TensorEntry, UsageError
from diloco_protocol.manifest import summarise
from diloco_worker.model.checksums import crc32_of
from diloco_worker.model.model_manifest import require_sound
from diloco_worker.model.spread.blocks import Block, block_of, local
from diloco_worker.model.spread.ranks import Ranks


@dataclass(frozen=True)
class Agreement:
    """What all processes know."""

    manifest: Manifest  # of the whole model
    blocks: Mapping[str, tuple[Block | None, ...]]  # by name, what each process has of it
    # By name, the names under which this process has the tensor: several where it is tied.
    names: Mapping[str, tuple[str, ...]]


def agree(
    ranks: Ranks, mine: Manifest, live: Mapping[str, Tensor], tied: Sequence[Sequence[str]] = ()
) -> Agreement:
    """Exchange what each process has.

    Args:
        mine: of this process's modules, with the shapes of whole tensors.
        tied: groups of names of one tensor, which may be in several processes.

    Raises:
        UsageError: parts are missing, or differ; in all processes.
    """
    said = ranks.agreed(lambda: [_said(entry, live[entry.name]) for entry in mine.entries])
    told = ranks.gather(said)
    first = {name: group[0] for group in tied for name in group}
    problems: list[str] = _unknown_ties(tied, told)
    entries: dict[str, TensorEntry] = {}
    blocks: dict[str, list[Block | None]] = {}
    sums: dict[str, dict[Block, set[int]]] = {}
    names: dict[str, list[str]] = {}
    for rank, each in enumerate(told):
        for own, shape, dtype, kind, aliases, offset, size, checksum in each:
            name = first.get(own, own)
            block = Block(shape, offset, size)
            entry = TensorEntry(name, shape, dtype, Kind(kind), ())
            known = entries.setdefault(name, entry)
            if (known.shape, known.dtype) != (shape, dtype):
                problems.append(f"{name} is {known} in one process and {entry} in process {rank}")
                continue
            kinds = {known.kind, entry.kind}
            # Some of tied ones may be frozen.
            if kinds > {Kind.TRAINABLE} and name not in first:
                was, is_here = _SAID[known.kind], _SAID[entry.kind]
                problems.append(f"{name} is {was} in one process and {is_here} in process {rank}")
            entries[name] = _merged(known, entry, name, (own, *aliases))
            found = blocks.setdefault(name, [None] * ranks.count)
            if found[rank] is None or found[rank] == block:
                found[rank] = block
            else:
                problems.append(f"{name} has two parts in process {rank}")
            if checksum is not None:
                sums.setdefault(name, {}).setdefault(block, set()).add(checksum)
            if rank == ranks.rank:
                names.setdefault(name, []).append(own)
    problems += _gaps(entries, blocks)
    problems += [
        f"{name} has other values in some processes than in others"
        for name, of in sums.items()
        if any(len(each) > 1 for each in of.values())
    ]
    if problems:
        raise UsageError(
            f"The processes of this worker do not have one model together: {summarise(problems)}. "
            "Give each part its name in the whole model, begin with the same values (the same seed "
            "or checkpoint), and name tensors that several parts share in tied=."
        )
    manifest = Manifest(tuple(entries[name] for name in _in_order(told, first)))
    require_sound(manifest)
    return Agreement(
        manifest,
        {name: tuple(found) for name, found in blocks.items()},
        {name: tuple(found) for name, found in names.items()},
    )


def _said(entry: TensorEntry, tensor: Tensor) -> list[Any]:
    block, values = block_of(entry.name, tensor), local(tensor)
    # Parameters must begin alike; buffers are those of the first process.
    is_compared = entry.kind is not Kind.BUFFER and block.elements
    checksum = crc32_of(values, values.dtype)[0] if is_compared else None
    kind, shape = entry.kind.value, list(entry.shape)
    aliases = list(entry.aliases)
    return [entry.name, shape, entry.dtype, kind, aliases, block.offset, block.size, checksum]


def _merged(
    known: TensorEntry, entry: TensorEntry, name: str, others: Sequence[str]
) -> TensorEntry:
    """The entry of a tensor that two processes have."""
    aliases = [*known.aliases, *(each for each in others if each != name)]
    kinds = {known.kind, entry.kind}
    if Kind.TRAINABLE in kinds:
        kind = Kind.TRAINABLE  # of tied parameters one may be frozen
    else:
        kind = Kind.FROZEN if Kind.FROZEN in kinds else Kind.BUFFER
    return TensorEntry(name, known.shape, known.dtype, kind, tuple(dict.fromkeys(aliases)))


def _unknown_ties(tied: Sequence[Sequence[str]], told: Sequence[Any]) -> list[str]:
    known = {
        name for each in told for own, *_, aliases, _, _, _ in each for name in (own, *aliases)
    }
    return [
        f"{name}, named in tied=, is in no process" for g in tied for name in g if name not in known
    ]


def _gaps(
    entries: Mapping[str, TensorEntry], blocks: Mapping[str, Sequence[Block | None]]
) -> list[str]:
    """Tensors that are incomplete, or whose parts overlap."""
    problems = []
    for name, found in blocks.items():
        parts = [b for b in dict.fromkeys(found) if b is not None and b.elements]
        if any(a.meets(b) for i, a in enumerate(parts) for b in parts[:i]):
            problems.append(f"{name} has parts that overlap")
        elif sum(part.elements for part in parts) != entries[name].elements:
            problems.append(f"{name} lacks a part")
    return problems


def _in_order(told: Sequence[Any], first: Mapping[str, str]) -> list[str]:
    """All names in the order of the whole model.

    Each process has its own in order, and the stages of a pipeline follow each other. Tensors of a
    module are adjacent, wherever its parts are. Where stages take turns, the blocks of a list (0 and 2
    in the first, 1 and 3 in the next) are ordered by number.
    """
    each = [tuple(dict.fromkeys(first.get(own, own) for own, *_ in said)) for said in told]
    names = list(dict.fromkeys(name for own in each for name in own))
    return names if len(set(each)) == 1 else list(_together(names, ""))


def _together(names: Sequence[str], prefix: str) -> Iterator[str]:
    """Names with a common beginning, module by module."""
    children: dict[str, list[str]] = {}
    for name in names:
        children.setdefault(name[len(prefix) :].partition(".")[0], []).append(name)
    ordered = sorted(children, key=int) if all(map(str.isdecimal, children)) else list(children)
    for child in ordered:
        within = f"{prefix}{child}."
        deeper = [name for name in children[child] if name.startswith(within)]
        yield from (name for name in children[child] if name not in deeper)
        if deeper:
            yield from _together(deeper, within)


_SAID = {Kind.TRAINABLE: "trained", Kind.FROZEN: "frozen", Kind.BUFFER: "a buffer"}
