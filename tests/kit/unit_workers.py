"""Workers that train on the units of a data set: puppets on the stage, each with a real book of units.

What is told of each push is which units really were trained for it: so a test can ask of the version at
the end how often it contains each unit.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from diloco_protocol.bitmap import Bitmap
from diloco_protocol.data.spans import Spans
from diloco_protocol.messages import Error, Grant, Push, Released, Result, Take
from diloco_protocol.version import VersionId
from diloco_worker.session.connection import Connection
from diloco_worker.session.effects import Answered, Effect, Send
from diloco_worker.session.events import TakeUnits, UnitsTrained
from diloco_worker.session.units import Units
from kit.core_harness import Holdings, Stage

NAME = "text"


@dataclass
class Trained:
    """A ticket that was trained on, and by fragment the push that has its last steps there."""

    ticket: int
    pushes: dict[int, int] = field(default_factory=dict)
    is_lost: bool = False  # the model went back before all of these were frozen


class UnitWorker:
    """One of them. `size` and `epochs` are those of its data set."""

    def __init__(
        self, stage: Stage, worker_id: str, size: int = 10, epochs: int = 2, *, pulls: bool = True
    ) -> None:
        self.worker_id, self.size, self.epochs = worker_id, size, epochs
        self.pieces = stage.config.num_fragments
        self.in_hand: list[int] = []  # handed out and not trained on
        self.trained: list[Trained] = []  # in all its incarnation
        self.in_flight: dict[int, Push] = {}  # by fragment
        self.answers: list[Answered] = []  # to what it asked last
        self.asked: list[Take] = []  # of the broker, in all its incarnation
        self._connection = Connection(None)
        self.units = Units(self._connection)
        self._bases: dict[int, VersionId] = {}  # by fragment
        self._held: Holdings = ()
        self._delivered: set[int] = set()
        self._last_fragment = -1
        self._requests = 0
        self.stage, self.puppet = stage, stage.worker(worker_id)
        self.comes_to(stage, pulls=pulls)

    def comes_to(self, stage: Stage, *, pulls: bool = True, holds_versions: bool = False) -> None:
        """Join, or come back on new connections; the pushes in flight are offered again.

        `holds_versions`: it tells a broker that was started again which versions it has.
        """
        if self.stage is not stage:
            self.stage, self.puppet = stage, stage.worker(self.worker_id)
        if holds_versions:
            self.puppet.comes_with(self._held)
        else:
            self.puppet.joins()
            stage.provide()
        self._seen = 0
        if pulls:
            self.pulls()
        self.units.disconnected()
        assert self.puppet.session is not None
        self._connection.is_welcomed(self.puppet.session, stage.config.run_config, stage.now)
        self._do(self.units.welcomed())
        self._offer_again()

    def is_back(self) -> None:
        """The broker has parameters again: do the deferred work."""
        self.pulls()
        self.ticks()
        self._offer_again()

    def _offer_again(self) -> None:
        for fragment in sorted(self.in_flight):
            if fragment in self.in_flight:  # the others may have settled it
                self._offer(fragment)

    @property
    def push(self) -> Push | None:
        """The one in flight of the first fragment."""
        return self.in_flight.get(0)

    @property
    def is_here(self) -> bool:
        return self.worker_id in self.stage.state.members

    # Data.

    def takes(self, count: int) -> Answered | None:
        """Ask for `count` units; returns the answer, if one came."""
        self._requests += 1
        self.answers.clear()
        self._do(
            self.units.ask(TakeUnits(self._requests, NAME, self.size, self.epochs, None, count))
        )
        for answer in self.answers:
            new = Spans.read(answer.data["units"])
            self.in_hand += [ticket for start, stop in new for ticket in range(start, stop)]
        return self.answers[-1] if self.answers else None

    def trains(self, count: int | None = None) -> None:
        """Train on `count` of the units in hand, by default all; one optimizer step each."""
        for ticket in self.in_hand[:count]:
            self.units.trained(UnitsTrained(NAME, (ticket,), (ticket,)))
        self.trained += map(Trained, self.in_hand[:count])
        self.in_hand = [] if count is None else self.in_hand[count:]

    def goes_back(self) -> None:
        """The steps since each fragment's last freeze are out of the model."""
        for each in self.trained:
            each.is_lost |= len(each.pushes) < self.pieces
        self.units.steps_lost()
        self.looks()

    # Rounds.

    def pulls(self) -> None:
        for fragment in range(self.pieces):
            self.puppet.pulls(fragment=fragment)
        for released in self.puppet.all(Released):
            self._bases[released.fragment] = released.version
        self._held = self.stage.holdings()

    def begins(self, push_id: int, fragment: int = 0) -> None:
        """Freeze the trained units, and offer the push."""
        layout = self.stage.state.model.layout
        self._last_fragment = fragment
        base = self._bases.get(fragment) or self.stage.version(fragment)
        push = Push(b"", push_id, fragment, layout.fragments[fragment].chunks, "fp32", base=base)
        self.in_flight[fragment] = self.units.offered(push, layout)
        for each in self.trained:
            if not each.is_lost:
                each.pushes.setdefault(fragment, push_id)
        self._offer(fragment)

    def begins_next(self, push_id: int) -> None:
        """Freeze the fragment that the run waits for, or else the first that is not in flight."""
        first = self.stage.round.fragment
        if self.stage.config.is_async:  # their order is the worker's own
            first = (self._last_fragment + 1) % self.pieces
        for offset in range(self.pieces):
            fragment = (first + offset) % self.pieces
            if fragment not in self.in_flight:
                self.begins(push_id, fragment)
                return

    def _offer(self, fragment: int) -> None:
        push = self.in_flight[fragment]
        self.puppet.push_id, self.puppet.fragment = push.push_id, fragment
        self.puppet.sends(replace(push, session=self.puppet.token()))
        self.looks()

    def completes(self) -> None:
        """Deliver what the broker lacks of the pushes in flight, if it takes anything of them now."""
        for push in list(self.in_flight.values()):
            grants = [each for each in self.puppet.all(Grant) if each.push_id == push.push_id]
            if not grants or grants[-1].standing.value not in ("new", "resume"):
                continue
            held = Bitmap(push.chunks)
            if grants[-1].held:
                held = Bitmap.from_bytes(grants[-1].held, push.chunks)
            self.puppet.push_id, self.puppet.fragment = push.push_id, push.fragment
            self._delivered.add(push.push_id)
            self.puppet.delivers(held.missing())
            self.puppet.commits()

    def blunders(self) -> None:
        """Deliver a chunk that is not finite, of a push of which nothing was sent yet."""
        for push in self.in_flight.values():
            if push.push_id not in self._delivered:
                self.puppet.push_id, self.puppet.fragment = push.push_id, push.fragment
                self.puppet.delivers([0], is_finite=False)
                break
        self.looks()

    def looks(self) -> None:
        """Hear what has become of the push in flight. One that was dropped leaves no steps."""
        ledgers = [each.ledger for each in self.puppet.all(Released)]
        for fragment, push in list(self.in_flight.items()):
            push_id = push.push_id
            if any(ledger.names_whole(self.worker_id, push_id) for ledger in ledgers):
                del self.in_flight[fragment]
                self.units.counted(push_id)
            elif any(e.push_id == push_id and not e.retry for e in self.puppet.all(Error)):
                del self.in_flight[fragment]
        self._do(self.units.settle([push.push_id for push in self.in_flight.values()]))
        self.units.check_invariants()

    def ticks(self) -> None:
        self._do(self.units.tick(self.stage.now + 1.0))

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                if isinstance(effect.message, Take):
                    self.asked.append(effect.message)
                self.puppet.sends(effect.message)
            if isinstance(effect, Answered):
                self.answers.append(effect)
        for result in self._new_results():
            self._do(self.units.answered(result, self.stage.now))

    def _new_results(self) -> Iterator[Result]:
        while self._seen < len(results := self.puppet.all(Result)):
            self._seen += 1
            yield results[self._seen - 1]


def a_unit_round(workers: Iterable[UnitWorker], first_push: int, count: int = 3) -> None:
    """Each takes units, trains on them and pushes; the round closes."""
    workers = list(workers)
    for worker in workers:
        worker.takes(count)
        worker.trains()
    for place, worker in enumerate(workers):
        worker.begins(first_push + place)
        worker.completes()
    for worker in workers:
        worker.puppet.pulls()
        worker.looks()


def times_contained(stage: Stage, lives: Iterable[UnitWorker]) -> Counter[int]:
    """How often the current versions contain each ticket, by the units really trained for their pushes.

    A ticket of which the last steps are in no version of some fragment is not in the parameters: it was
    lost there, and trained on again.
    """
    contents = []
    for fragment in range(stage.config.num_fragments):
        (found,) = {frozenset(chunk.items()) for chunk in stage.counted(fragment)}
        contents.append(dict(found))
    times: Counter[int] = Counter()
    for worker in lives:
        for each in worker.trained:
            # -1: it is in no push of this fragment.
            keys = [(worker.worker_id, each.pushes.get(f, -1)) for f in range(worker.pieces)]
            many = min(in_it.get(key, 0) for key, in_it in zip(keys, contents, strict=True))
            if many and not each.is_lost:
                times[each.ticket] += many
    return times


def free(stage: Stage) -> Spans:
    spans = stage.state.data.sets[NAME].free
    assert isinstance(spans, Spans)
    return spans
