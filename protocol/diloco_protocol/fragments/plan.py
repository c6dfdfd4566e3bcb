"""Which parameters are in which fragment, and when each fragment is due: Streaming DiLoCo.

Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512) synchronises a model in P fragments, each
every H steps, one after the other, so that the peak of the traffic falls by P.

Schedule: slot i (0 .. P - 1) of each cycle of H steps is after step ((i + 1) H) // P, so the k-th
slot since the origin (k = 0, 1, ...) is after step ((k + 1) H) // P and slots are floor(H / P) or
ceil(H / P) steps apart. The k-th slot belongs to round first_round + k, and round n concerns
fragment n mod P: every H consecutive steps hold each fragment exactly once, wherever they begin.

Patterns, by the names and sizes of the trainable parameters:

    strided      the paper's: block i of the model goes to fragment i mod P
    contiguous   neighbouring blocks stay together, in P runs whose largest is as small as can be
    balanced     single tensors, so that the largest fragment is near the mean

A user's own split has no pattern (`FragmentPlan.by`); displays call it "own".

A *block* is one of the repeated layers. The first component of a name that is a decimal number, or
that names a module and ends with "_" and one, ends the block's name: "model.layers.3.mlp.up.weight" is
in block "model.layers.3", "0.weight" of an `nn.Sequential` in block "0". Blocks are numbered through all
lists of a model in order of appearance. Parameters outside blocks (embedding, final norm, head) are
grouped by module, the name up to its last dot: a weight and its bias stay together. Blocks and modules
are the *units* that a pattern deals with.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from diloco_protocol.errors import Code, ProtocolError, UsageError
from diloco_protocol.fragments.packing import pack
from diloco_protocol.fragments.view import PlanView, view_of
from diloco_protocol.manifest import Kind, Manifest, TensorEntry, summarise

PATTERNS = ("strided", "contiguous", "balanced")
OWN = "own"  # what the pattern of a user's own split is called

# The fragment of a parameter, by its name and shape.
Choose = Callable[[str, tuple[int, ...]], int]


@dataclass(frozen=True)
class FragmentPlan:
    """Which trainable parameters are in which fragment; every one is in exactly one.

    Attributes:
        num_fragments: P.
        fragments: names of the parameters of each fragment, in the manifest's order. Every fragment
            has at least one parameter with elements.
    """

    num_fragments: int
    fragments: tuple[tuple[str, ...], ...]

    @classmethod
    def of(
        cls, manifest: Manifest, num_fragments: int = 1, pattern: str = "strided"
    ) -> FragmentPlan:
        """Split a model's trainable parameters; the same manifest always gives the same plan.

        Where there are fewer blocks than fragments, `strided` deals out units instead of blocks;
        where there are fewer units than fragments, `strided` and `contiguous` take single tensors
        for units. A parameter without elements goes with the one before it.

        Args:
            manifest: the model's tensors in order.
            num_fragments: P.
            pattern: "strided", "contiguous" or "balanced"; see the head of this module.

        Raises:
            UsageError: P is below 1, there are fewer trainable tensors than P, or no such pattern.
        """
        if num_fragments < 1:
            raise UsageError(f"num_fragments is {num_fragments}; use 1 or more.")
        trainable = [e for e in manifest.entries if e.kind is Kind.TRAINABLE]
        deciding = [e for e in trainable if e.elements > 0]
        if not deciding:
            raise UsageError(
                "The model has no trainable parameters with elements, so there is nothing to put "
                f"in num_fragments {num_fragments}; leave requires_grad on for what is trained."
            )
        if len(deciding) < num_fragments:
            raise UsageError(
                f"The model has {len(deciding)} trainable tensor(s), too few for num_fragments "
                f"{num_fragments}; use num_fragments {len(deciding)} or less."
            )
        match pattern:
            case "strided":
                chosen = _strided(deciding, num_fragments)
            case "contiguous":
                chosen = _contiguous(deciding, num_fragments)
            case "balanced":
                chosen = _balanced(deciding, num_fragments)
            case _:
                raise UsageError(
                    f"There is no fragment pattern {pattern!r}; use one of {', '.join(PATTERNS)}."
                )
        fragments: list[list[str]] = [[] for _ in range(num_fragments)]
        following = iter(chosen)
        current = chosen[0]
        for entry in trainable:
            if entry.elements > 0:
                current = next(following)
            fragments[current].append(entry.name)
        return cls(num_fragments, tuple(map(tuple, fragments)))

    @classmethod
    def by(cls, manifest: Manifest, num_fragments: int, choose: Choose) -> FragmentPlan:
        """Split a model's trainable parameters as the caller says.

        Args:
            manifest: the model's tensors in order.
            num_fragments: P.
            choose: returns the fragment, 0 .. P - 1, of a parameter by its name and shape.

        Raises:
            UsageError: numbers outside 0 .. P - 1, a fragment without elements, or an error in
                `choose`; the sentence names the parameters.
        """
        if num_fragments < 1:
            raise UsageError(f"num_fragments is {num_fragments}; use 1 or more.")
        fragments: list[list[str]] = [[] for _ in range(num_fragments)]
        elements = [0] * num_fragments
        wrong = []
        for entry in manifest.entries:
            if entry.kind is not Kind.TRAINABLE:
                continue
            try:
                number = operator.index(choose(entry.name, entry.shape))
            except Exception as error:
                raise UsageError(
                    f"The fragment of {entry.name} {list(entry.shape)} is not known, because the "
                    f"split of one's own raised {error!r:.200}; it must return a whole number."
                ) from error
            if 0 <= number < num_fragments:
                fragments[number].append(entry.name)
                elements[number] += entry.elements
            else:
                wrong.append(f"{entry.name} in {number}")
        if wrong:
            raise UsageError(
                f"With num_fragments {num_fragments} the fragments are 0 to {num_fragments - 1}, but "
                f"the split of one's own puts {summarise(wrong)}."
            )
        empty = [number for number, size in enumerate(elements) if not size]
        if empty:
            raise UsageError(
                f"The split of one's own leaves fragment {', '.join(map(str, empty))} without "
                f"trainable elements; put parameters there, or use fewer than num_fragments "
                f"{num_fragments}."
            )
        return cls(num_fragments, tuple(map(tuple, fragments)))

    @classmethod
    def from_numbers(
        cls, manifest: Manifest, numbers: Sequence[int], num_fragments: int
    ) -> FragmentPlan:
        """Rebuild a plan from what `numbers` gave for the same manifest.

        Raises:
            ProtocolError: `numbers` do not fit the manifest, or leave a fragment without elements.
        """
        if len(numbers) != len(manifest.entries):
            raise _misfit(f"there are {len(numbers)} for {len(manifest.entries)} tensors")
        deciding = sum(e.kind is Kind.TRAINABLE and e.elements > 0 for e in manifest.entries)
        # Before anything of length P is made: P came from the peer.
        if not 1 <= num_fragments <= deciding:
            raise _misfit(f"{deciding} trainable tensor(s) cannot fill {num_fragments} fragments")
        fragments: list[list[str]] = [[] for _ in range(num_fragments)]
        elements = [0] * num_fragments
        for entry, number in zip(manifest.entries, numbers, strict=True):
            if entry.kind is not Kind.TRAINABLE:
                if number != _fixed(entry, num_fragments):
                    raise _misfit(f"{entry.name} ({entry.kind.value}) has the number {number}")
            elif not 0 <= number < num_fragments:
                raise _misfit(f"{entry.name} has the number {number} of {num_fragments} fragments")
            else:
                fragments[number].append(entry.name)
                elements[number] += entry.elements
        if 0 in elements:
            raise _misfit(f"fragment {elements.index(0)} has no trainable elements")
        return cls(num_fragments, tuple(map(tuple, fragments)))

    def numbers(self, manifest: Manifest) -> tuple[int, ...]:
        """Fragment of each manifest entry, in order: the plan as it travels.

        Buffers have P - 1 and frozen parameters P, as in `chunks.lay_out`.

        Raises:
            UsageError: the plan was made for a model with other trainable parameters.
        """
        fragment_of = self.fragment_of
        trainable = {e.name for e in manifest.entries if e.kind is Kind.TRAINABLE}
        strangers = sorted(trainable ^ set(fragment_of))
        if strangers:
            raise UsageError(
                f"The plan and the model differ in {len(strangers)} trainable parameter(s), first "
                f"{strangers[0]!r}; make the plan with FragmentPlan.of from this model's manifest."
            )
        return tuple(
            fragment_of[e.name] if e.kind is Kind.TRAINABLE else _fixed(e, self.num_fragments)
            for e in manifest.entries
        )

    @property
    def fragment_of(self) -> dict[str, int]:
        """Fragment of each trainable parameter by name; what `chunks.lay_out` takes."""
        return {name: number for number, names in enumerate(self.fragments) for name in names}

    def parameters(self, fragment: int) -> tuple[str, ...]:
        """Names of a fragment's parameters; raises UsageError outside 0 .. P - 1."""
        if not 0 <= fragment < self.num_fragments:
            raise UsageError(f"There is no fragment {fragment}; use 0 to {self.num_fragments - 1}.")
        return self.fragments[fragment]

    def view(
        self,
        manifest: Manifest,
        sync_every: int,
        wire_dtype: str = "bf16",
        reply_dtype: str = "fp32",
    ) -> PlanView:
        """What the plan means, for people: parameters, bytes and the step of the cycle, by fragment.

        Args:
            manifest: the model that the plan was made for; `diloco_worker.manifest_of(module)`.
            sync_every: H, steps of a cycle.
            wire_dtype, reply_dtype: of pushes and of replies: "fp32", "bf16" or "fp16".

        Raises:
            UsageError: H is below P, no such dtype, or the plan is of another model.
        """
        self.numbers(manifest)  # raises where it is another model's
        due = slots(sync_every, self.num_fragments)
        return view_of(
            self.fragments,
            manifest,
            due=due,
            sync_every=sync_every,
            wire_dtype=wire_dtype,
            reply_dtype=reply_dtype,
        )

    def due(self, step: int, sync_every: int, first_round: int = 0) -> int | None:
        """The fragment to push after this step, or None.

        Args:
            step: optimizer steps since the schedule's origin, 1 for the first.
            sync_every: H, steps between two pushes of one fragment.
            first_round: the round of the first slot since the origin.

        Raises:
            UsageError: H is below P, or `step` below 1.
        """
        _check(sync_every, self.num_fragments)
        if step < 1:
            raise UsageError(f"step is {step}; steps since the origin are counted from 1.")
        # Slot k is after step ((k + 1) H) // P; the first that is not before this step:
        slot = -(-step * self.num_fragments // sync_every) - 1
        if (slot + 1) * sync_every // self.num_fragments != step:
            return None
        return (first_round + slot) % self.num_fragments


def slots(sync_every: int, num_fragments: int) -> tuple[int, ...]:
    """Steps of a cycle, 1 .. H, after which a fragment is due; the last is H itself.

    Raises:
        UsageError: P is below 1, or H below P.
    """
    _check(sync_every, num_fragments)
    return tuple((i + 1) * sync_every // num_fragments for i in range(num_fragments))


def longest_delay(sync_every: int, num_fragments: int) -> int:
    """Steps after which training waits for a reply that it would merge whenever it comes.

    H/P, the distance to the next fragment's slot: a network that needs longer for each fragment falls
    behind for good, so a longer delay would win nothing, and would overwrite more local steps
    (alpha 0) with older parameters. Never more than H/2, for a model that is one fragment: half of the
    steps of each cycle come after the merge.
    """
    return sync_every // max(num_fragments, 2)


def _check(sync_every: int, num_fragments: int) -> None:
    if num_fragments < 1:
        raise UsageError(f"num_fragments is {num_fragments}; use 1 or more.")
    if sync_every < num_fragments:
        raise UsageError(
            f"sync_every {sync_every} is below num_fragments {num_fragments}, and each fragment "
            f"needs a step of its own; use sync_every {num_fragments} or more, or fewer fragments."
        )


def _fixed(entry: TensorEntry, num_fragments: int) -> int:
    """The number of an entry that is not trained."""
    return num_fragments - 1 if entry.kind is Kind.BUFFER else num_fragments


def _misfit(problem: str) -> ProtocolError:
    return ProtocolError(
        Code.BAD_HEADER,
        f"The fragment numbers do not fit the model: {problem}; send one for each tensor of the "
        "manifest, 0 to P - 1 where it is trainable, P - 1 for buffers, P for frozen parameters.",
    )


# Each pattern takes the entries that decide and returns the fragment of each.


def block_of(name: str) -> str | None:
    """The repeated layer that a parameter belongs to; see the head of this module."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        # "layers.3", and "encoder_layer_3.ln" of models that number attributes instead of a list.
        is_module = index + 1 < len(parts)
        if part.isdecimal() or (is_module and part.rpartition("_")[2].isdecimal()):
            return ".".join(parts[: index + 1])
    return None


def unit_of(name: str) -> str:
    """The block or module that a parameter belongs to; see the head of this module."""
    return block_of(name) or name.rpartition(".")[0]


def _units(entries: Sequence[TensorEntry], fewest: int) -> list[int]:
    """The unit of each entry, counted from 0: a run of entries of the same block or module.

    Single tensors where there would be fewer than `fewest`.
    """
    units: list[int] = []
    before = None
    for entry in entries:
        key = unit_of(entry.name)
        units.append(0 if not units else units[-1] + (key != before))
        before = key
    return units if units[-1] + 1 >= fewest else list(range(len(entries)))


def _strided(entries: Sequence[TensorEntry], num_fragments: int) -> list[int]:
    """Blocks in turn; what is outside goes with the block before it, at the head with the first."""
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


def _contiguous(entries: Sequence[TensorEntry], num_fragments: int) -> list[int]:
    """Runs of units with the smallest possible largest run."""
    units = _units(entries, num_fragments)
    sizes = [0] * (units[-1] + 1)
    for unit, entry in zip(units, entries, strict=True):
        sizes[unit] += entry.elements
    ends = list(_cut(sizes, num_fragments))
    return [bisect_right(ends, unit) for unit in units]


def _cut(sizes: Sequence[int], runs: int) -> Iterator[int]:
    """Where each run of a cut ends (one past its last), the largest run being minimal.

    The smallest capacity is found by bisection: a capacity is enough if runs filled to it one after
    the other reach the end. Of the cuts within it, each run takes the end at which it comes nearest
    to the mean of what is left.
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
    # Runs that the sizes from each position on need at least.
    needed = [0] * (number + 1)
    for start in reversed(range(number)):
        needed[start] = 1 + needed[reach(start, high)]
    start = 0
    for left in range(runs, 0, -1):
        # Each later run must have a unit, and all of them must have room for what remains.
        last = min(reach(start, high), number - left + 1)
        ends = [end for end in range(start + 1, last + 1) if needed[end] < left]
        rest = sums[-1] - sums[start]
        distances = {end: abs((sums[end] - sums[start]) * left - rest) for end in ends}
        start = min(ends, key=distances.__getitem__)
        yield start


def _balanced(entries: Sequence[TensorEntry], num_fragments: int) -> list[int]:
    """Single tensors by elements, which are bytes, since all travel in one dtype.

    Ties are broken by name; fragments are numbered by their earliest tensor.
    """
    order = sorted(range(len(entries)), key=lambda i: (-entries[i].elements, entries[i].name))
    sizes = [entries[i].elements for i in order]
    chosen = [0] * len(entries)
    groups = sorted(sorted(order[i] for i in group) for group in pack(sizes, num_fragments))
    for number, group in enumerate(groups):
        for index in group:
            chosen[index] = number
    return chosen
