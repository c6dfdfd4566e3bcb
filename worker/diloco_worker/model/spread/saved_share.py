"""The states that the processes of a worker saved, for another number of processes.

The chunks of a model are the same however many processes share them, so each process takes the chunks
that it owns now from their former owners. A worker of one process owns all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco_protocol import UsageError
from diloco_protocol.chunks import FragmentLayout, ModelLayout
from diloco_worker.model.spread.shares import share_of

Plain = dict[str, Any]
# By fragment, the process that owns each chunk.
Owners = Sequence[Sequence[int]]

# Makes the vectors of a process out of those of several; None: there are none.
Take = Callable[[Sequence[Any]], Any]

# Vectors of an in-flight push.
OF_FLIGHT = ("wire", "frozen", "anchor")


# The name of a process's state, unique in a checkpoint.
_NAME = re.compile(r"(?P<worker>.*), process (?P<rank>\d+) of (?P<count>\d+)", re.DOTALL)


@dataclass(frozen=True)
class ProcessName:
    """Which process of which worker saved a state."""

    worker: str
    rank: int
    count: int

    def __str__(self) -> str:
        return f"{self.worker}, process {self.rank} of {self.count}"

    @classmethod
    def read(cls, text: object) -> ProcessName | None:
        """Parse the name; None where it is not one."""
        found = _NAME.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            return None
        return cls(found["worker"], int(found["rank"]), int(found["count"]))


def shared_out(plain: Plain, rank: int, count: int, owners: Owners) -> Plain:
    """The state of a process, with the chunks that it owns."""
    share = {"rank": rank, "count": count, "owners": [list(each) for each in owners]}
    return {**plain, "share": share}


def states_in(saved: object) -> list[Any]:
    """The states of one or several processes in a saved value."""
    if isinstance(saved, Mapping) and saved and all(map(ProcessName.read, saved)):
        return list(saved.values())
    return [saved]


def part_of(
    saved: Sequence[Plain],
    layout: ModelLayout,
    rank: int = 0,
    count: int = 1,
    owners: Owners | None = None,
) -> Plain:
    """What this process resumes from: its own state, or its part of those of all.

    Args:
        saved: of all processes of one moment, in any order, or of a worker of one.
        owners: as they are now; None for a worker of one process.

    Raises:
        UsageError: some are missing, or they are of different moments.
    """
    own = None if owners is None else shared_out({}, rank, count, owners)["share"]
    if len(saved) > 1:  # also with its own among them: the counts are those of all
        _in_order(saved)
    for plain in saved:
        if plain.get("share") == own and (own is not None or len(saved) == 1):
            return plain
    places = _in_order(saved)
    then = _owners_in(saved[0], layout)
    now = [[0] * part.chunks for part in layout.all] if owners is None else owners
    fragments = []
    for part in layout.fragments:
        number = part.fragment
        move = Move(part, then[number], now[number], rank)
        parts = [saved[at]["fragments"][number] for at in places]
        fragments.append(with_vectors(parts, move.of, move.codes))
    sums = {name: found for each in saved for name, found in each["checksums"].items()}
    plain = {**saved[0], "fragments": fragments, "checksums": sums}
    plain.pop("share", None)
    return plain if owners is None else shared_out(plain, rank, count, owners)


class Move:
    """The chunks of a fragment, from their former owners to this process."""

    def __init__(
        self, part: FragmentLayout, then: Sequence[int], now: Sequence[int], rank: int
    ) -> None:
        spans = {owner: iter(share_of(part, then, owner)[0].spans) for owner in set(then)}
        sources = [(owner, next(spans[owner])) for owner in then]
        # Of each chunk of this process, in order: its former owner, and its span there.
        self._own = [each for each, owner in zip(sources, now, strict=True) if owner == rank]

    def of(self, given: Sequence[Any]) -> dict[str, Tensor] | None:
        """This process's vectors, out of those of all; None where one has none."""
        if None in given:
            return None
        made: dict[str, list[Tensor]] = {}
        for owner, span in self._own:
            vector = given[owner].get(span.segment.value)
            if vector is not None:  # a residual is of parameters only
                made.setdefault(span.segment.value, []).append(vector[span.start : span.stop])
        return {segment: torch.cat(chunks) for segment, chunks in made.items()}

    def codes(self, given: Sequence[Any]) -> dict[str, Tensor] | None:
        """The bytes of its quantized chunks, by index in the share; None where one has none."""
        if None in given:
            return None
        all_of_them = [given[owner].get(str(span.index)) for owner, span in self._own]
        return {str(now): code for now, code in enumerate(all_of_them) if code is not None}


def with_vectors(parts: Sequence[Plain], of: Take, codes: Take) -> Plain:
    """A fragment's state as in the first of these parts, with vectors out of those of all."""
    in_flight = parts[0]["flight"]
    if in_flight is not None:
        in_flight = dict(in_flight)
        for name in OF_FLIGHT:
            in_flight[name] = of([each["flight"][name] for each in parts])
        in_flight["codes"] = codes([each["flight"].get("codes") for each in parts])
    # Compared with the dropped pushes where they are read.
    gains = zip(*(each.get("gains", ()) for each in parts), strict=False)
    return {
        **parts[0],
        "base": of([each["base"] for each in parts]),
        "flight": in_flight,
        "residual": of([each.get("residual") for each in parts]),
        "gains": [of(each) for each in gains],
    }


def _owners_in(plain: Plain, layout: ModelLayout) -> Owners:
    share = plain.get("share")
    return share["owners"] if share else [[0] * part.chunks for part in layout.all]


def _in_order(saved: Sequence[Plain]) -> list[int]:
    """The position of each process's state; raises UsageError where they are not of one moment."""
    shares = [each.get("share") or {"rank": 0, "count": 1} for each in saved]
    count = shares[0]["count"]
    places = {share["rank"]: at for at, share in enumerate(shares)}
    missing = [rank for rank in range(count) if rank not in places]
    if missing:
        raise UsageError(
            f"The state of process {missing[0]} of this worker is missing; give load_state_dict() a "
            f"list of what all {count} processes have saved."
        )
    moments = {
        tuple((*f["version"], f["flight"] and f["flight"]["push_id"]) for f in each["fragments"])
        for each in saved
    }
    if len(moments) > 1 or len(saved) != count:
        raise UsageError(
            "The states of this worker's processes are of different moments; give those that were "
            "saved together."
        )
    return [places[rank] for rank in range(count)]
