"""Patterns that split a model into fragments, by the names and sizes of trainable parameters.

    strided      as in the paper: block i of the model goes to fragment i mod P
    contiguous   P runs of neighbouring blocks, whose largest is as small as possible
    balanced     single tensors, the largest first, each to the smallest fragment so far

A custom split has no pattern (`FragmentPlan.by`); displays call it "own".

A *block* is one of the repeated layers. The first component of a name that is a decimal number, or
that names a module and ends with "_" and one, ends the block's name: "model.layers.3.mlp.up.weight" is
in block "model.layers.3", "0.weight" of an `nn.Sequential` in block "0". Blocks are numbered through all
lists of a model in order of appearance. Parameters outside blocks (embedding, final norm, head) are
grouped by module, the name up to its last dot: a weight and its bias stay together. Blocks and modules
are the *units* that a pattern deals with.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from diloco_protocol.manifest import TensorEntry


def block_of(name: str) -> str | None:
    """The repeated layer (block) of a parameter; None outside of blocks."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        # "layers.3", or "encoder_layer_3.ln" in models that number attributes.
        is_module = index + 1 < len(parts)
        if part.isdecimal() or (is_module and part.rpartition("_")[2].isdecimal()):
            return ".".join(parts[: index + 1])
    return None


def unit_of(name: str) -> str:
    """The unit of a parameter: its block, or its module outside of blocks."""
    return block_of(name) or name.rpartition(".")[0]


def _units(entries: Sequence[TensorEntry], fewest: int) -> list[int]:
    """The unit of each entry, numbered from 0: a run of entries of the same block or module.

    If there are fewer than `fewest` units, each tensor is its own unit.
    """
    units: list[int] = []
    before = None
    for entry in entries:
        key = unit_of(entry.name)
        units.append(0 if not units else units[-1] + (key != before))
        before = key
    return units if units[-1] + 1 >= fewest else list(range(len(entries)))


def strided(entries: Sequence[TensorEntry], num_fragments: int) -> list[int]:
    """Blocks in turn; other tensors go with the block before them, or with the first block."""
    blocks: dict[str, int] = {}
    for entry in entries:
        block = block_of(entry.name)
        if block is not None:
            blocks.setdefault(block, len(blocks))
    if len(blocks) < num_fragments:
        return [unit % num_fragments for unit in _units(entries, num_fragments)]
    chosen = []
    current = 0
    for entry in entries:
        block = block_of(entry.name)
        if block is not None:
            current = blocks[block] % num_fragments
        chosen.append(current)
    return chosen


def contiguous(entries: Sequence[TensorEntry], num_fragments: int) -> list[int]:
    """Runs of units that minimize the largest run."""
    units = _units(entries, num_fragments)
    sizes = [0] * (units[-1] + 1)
    for unit, entry in zip(units, entries, strict=True):
        sizes[unit] += entry.elements
    ends = list(_cut(sizes, num_fragments))
    return [bisect_right(ends, unit) for unit in units]


def _cut(sizes: Sequence[int], runs: int) -> Iterator[int]:
    """The end of each run (one past its last unit) of a cut with minimal largest run.

    The smallest capacity is found by bisection: a capacity suffices if runs that are filled up to it in
    order reach the end. Within that capacity, each run ends where its size is closest to the mean of
    the remaining runs.
    """
    sums = [0, *accumulate(sizes)]
    number = len(sizes)

    def reach(start: int, capacity: int) -> int:
        return bisect_right(sums, sums[start] + capacity) - 1

    low, high = max(*sizes, -(-sums[-1] // runs)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        end = 0
        for _ in range(runs):
            end = reach(end, middle)
        if end == number:
            high = middle
        else:
            low = middle + 1
    # Minimum number of runs from each position on.
    needed = [0] * (number + 1)
    for start in reversed(range(number)):
        needed[start] = 1 + needed[reach(start, high)]
    start = 0
    for left in range(runs, 0, -1):
        # Each later run needs a unit, and all together must have room for the remaining units.
        last = min(reach(start, high), number - left + 1)
        ends = [end for end in range(start + 1, last + 1) if needed[end] < left]
        rest = sums[-1] - sums[start]
        distances = {end: abs((sums[end] - sums[start]) * left - rest) for end in ends}
        start = min(ends, key=distances.__getitem__)
        yield start


def balanced(entries: Sequence[TensorEntry], num_fragments: int) -> list[int]:
    """Single tensors by number of elements, which is proportional to bytes in a common wire dtype.

    Longest processing time first: the largest fragment is within 4/3 of the smallest possible one
    (Graham 1969). Ties are broken by name; fragments are numbered by their earliest tensor.
    """
    order = sorted(range(len(entries)), key=lambda i: (-entries[i].elements, entries[i].name))
    groups: list[list[int]] = [[] for _ in range(num_fragments)]
    loads = [(0, group) for group in range(num_fragments)]  # a heap
    for index in order:
        load, group = loads[0]
        groups[group].append(index)
        heapq.heapreplace(loads, (load + entries[index].elements, group))
    chosen = [0] * len(entries)
    for number, indices in enumerate(sorted(map(sorted, groups))):
        for index in indices:
            chosen[index] = number
    return chosen


# Each takes the trainable entries with elements, and P, and returns the fragment of each entry.
PATTERNS: Mapping[str, Callable[[Sequence[TensorEntry], int], list[int]]] = {
    "strided": strided,
    "contiguous": contiguous,
    "balanced": balanced,
}
