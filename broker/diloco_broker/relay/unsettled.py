"""Which of a site's pushes may be in a version that comes: so long it is kept what they left out.

A push in few bits leaves something out, which goes with a later one once it has counted, and not before.
The parent counts it whole or not at all. Mostly its verdict comes with the version that is waited for.
But a site that begins anew meanwhile lets go of a push that the parent may hold whole, and count.
"""

from __future__ import annotations

from diloco_protocol.messages import Push, Released
from diloco_protocol.version import PUSHES_REMEMBERED

# An abandoned push is looked for in so many versions: those that a ledger remembers it in. One that
# counts later still, or with more abandoned since, is missed: what it left out is lost, or comes twice.
VERSIONS_LOOKED_AT = PUSHES_REMEMBERED
# Abandoned pushes of a fragment that are looked for; each costs a copy of the fragment.
MOST_ABANDONED = 2


class Unsettled:
    """See the head of this module. `name` is the relay's in the ledger of its parent."""

    def __init__(self, name: str) -> None:
        self._name = name
        # By fragment and push id, how many versions it is still looked for in; None while in flight.
        self._pushes: dict[int, dict[int, int | None]] = {}

    def sent(self, push: Push) -> None:
        self._pushes.setdefault(push.fragment, {})[push.push_id] = None

    def refused(self, push: Push) -> None:
        """It is in no version, and never will be."""
        self._pushes.get(push.fragment, {}).pop(push.push_id, None)

    def abandoned(self, push: Push) -> list[int]:
        """Nobody waits for it any more. Returns those that are not looked for from now on."""
        pushes = self._pushes.get(push.fragment, {})
        if push.push_id not in pushes:
            return []
        pushes[push.push_id] = VERSIONS_LOOKED_AT
        waiting = [push_id for push_id, left in pushes.items() if left is not None]
        return self._drop(pushes, waiting[:-MOST_ABANDONED])

    def found(self, released: Released, size: int) -> dict[int, frozenset[int]]:
        """The pushes that this version of a fragment of `size` chunks contains; they are settled.

        By push id, the chunks whose values the version contains. An earlier push of the relay may have
        contributed to the others.
        """
        pushes, ledger = self._pushes.get(released.fragment, {}), released.ledger
        named = [each for each in pushes if ledger.names_whole(self._name, each)]
        self._drop(pushes, named)
        return {each: frozenset(ledger.own_chunks(self._name, each, size)) for each in named}

    def missed(self, released: Released) -> list[int]:
        """Those that no version is looked at for any more, after this one."""
        pushes = self._pushes.get(released.fragment, {})
        for push_id, left in pushes.items():
            pushes[push_id] = None if left is None else left - 1
        return self._drop(pushes, [push_id for push_id, left in pushes.items() if left == 0])

    @staticmethod
    def _drop(pushes: dict[int, int | None], which: list[int]) -> list[int]:
        for push_id in which:
            del pushes[push_id]
        return which
