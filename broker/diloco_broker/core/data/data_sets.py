"""Data sets whose units the broker hands out: each unit goes to one worker in each epoch.

The states of a unit in one epoch:

    free -> handed out -> in a contribution -> counted
      ^         |                |
      +---------+----------------+   its worker is gone or returns it; the contribution does not count

A *ticket* numbers a unit over all epochs (`diloco_protocol.data.order`), so a data set is a sequence of
tickets. Those below `next` have been handed out: some of them were returned and are free, some are held
by workers, and the others are counted and take no memory. Returned tickets are handed out again after
the rest of their epoch, so that a worker which reconnects before that gets its own back. The next epoch
starts when no ticket of this one is free, even if workers still hold some: a worker that waited for
those would never reach the boundary at which its own count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from diloco_broker.core.versions.record import DataSetRecord
from diloco_protocol.data.spans import MOST_RANGES, Spans
from diloco_protocol.messages import Push

# Data sets of a run; more are refused, since each takes memory.
MOST_DATA_SETS = 64
# Tickets of a data set that one worker may hold: those that it took and that are not counted yet.
MOST_HELD = 1 << 20
# Ranges of free tickets, for each worker that holds some and one more. A claim that would leave more is
# refused: each range takes memory, and time with each request.
MOST_FREE_RANGES = 2 * MOST_RANGES
# Tickets beyond `next` that a worker may name: it may have received them from an earlier incarnation of
# the broker, after its last checkpoint.
MOST_AHEAD = 1 << 24


@dataclass
class DataSet:
    """A data set and its tickets. Only the methods here change it."""

    size: int  # K, its units
    epochs: int  # 0: no limit
    seed: int | None  # of the order in each epoch; None: in the order of their numbers
    next: int = 0  # tickets below it have been handed out
    free: Spans = field(default_factory=Spans)  # those of them that were returned
    held: dict[str, Spans] = field(default_factory=dict)  # by worker id; none is empty

    @property
    def uncounted(self) -> Spans:
        """Tickets below `next` that no version contains."""
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
        """One more than the last ticket; None for unlimited epochs."""
        return self.size * self.epochs or None

    @property
    def is_over(self) -> bool:
        return self.end is not None and self.oldest >= self.end

    def of(self, worker_id: str) -> Spans:
        return self.held.get(worker_id, Spans())

    def take(self, worker_id: str, count: int) -> Spans:
        """Hand out up to `count` tickets."""
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
        """Give a worker those of these tickets that are free."""
        if self._leaves_too_many_ranges(worker_id, spans):
            spans = spans & self.of(worker_id)
        self._advance_past(spans)
        new = spans - self.of(worker_id)
        had = new & self.free
        self.free = self.free - had
        self._hold(worker_id, self.of(worker_id) | had)

    def can_claim(self, worker_id: str, spans: Spans) -> bool:
        """Whether a worker holds or may be given all of these tickets."""
        is_there = self._is_near(spans) and not spans - self.of(worker_id) - self._free_after(spans)
        return is_there and not self._leaves_too_many_ranges(worker_id, spans)

    def _leaves_too_many_ranges(self, worker_id: str, spans: Spans) -> bool:
        """Whether handing out these tickets would leave too many ranges of free ones."""
        new = spans - self.of(worker_id)
        left = (self._free_after(new) - new).ranges if new else 0
        most = MOST_FREE_RANGES * (1 + len(self.held.keys() | {worker_id}))
        return left > most and left >= self.free.ranges

    def _free_after(self, spans: Spans) -> Spans:
        """The free tickets if `next` moved to the end of these."""
        ahead = (self.next, spans.stop) if self._is_near(spans) else (0, 0)
        return self.free | Spans(ahead)

    def _is_near(self, spans: Spans) -> bool:
        end = self.next + MOST_AHEAD
        return spans.stop <= (end if self.end is None else min(end, self.end))

    def _advance_past(self, spans: Spans) -> None:
        """Move `next` past tickets that an earlier incarnation of the broker has handed out."""
        if spans.stop > self.next and self._is_near(spans):
            self.free.add(self.next, spans.stop)
            self.next = spans.stop

    def count(self, worker_id: str, spans: Spans) -> None:
        """Count tickets that a version contains: take them from this worker, and from the free ones."""
        if self._leaves_too_many_ranges(worker_id, spans):
            spans = spans & self.of(worker_id)
        self._advance_past(spans)
        self._hold(worker_id, self.of(worker_id) - spans)
        self.free = self.free - spans

    def give_back(self, worker_id: str, spans: Spans) -> None:
        """Return those of these tickets that this worker holds."""
        again = self.of(worker_id) & spans
        self._hold(worker_id, self.of(worker_id) - again)
        self.free = self.free | again

    def _hold(self, worker_id: str, spans: Spans) -> None:
        self.held.pop(worker_id, None)
        if spans:
            self.held[worker_id] = spans

    def check_invariants(self) -> None:
        """Raise AssertionError if a ticket has two states, or was never handed out; for tests."""
        parts = [self.free, *self.held.values()]
        assert len(self.uncounted) == sum(map(len, parts)), "a ticket has two states"
        assert self.uncounted.stop <= self.next, "a ticket was never handed out"
        assert all(self.held.values()) and (self.end is None or self.next <= self.end)


@dataclass
class PendingLot:
    """A batch of units, which counts once a version contains the last steps on them."""

    units: dict[str, Spans]  # by data set
    push: Push  # the one that named them
    left: dict[int, int]  # by fragment, ids of pushes that no version completely contains yet


@dataclass
class DataSets:
    """All data sets of a run, and batches of units in pushes. Only the methods here change it."""

    sets: dict[str, DataSet] = field(default_factory=dict)
    lots: dict[str, list[PendingLot]] = field(default_factory=dict)  # by worker id

    def restore(self, records: Mapping[str, DataSetRecord]) -> None:
        """Continue from a checkpoint: the tickets that it does not count are free."""
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
                missing = spans - self.sets[name].of(worker_id)
                assert not missing, "a batch has units that its worker does not hold"
