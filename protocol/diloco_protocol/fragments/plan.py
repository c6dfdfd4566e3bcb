"""The plan of Streaming DiLoCo: which parameters are in which fragment, and when each fragment is due.

Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512) synchronises a model in P fragments, each
every H steps, one after the other, which reduces peak traffic by a factor of P.

Schedule: slot i (0 .. P - 1) of each cycle of H steps is after step ((i + 1) H) // P, so the k-th
slot since the origin (k = 0, 1, ...) is after step ((k + 1) H) // P and slots are floor(H / P) or
ceil(H / P) steps apart. The k-th slot belongs to round first_round + k, and round n concerns
fragment n mod P: any H consecutive steps contain each fragment exactly once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco_protocol.dtypes import (
    BUFFERS_DTYPE,
    INTEGERS_DTYPE,
    REPLY_DTYPES,
    SIZES,
    check_wire_dtype,
)
from diloco_protocol.errors import Code, ProtocolError, UsageError
from diloco_protocol.fragments.patterns import PATTERNS
from diloco_protocol.manifest import Kind, Manifest, TensorEntry, summarise

OWN = "own"  # name of the pattern of a custom split

# Returns the fragment of a parameter, from its name and shape.
Choose = Callable[[str, tuple[int, ...]], int]


@dataclass(frozen=True)
class ParameterView:
    """One trainable parameter: its elements, and its bytes in a push (up) and in a reply (down)."""

    name: str
    shape: tuple[int, ...]
    elements: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class FragmentView:
    """One fragment of a plan. The bytes of fragment P - 1 include the model's buffers."""

    fragment: int  # its number, 0 .. P - 1
    due: int  # step of a cycle, 1 .. H, after which it is pushed
    parameters: tuple[ParameterView, ...]  # its parameters, in the manifest's order
    elements: int  # of these parameters
    bytes_up: int  # of one push of one worker
    bytes_down: int  # of the reply to one worker


@dataclass(frozen=True)
class PlanView:
    """A plan for one model, as returned by `FragmentPlan.view`."""

    sync_every: int
    wire_dtype: str
    reply_dtype: str
    fragments: tuple[FragmentView, ...]

    @property
    def imbalance(self) -> float:
        """Bytes of the largest push divided by the mean: 1 is perfectly even, P means all in one."""
        sizes = [each.bytes_up for each in self.fragments]
        return max(sizes) * len(sizes) / sum(sizes)


@dataclass(frozen=True)
class FragmentPlan:
    """An assignment of every trainable parameter to exactly one fragment."""

    num_fragments: int  # P
    # Names of the parameters of each fragment, in the manifest's order. Every fragment has at least one
    # parameter with elements.
    fragments: tuple[tuple[str, ...], ...]

    @classmethod
    def of(
        cls, manifest: Manifest, num_fragments: int = 1, pattern: str = "strided"
    ) -> FragmentPlan:
        """Split a model's trainable parameters; the same manifest always gives the same plan.

        With fewer blocks than fragments, `strided` distributes units instead of blocks; with fewer units
        than fragments, `strided` and `contiguous` use single tensors as units. A parameter without
        elements goes with the one before it.

        Args:
            manifest: the model's tensors in order.
            num_fragments: P.
            pattern: "strided", "contiguous" or "balanced"; see `patterns`.

        Raises:
            UsageError: P is below 1 or above the number of trainable tensors, or the pattern is unknown.
        """
        if num_fragments < 1:
            raise UsageError(f"num_fragments is {num_fragments}; use 1 or more.")
        trainable = trainable_of(manifest)
        deciding = [e for e in trainable if e.elements > 0]
        if not deciding:
            raise UsageError(
                "The model has no trainable parameters with elements for num_fragments "
                f"{num_fragments}; set requires_grad of the parameters to train."
            )
        if len(deciding) < num_fragments:
            raise UsageError(
                f"The model has {len(deciding)} trainable tensor(s), too few for num_fragments "
                f"{num_fragments}; use num_fragments {len(deciding)} or less."
            )
        if pattern not in PATTERNS:
            raise UsageError(
                f"Unknown fragment pattern {pattern!r}; use one of {', '.join(PATTERNS)}."
            )
        chosen = PATTERNS[pattern](deciding, num_fragments)
        current, following, numbers = chosen[0], iter(chosen), []
        for entry in trainable:
            if entry.elements > 0:
                current = next(following)
            numbers.append(current)
        return cls(num_fragments, _dealt(trainable, numbers, num_fragments))

    @classmethod
    def by(cls, manifest: Manifest, num_fragments: int, choose: Choose) -> FragmentPlan:
        """Split a model's trainable parameters by a function of the caller.

        Args:
            manifest: the model's tensors in order.
            num_fragments: P.
            choose: returns the fragment, 0 .. P - 1, of a parameter by its name and shape.

        Raises:
            UsageError: numbers outside 0 .. P - 1, a fragment without elements, or an error in
                `choose`; the message names the parameters.
        """
        if num_fragments < 1:
            raise UsageError(f"num_fragments is {num_fragments}; use 1 or more.")
        trainable, numbers = trainable_of(manifest), []
        for entry in trainable:
            try:
                numbers.append(operator.index(choose(entry.name, entry.shape)))
            except Exception as error:
                raise UsageError(
                    f"The custom split raised {error!r:.200} for {entry.name} {list(entry.shape)}; "
                    "it must return an integer."
                ) from error
        wrong = [
            f"{entry.name} in {number}"
            for entry, number in zip(trainable, numbers, strict=True)
            if not 0 <= number < num_fragments
        ]
        if wrong:
            raise UsageError(
                f"With num_fragments {num_fragments} the fragments are 0 to {num_fragments - 1}, but "
                f"the custom split puts {summarise(wrong)}."
            )
        empty = _empty(trainable, numbers, num_fragments)
        if empty:
            raise UsageError(
                f"The custom split leaves fragment {', '.join(map(str, empty))} without trainable "
                f"elements; put parameters there, or use fewer than num_fragments {num_fragments}."
            )
        return cls(num_fragments, _dealt(trainable, numbers, num_fragments))

    @classmethod
    def from_numbers(
        cls, manifest: Manifest, numbers: Sequence[int], num_fragments: int
    ) -> FragmentPlan:
        """Rebuild a plan from the result of `numbers` for the same manifest.

        Raises ProtocolError if they do not fit it, or leave a fragment without elements.
        """
        if len(numbers) != len(manifest.entries):
            raise _misfit(f"{len(numbers)} numbers for {len(manifest.entries)} tensors")
        trainable = trainable_of(manifest)
        deciding = sum(e.elements > 0 for e in trainable)
        # Checked before allocating lists of length P, which the peer chose.
        if not 1 <= num_fragments <= deciding:
            raise _misfit(f"{deciding} trainable tensor(s) cannot fill {num_fragments} fragments")
        chosen = []
        for entry, number in zip(manifest.entries, numbers, strict=True):
            if entry.kind is not Kind.TRAINABLE:
                if number != _fixed(entry, num_fragments):
                    raise _misfit(f"{entry.name} ({entry.kind.value}) has the number {number}")
            elif not 0 <= number < num_fragments:
                raise _misfit(f"{entry.name} has the number {number} of {num_fragments} fragments")
            else:
                chosen.append(number)
        empty = _empty(trainable, chosen, num_fragments)
        if empty:
            raise _misfit(f"fragment {empty[0]} has no trainable elements")
        return cls(num_fragments, _dealt(trainable, chosen, num_fragments))

    def numbers(self, manifest: Manifest) -> tuple[int, ...]:
        """The fragment of each manifest entry, in order: the wire form of the plan.

        Buffers have P - 1 and frozen parameters P, as in `chunks.lay_out`. Raises UsageError if the plan
        was made for a model with other trainable parameters.
        """
        fragment_of = self.fragment_of
        unknown = sorted({e.name for e in trainable_of(manifest)} ^ set(fragment_of))
        if unknown:
            raise UsageError(
                f"The plan and the model differ in {len(unknown)} trainable parameter(s), first "
                f"{unknown[0]!r}; make the plan with FragmentPlan.of from this model's manifest."
            )
        return tuple(
            fragment_of[e.name] if e.kind is Kind.TRAINABLE else _fixed(e, self.num_fragments)
            for e in manifest.entries
        )

    @property
    def fragment_of(self) -> dict[str, int]:
        """The fragment of each trainable parameter by name, for `chunks.lay_out`."""
        return {name: number for number, names in enumerate(self.fragments) for name in names}

    def parameters(self, fragment: int) -> tuple[str, ...]:
        """Names of a fragment's parameters; raises UsageError outside 0 .. P - 1."""
        if not 0 <= fragment < self.num_fragments:
            raise UsageError(f"Invalid fragment {fragment}; use 0 to {self.num_fragments - 1}.")
        return self.fragments[fragment]

    def due(self, step: int, sync_every: int, first_round: int = 0) -> int | None:
        """The fragment to push after this step, or None.

        Args:
            step: optimizer steps since the schedule's origin, 1 for the first.
            sync_every: H, steps between two pushes of one fragment.
            first_round: the round of the first slot since the origin.

        Raises:
            UsageError: H is below P, or `step` below 1.
        """
        cycle = slots(sync_every, self.num_fragments)
        if step < 1:
            raise UsageError(f"step is {step}; steps since the origin are counted from 1.")
        step_of_cycle = (step - 1) % sync_every + 1
        if step_of_cycle not in cycle:
            return None
        return (first_round + cycle.index(step_of_cycle)) % self.num_fragments

    def view(
        self,
        manifest: Manifest,
        sync_every: int,
        wire_dtype: str = "bf16",
        reply_dtype: str = "fp32",
    ) -> PlanView:
        """Describe the plan for people: parameters, bytes and step in the cycle, by fragment.

        Args:
            manifest: the model that the plan was made for; `diloco_worker.manifest_of(module)`.
            sync_every: H, steps of a cycle.
            wire_dtype, reply_dtype: of pushes, one of `WIRE_DTYPES`, and of replies, of `REPLY_DTYPES`.

        Raises:
            UsageError: H is below P, a dtype is unknown, or the plan belongs to another model.
        """
        self.numbers(manifest)  # raises UsageError for another model
        due = slots(sync_every, self.num_fragments)
        check_wire_dtype(wire_dtype)
        check_wire_dtype(reply_dtype, REPLY_DTYPES)
        up, down = SIZES[wire_dtype].element, SIZES[reply_dtype].element
        sizes = {entry.name: (entry.shape, entry.elements) for entry in manifest.entries}
        buffers = sum(map(_buffer_bytes, manifest.entries))
        views = []
        for number, names in enumerate(self.fragments):
            parameters = tuple(
                ParameterView(name, shape, elements, round(up * elements), round(down * elements))
                for name in names
                for shape, elements in [sizes[name]]
            )
            elements = sum(each.elements for each in parameters)
            more = buffers if number == self.num_fragments - 1 else 0
            bytes_up, bytes_down = round(up * elements) + more, round(down * elements) + more
            views.append(
                FragmentView(number, due[number], parameters, elements, bytes_up, bytes_down)
            )
        return PlanView(sync_every, wire_dtype, reply_dtype, tuple(views))


def slots(sync_every: int, num_fragments: int) -> tuple[int, ...]:
    """Steps of a cycle, 1 .. H, after which a fragment is due; the last is H itself.

    Raises:
        UsageError: P is below 1, or H below P.
    """
    if num_fragments < 1:
        raise UsageError(f"num_fragments is {num_fragments}; use 1 or more.")
    if sync_every < num_fragments:
        raise UsageError(
            f"sync_every {sync_every} is below num_fragments {num_fragments}, but each fragment "
            f"needs its own step; use sync_every {num_fragments} or more, or fewer fragments."
        )
    return tuple((i + 1) * sync_every // num_fragments for i in range(num_fragments))


def longest_delay(sync_every: int, num_fragments: int) -> int:
    """Default steps after which training pauses to wait for a reply that is merged on arrival.

    H/P, the distance to the next fragment's slot: a network that needs longer for each fragment never
    catches up, so a longer delay would gain nothing, and would overwrite more local steps (alpha 0) with
    older parameters. At most H/2, for a single fragment, so half of the steps of each cycle follow the
    merge.
    """
    return sync_every // max(num_fragments, 2)


def trainable_of(manifest: Manifest) -> list[TensorEntry]:
    return [entry for entry in manifest.entries if entry.kind is Kind.TRAINABLE]


def _dealt(
    entries: Sequence[TensorEntry], numbers: Sequence[int], num_fragments: int
) -> tuple[tuple[str, ...], ...]:
    """The names in each fragment, from the fragment number of each entry."""
    fragments: list[list[str]] = [[] for _ in range(num_fragments)]
    for entry, number in zip(entries, numbers, strict=True):
        fragments[number].append(entry.name)
    return tuple(map(tuple, fragments))


def _empty(entries: Sequence[TensorEntry], numbers: Sequence[int], num_fragments: int) -> list[int]:
    filled = {number for entry, number in zip(entries, numbers, strict=True) if entry.elements}
    return [number for number in range(num_fragments) if number not in filled]


def _fixed(entry: TensorEntry, num_fragments: int) -> int:
    """The fragment number of an entry that is not trained."""
    return num_fragments - 1 if entry.kind is Kind.BUFFER else num_fragments


def _buffer_bytes(entry: TensorEntry) -> int:
    """Bytes of a buffer in each push and reply of the last fragment; 0 for other tensors."""
    if entry.kind is not Kind.BUFFER:
        return 0
    dtype = BUFFERS_DTYPE if entry.is_floating_point else INTEGERS_DTYPE
    return SIZES[dtype].most(entry.elements)


def _misfit(problem: str) -> ProtocolError:
    return ProtocolError(
        Code.BAD_HEADER,
        f"The fragment numbers do not fit the model: {problem}; send one for each tensor of the "
        "manifest: 0 to P - 1 for trainable parameters, P - 1 for buffers, P for frozen parameters.",
    )
