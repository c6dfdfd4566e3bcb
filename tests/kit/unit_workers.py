"""Workers that train on the units of a data set: puppets on the stage, each with a real book of units.

What is told of each push is which units really were trained for it: so a test can ask of the version at
the end how often it contains each unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from diloco_protocol.bitmap import Bitmap
from diloco_protocol.data.spans import Spans
from diloco_protocol.messages import Error, Grant, Push, Released, Result
from diloco_worker.core.connection import Connection
from diloco_worker.core.effects import Answered, Effect, Send
from diloco_worker.core.events import TakeUnits, UnitsTrained
from diloco_worker.core.units import Units
from kit.core_harness import Stage

NAME = "text"


class UnitWorker:
    """One of them. `size` and `epochs` are those of its data set."""

    def __init__(
        self, stage: Stage, worker_id: str, size: int = 10, epochs: int = 2, *, pulls: bool = True
    ) -> None:
        self.worker_id, self.size, self.epochs = worker_id, size, epochs
        self.trained_for: dict[int, list[int]] = {}  # by push id, the tickets trained for it
        self.in_hand: list[int] = []  # handed out and not trained on
        self.trained: list[int] = []  # since the last freeze
        self.push: Push | None = None  # the one in flight
        self.answers: list[Answered] = []  # to what it asked last
        self._connection = Connection(None)
        self.units = Units(self._connection)
        self._requests = self._delivered = 0
        self.stage, self.puppet = stage, stage.worker(worker_id)
        self.comes_to(stage, pulls=pulls)

    def comes_to(self, stage: Stage, *, pulls: bool = True, **fields: object) -> None:
        """Join, or come back on new connections; the push in flight is offered again."""
        if self.stage is not stage:
            self.stage, self.puppet = stage, stage.worker(self.worker_id)
        self.puppet.joins(**fields)
        self._seen = 0
        stage.provide()
        if pulls:
            self.puppet.pulls()
        self.units.disconnected()
        assert self.puppet.session is not None
        self._connection.is_welcomed(self.puppet.session, stage.config.run_config, stage.now)
        self._do(self.units.welcomed())
        if self.push is not None:
            self._offer()

    @property
    def is_here(self) -> bool:
        return self.worker_id in self.stage.state.members

    # Data.

    def takes(self, count: int) -> Answered | None:
        """Ask for so many units; returns the answer, if one came."""
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
        """On so many of the units in hand, by default all; one optimizer step each."""
        for ticket in self.in_hand[:count]:
            self.units.trained(UnitsTrained(NAME, (ticket,), (ticket,)))
        self.trained += self.in_hand[:count]
        self.in_hand = [] if count is None else self.in_hand[count:]

    # Rounds.

    def begins(self, push_id: int) -> None:
        """Freeze what was trained, and offer it."""
        layout = self.stage.state.model.layout
        push = Push(b"", push_id, 0, layout.fragments[0].chunks, "fp32")
        self.push = self.units.offered(push, layout)
        self.trained_for[push_id], self.trained = self.trained, []
        self._offer()

    def _offer(self) -> None:
        assert self.push is not None
        self.puppet.begins(self.push.push_id, lots=self.push.lots)
        self.looks()

    def completes(self) -> None:
        """Deliver what the broker lacks of the push in flight, if it takes anything of it now."""
        grants = [g for g in self.puppet.all(Grant) if self.push and g.push_id == self.push.push_id]
        if self.push is None or not grants or grants[-1].standing.value not in ("new", "resume"):
            return
        held = Bitmap(self.push.chunks)
        if grants[-1].held:
            held = Bitmap.from_bytes(grants[-1].held, self.push.chunks)
        self.puppet.push_id, self.puppet.fragment = self.push.push_id, 0
        self._delivered = self.push.push_id
        self.puppet.delivers(held.missing())
        self.puppet.commits()

    @property
    def has_delivered(self) -> bool:
        """All of the push in flight has been sent once."""
        return self.push is not None and self.push.push_id == self._delivered

    def blunders(self) -> None:
        """Deliver a chunk that is not finite."""
        self.puppet.delivers([0], is_finite=False)
        self.looks()

    def looks(self) -> None:
        """Hear what has become of the push in flight. One that was dropped leaves no steps."""
        if self.push is None:
            return
        push_id = self.push.push_id
        ledgers = [each.ledger for each in self.puppet.all(Released)]
        if any(ledger.names_whole(self.worker_id, push_id) for ledger in ledgers):
            self.push = None
            self.units.counted(push_id)
        elif any(e.push_id == push_id and not e.retry for e in self.puppet.all(Error)):
            self.push = None
        self._do(self.units.settle([] if self.push is None else [push_id]))
        self.units.check_invariants()

    def ticks(self) -> None:
        """A second later: what was put off is sent."""
        self._do(self.units.tick(self.stage.now + 1.0))

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
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
    """How often the current version contains each ticket, by what was really trained for its pushes."""
    trained = {(w.worker_id, push_id): t for w in lives for push_id, t in w.trained_for.items()}
    (contents,) = {frozenset(chunk.items()) for chunk in stage.counted()}
    found: Counter[int] = Counter()
    for key, times in contents:
        for ticket in trained.get(key, ()):
            found[ticket] += times
    return found


def free(stage: Stage) -> Spans:
    spans = stage.state.data.sets[NAME].free
    assert isinstance(spans, Spans)
    return spans
