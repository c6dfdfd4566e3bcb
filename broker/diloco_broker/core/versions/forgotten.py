"""How far a ledger can still tell whether a push is in: it remembers a few of each worker, and no more.

A relay that was cut off for long may come back with a push that has been counted another way, and
forgotten since. The push itself says when it was made: what counts later than its base may be it.
So it is kept of each worker how late the newest of its pushes counted that the ledger has forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco_protocol.version import PUSHES_REMEMBERED, Counted, Ledger


@dataclass
class _Entry:
    """Of one worker: what the ledger names, as it was seen last, and the counters that go with it."""

    pushes: tuple[Counted, ...]
    counters: dict[int, int]  # by push id, of the version that took it in, or of a later one
    forgotten: int = (
        -1
    )  # no push counted later than in this version has been forgotten; -1: none has


@dataclass
class Forgotten:
    """Of one fragment, as far as its versions have been seen in this life of the broker."""

    _entries: dict[str, _Entry] = field(default_factory=dict)
    _first: int | None = None  # counter of the first version that was seen
    _full: frozenset[str] = frozenset()  # those of whom it named as many pushes as it ever does

    def see(self, counter: int, ledger: Ledger) -> None:
        """A version is here, made from the one that was seen before it."""
        if self._first is None and ledger.pushes:
            self._first = counter
            names = ledger.pushes.items()
            self._full = frozenset(n for n, pushes in names if len(pushes) == PUSHES_REMEMBERED)
        for worker_id in [each for each in self._entries if each not in ledger.pushes]:
            del self._entries[worker_id]
        for worker_id, pushes in ledger.pushes.items():
            entry = self._entries.get(worker_id)
            if entry is None:
                counters = {each.push_id: counter for each in pushes}
                self._entries[worker_id] = _Entry(pushes, counters)
            elif entry.pushes is not pushes:
                _go_on(entry, counter, pushes)

    def may_name(self, bases: Mapping[str, int], *, has_rounds: bool) -> list[str]:
        """Workers of whom a push that was made from this version, by counter, may be in, and forgotten.

        What was forgotten before the broker began is not known. Where there are rounds a worker has one
        push in a version at most, and it follows how late that can have been.
        """
        before = -1 if self._first is None or not has_rounds else self._first - PUSHES_REMEMBERED
        return [
            each
            for each, base in bases.items()
            if (each in self._full and before > base)
            or (each in self._entries and self._entries[each].forgotten > base)
        ]


def _go_on(entry: _Entry, counter: int, pushes: tuple[Counted, ...]) -> None:
    now = {each.push_id: entry.counters.get(each.push_id, counter) for each in pushes}
    gone = [at for push_id, at in entry.counters.items() if push_id not in now]
    entry.forgotten = max(entry.forgotten, *gone, -1)
    entry.pushes, entry.counters = pushes, now
