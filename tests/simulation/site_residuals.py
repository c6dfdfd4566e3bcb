"""What a simulated relay's pushes in few bits have left out, in whole numbers, so that sums are exact.

With each push a site means a number, and sends the multiple of STEP below it and its residual. What the
relay is told of its pushes is held against the ledgers of the versions that come: in the end all that
was meant by pushes that count is what was sent by them and the residual.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from diloco_protocol.messages import Push, Released
from simulation.tensors import demand

STEP = 16


@dataclass(frozen=True)
class Sent:
    """One push."""

    fragment: int
    meant: int
    residual: int  # that it was sent with
    sent: int

    @property
    def gain(self) -> int:
        """What the residual gains by it once it has counted."""
        return self.meant - self.sent


class SiteResiduals:
    """See the head of this module; of one life of a relay."""

    def __init__(self, name: str, seed: str) -> None:
        self._name = name
        self._dice = random.Random(seed)  # its own, so that no other run changes
        self._all: dict[int, Sent] = {}  # by push id
        self._open: set[int] = set()  # those that the relay has not settled
        self._named: set[int] = set()  # those that a version was seen to have
        self._residual: dict[int, int] = {}  # by fragment
        self.settled = 0

    def sends(self, push: Push) -> None:
        meant, residual = (
            self._dice.randrange(-1000, 1000),
            self._residual.get(push.fragment, 0),
        )
        coded = (meant + residual) // STEP * STEP
        self._all[push.push_id] = Sent(push.fragment, meant, residual, coded)
        self._open.add(push.push_id)

    def settles(self, released: Released, counted: Iterable[int]) -> None:
        for push_id in counted:
            demand(push_id in self._open, "{:#x} of {} is settled twice", push_id, self._name)
            self._open.discard(push_id)
            each = self._all[push_id]
            before = self._residual.get(each.fragment, 0)
            self._residual[each.fragment] = before + each.gain
            self.settled += 1
        self._named |= {
            push_id
            for push_id, each in self._all.items()
            if each.fragment == released.fragment
            and released.ledger.names_whole(self._name, push_id)
        }
        self._check()

    def forgets(self, push_id: int) -> None:
        self._open.discard(push_id)

    def _check(self) -> None:
        """Each push that a version has is in the residual, and no other."""
        for fragment in {each.fragment for each in self._all.values()}:
            named = [self._all[p] for p in self._named if self._all[p].fragment == fragment]
            meant, sent = sum(each.meant for each in named), sum(each.sent for each in named)
            left = self._residual.get(fragment, 0)
            demand(
                meant == sent + left,
                "{} meant {} of fragment {} with what counted, sent {} and has {} left",
                *(self._name, meant, fragment, sent, left),
            )
