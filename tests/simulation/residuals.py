"""What a simulated worker's quantized pushes have left out, in whole numbers, so that sums are exact.

Of each chunk of a push the worker means a number and sends the multiple of STEP below it. It keeps its
residual by what its boundary decides, and is held against what versions really contain: the residual of
a chunk is the sum of the numbers meant by all pushes that contain it, less the numbers sent.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco_protocol.dtypes import is_quantized
from diloco_protocol.messages import Push
from diloco_worker.sync.fragment import Fragment, Merge, Outcome
from simulation.tensors import Wire, demand

STEP = 16


@dataclass
class Sent:
    """One push, by chunk."""

    fragment: int
    meant: list[int]
    sent: list[int]
    seen: set[int] = field(default_factory=set)  # chunks in a version that was in the model
    kept: set[int] = field(default_factory=set)  # chunks that the residual takes as counted
    is_settled: bool = False  # its worker does not wait for it any more

    def left_out(self, index: int) -> int:
        return self.meant[index] - self.sent[index]


class Residuals:
    def __init__(self, name: str, worker_id: str) -> None:
        self._worker_id = worker_id
        self._dice = random.Random(name)  # its own, so that no other run changes
        self._sent: dict[int, Sent] = {}  # by push id
        self._residual: dict[tuple[int, int], int] = {}  # by fragment and chunk
        self.settled_in_part = 0  # chunks of dropped pushes that counted all the same

    def frozen(self, push: Push) -> None:
        if not is_quantized(push.wire_dtype):
            return
        meant = [self._dice.randrange(-1000, 1000) for _ in range(push.chunks)]
        coded = [
            (each + self._residual.get((push.fragment, index), 0)) // STEP * STEP
            for index, each in enumerate(meant)
        ]
        self._sent[push.push_id] = Sent(push.fragment, meant, coded)

    def merges(self, fragment: Fragment, merge: Merge) -> None:
        """What the model is brought in line with."""
        if merge.outcome is Outcome.SUPERSEDED:
            self._forget(fragment.number)
            return
        if merge.arrival is not None and merge.arrival.values is not None:
            self._look_at(fragment.number, merge.arrival.values)
        for push_id, chunks in merge.settled.items():
            self._keep(push_id, list(chunks))
            if merge.in_flight is None or push_id != merge.in_flight.push_id:
                self.settled_in_part += len(chunks)

    def merged(self, fragment: Fragment) -> None:
        """The boundary has recorded it: pushes that are not awaited any more are settled."""
        open_ = {each.push_id for each in fragment.dropped}
        if fragment.in_flight is not None:
            open_.add(fragment.in_flight.push_id)
        for push_id, each in list(self._sent.items()):
            if each.fragment != fragment.number or push_id in open_ or each.is_settled:
                continue
            self._check(push_id, each)
            each.is_settled = True

    def _look_at(self, number: int, wires: Sequence[Wire]) -> None:
        for push_id, each in self._sent.items():
            if each.fragment == number:
                key = (self._worker_id, push_id)
                each.seen |= {index for index, wire in enumerate(wires) if key in wire.contents}
                if each.is_settled:
                    self._check(push_id, each)

    def _check(self, push_id: int, each: Sent) -> None:
        for index in range(len(each.meant)):
            is_in, is_kept = index in each.seen, index in each.kept
            demand(
                is_in == is_kept,
                "chunk {} of push {} of {} is in a version: {}; in its residual: {}",
                *(index, hex(push_id), self._worker_id, is_in, is_kept),
            )

    def _keep(self, push_id: int, chunks: Sequence[int]) -> None:
        each = self._sent.get(push_id)
        if each is None:
            return
        for index in chunks:
            at = (each.fragment, index)
            demand(index not in each.kept, "chunk {} of {} is kept twice", index, hex(push_id))
            each.kept.add(index)
            self._residual[at] = self._residual.get(at, 0) + each.left_out(index)

    def _forget(self, number: int) -> None:
        self._sent = {push: each for push, each in self._sent.items() if each.fragment != number}
        self._residual = {at: of for at, of in self._residual.items() if at[0] != number}
