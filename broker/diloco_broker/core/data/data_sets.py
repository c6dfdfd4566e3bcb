"""Data sets of which the broker hands out the units: a unit goes to one worker in each epoch.

The life of a unit, in one epoch:

    free -> handed out -> in a contribution -> counted
      ^         |                |
      +---------+----------------+   its worker is gone or gives it back; the contribution does not count

A *ticket* counts units over all epochs (`diloco_protocol.data.order`), so a data set is a line of
tickets. Those below `next` have been handed out; of these some were given back and are free, some are
held by workers, and all others are counted. Nothing is kept of those. What was given back goes out again
when the rest of its epoch is out: a worker that comes back until then finds its own. The next epoch
begins when nothing of this one is free, and is not held up by those who still hold some of it: a worker
that waited for them could never make the boundary at which its own count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from diloco_broker.core.versions.record import DataSetRecord
from diloco_protocol.data.spans import MOST_RANGES, Spans
from diloco_protocol.messages import Push

# Data sets of a run, and the tickets that one worker may hold of one: what it has taken, trained on and
# not seen counted yet.
MOST_DATA_SETS = 64
MOST_HELD = 1 << 20
# Rows of tickets that may lie free, for each worker that holds some and one more: with so many, no
# worker is given what would leave as many.
MOST_FREE_RANGES = 2 * MOST_RANGES
# A worker that outlived a broker may name tickets that the checkpoint has not handed out yet: so many.
MOST_AHEAD = 1 << 24


@dataclass
class DataSet:
    """One of them. Only the methods here change it."""

    size: int  # K, its units
    epochs: int  # 0: without an end
    seed: int | None  # of the order in each epoch; None: as they are numbered
    next: int = 0  # tickets below it have been handed out
    free: Spans = field(default_factory=Spans)  # those of them that were given back
    held: dict[str, Spans] = field(default_factory=dict)  # by worker id; none is empty

    @property
    def uncounted(self) -> Spans:
        """Tickets below `next` that are in no version."""
        found = self.free.copy()
        for spans in self.held.values():
            found = found | spans
        return found

    @property
    def counted(self) -> int:
        return self.next - len(self.free) - sum(len(spans) for spans in self.held.values())

    @property
    def oldest(self) -> int:
        """The first ticket that is not counted."""
        starts = [spans.start for spans in (self.free, *self.held.values()) if spans]
        return min(starts, default=self.next)

    @property
    def end(self) -> int | None:
        """One more than the last ticket; None where there is none."""
        return self.size * self.epochs or None

    @property
    def is_over(self) -> bool:
        return self.end is not None and self.oldest >= self.end

    def of(self, worker_id: str) -> Spans:
        return self.held.get(worker_id, Spans())

    def take(self, worker_id: str, count: int) -> Spans:
        """Hand out so many tickets, or as many as are free."""
        count = min(count, MOST_HELD - len(self.of(worker_id)))
        found = Spans()
        while len(found) < count:
            wanted = count - len(found)
            at_epochs_end = self.next % self.size == 0
            if self.free and (at_epochs_end or self.free.ranges >= MOST_RANGES):
                again = self.free.first(wanted)
                self.free, found = self.free - again, found | again
            elif self.next == self.end:
                break
            else:
                stop = min(self.next + wanted, self.next - self.next % self.size + self.size)
                found.add(self.next, stop)
                self.next = stop
        self._hold(worker_id, self.of(worker_id) | found)
        return found

    def claim(self, worker_id: str, spans: Spans) -> None:
        """A worker stands for these, and has those that are free again."""
        if self._scatters(worker_id, spans):
            spans = spans & self.of(worker_id)
        self._reach(spans)
        new = spans - self.of(worker_id)
        had = new & self.free
        self.free = self.free - had
        self._hold(worker_id, self.of(worker_id) | had)

    def can_claim(self, worker_id: str, spans: Spans) -> bool:
        """Whether all of them are its own or free, and it may have them."""
        is_there = self._is_near(spans) and not spans - self.of(worker_id) - self._reached(spans)
        return is_there and not self._scatters(worker_id, spans)

    def _scatters(self, worker_id: str, spans: Spans) -> bool:
        """Would too many rows lie free without these? Each costs memory, and time with each request."""
        new = spans - self.of(worker_id)
        left = (self._reached(new) - new).ranges if new else 0
        most = MOST_FREE_RANGES * (1 + len(self.held.keys() | {worker_id}))
        return left > most and left >= self.free.ranges

    def _reached(self, spans: Spans) -> Spans:
        """What is free once all up to these has been handed out."""
        ahead = (self.next, spans.stop) if self._is_near(spans) else (0, 0)
        return self.free | Spans(ahead)

    def _is_near(self, spans: Spans) -> bool:
        end = self.next + MOST_AHEAD
        return spans.stop <= (end if self.end is None else min(end, self.end))

    def _reach(self, spans: Spans) -> None:
        """A broker that is older than these were has handed them out in its former life."""
        if spans.stop > self.next and self._is_near(spans):
            self.free.add(self.next, spans.stop)
            self.next = spans.stop

    def count(self, worker_id: str, spans: Spans) -> None:
        """These are in a version: nothing of them is kept. Free ones are, where a broker is older."""
        if self._scatters(worker_id, spans):
            spans = spans & self.of(worker_id)
        self._reach(spans)
        self._hold(worker_id, self.of(worker_id) - spans)
        self.free = self.free - spans

    def give_back(self, worker_id: str, spans: Spans) -> None:
        """Of those that this worker holds."""
        again = self.of(worker_id) & spans
        self._hold(worker_id, self.of(worker_id) - again)
        self.free = self.free | again

    def _hold(self, worker_id: str, spans: Spans) -> None:
        self.held.pop(worker_id, None)
        if spans:
            self.held[worker_id] = spans

    def check_invariants(self) -> None:
        """Raise AssertionError where a ticket is in two places, or was never handed out; for tests."""
        parts = [self.free, *self.held.values()]
        assert len(self.uncounted) == sum(map(len, parts)), "a ticket is in two places"
        assert self.uncounted.stop <= self.next, "a ticket was never handed out"
        assert all(self.held.values()) and (self.end is None or self.next <= self.end)


@dataclass
class PendingLot:
    """Units whose last steps one push has, and the pushes that they count with."""

    units: dict[str, Spans]  # by data set
    push: Push  # the one that named them
    left: dict[int, int]  # by fragment, push ids that no version contains whole yet


@dataclass
class DataSets:
    """All of a run. Only the methods here change it."""

    sets: dict[str, DataSet] = field(default_factory=dict)
    lots: dict[str, list[PendingLot]] = field(default_factory=dict)  # by worker id

    def restore(self, records: Mapping[str, DataSetRecord]) -> None:
        """What a checkpoint has: whatever is not counted in it is free."""
        self.sets = {
            name: DataSet(
                each.size, each.epochs, each.seed, each.next, Spans.read(each.uncounted, None)
            )
            for name, each in records.items()
        }

    def records(self) -> dict[str, DataSetRecord]:
        return {
            name: DataSetRecord(each.size, each.epochs, each.next, each.uncounted.flat, each.seed)
            for name, each in self.sets.items()
        }

    def begin(self, name: str, data: DataSet) -> DataSet:
        self.sets[name] = data
        return data

    def add_lot(self, worker_id: str, lot: PendingLot) -> None:
        self.lots.setdefault(worker_id, []).append(lot)

    def has_lot(self, worker_id: str, push: Push) -> bool:
        return any(lot.push.push_id == push.push_id for lot in self.lots.get(worker_id, ()))

    def all_lots(self) -> Iterator[tuple[str, PendingLot]]:
        for worker_id, lots in list(self.lots.items()):
            for lot in list(lots):
                yield worker_id, lot

    def end_lot(self, worker_id: str, lot: PendingLot) -> None:
        self.lots[worker_id].remove(lot)
        if not self.lots[worker_id]:
            del self.lots[worker_id]

    def in_lots(self, worker_id: str, name: str) -> Spans:
        found = Spans()
        for lot in self.lots.get(worker_id, ()):
            found = found | lot.units.get(name, Spans())
        return found

    def check_invariants(self) -> None:
        for data in self.sets.values():
            data.check_invariants()
        for worker_id, lot in self.all_lots():
            for name, spans in lot.units.items():
                assert not spans - self.sets[name].of(worker_id), "a lot has what nobody holds"
