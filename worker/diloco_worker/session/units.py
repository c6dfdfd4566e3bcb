"""The units of data sets that this worker holds, between the broker and the push they count with.

A unit is handed out, begun and ended by training. At the next freeze of each fragment its last steps
are in that push; the last of these pushes names it, and it counts with them. Where steps are lost (a
push was rejected, the model went back), their units are dropped, and the next `take` reports all that
this worker still holds. So does the first one on each new connection: a restarted broker learns what it
has handed out, and from the lots in it what has counted. Other requests carry no lots, which cost the
broker time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from diloco_protocol import ModelLayout
from diloco_protocol.data.spans import Spans
from diloco_protocol.messages import Error, Lot, Push, Result, Take
from diloco_worker.session import effects
from diloco_worker.session.connection import RETRY_S, Connection
from diloco_worker.session.events import TakeUnits, UnitsTrained

# Above the requests of control actions, which count from 1.
FIRST_REQUEST = 1 << 40
# Counted lots that are kept for a broker that restarts from an older checkpoint. A ledger keeps as many
# pushes of a worker.
LOTS_REMEMBERED = 8


@dataclass
class HeldUnits:
    """What is held of one data set, by offset."""

    take: TakeUnits  # the last request: name, size and order are the same in each
    held: Spans = field(default_factory=Spans)  # handed out, and in no known version
    begun: Spans = field(default_factory=Spans)  # of these, those in training
    ended: Spans = field(default_factory=Spans)  # and those trained completely, in no lot yet
    wanted: TakeUnits | None = None  # the request of the training thread
    sent: int | None = None  # the unanswered request on this connection
    is_answer: bool = False  # its answer is the one to `wanted`
    # Dropped during or before training: samples of them may still come.
    dropped: Spans = field(default_factory=Spans)
    is_due: bool = False  # report the held units
    has_news: bool = False  # and the counted lots, which the broker may not know
    retry_at: float | None = None

    def drop(self, spans: Spans) -> None:
        """This worker no longer holds these."""
        self.held, self.begun, self.ended = (
            each - spans for each in (self.held, self.begun, self.ended)
        )


@dataclass
class OpenLot:
    """Units whose last steps are, or will be, in one push of each fragment."""

    units: dict[str, Spans]  # by data set
    pushes: dict[int, int] = field(default_factory=dict)  # push ids by fragment
    counted: set[int] = field(default_factory=set)  # fragments of which the push is in a version
    # Of an earlier connection: a restarted broker may not know it, and have parameters with its pushes.
    is_older: bool = False


class Units:
    """The units of all data sets."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sets: dict[str, HeldUnits] = {}
        self._lots: list[OpenLot] = []
        self._counted: deque[Lot] = deque(maxlen=LOTS_REMEMBERED)
        # By push id, units that were in training when it was frozen.
        self._begun: dict[int, dict[str, Spans]] = {}
        self._last_request = FIRST_REQUEST
        self._fragments = 1

    @property
    def times(self) -> list[float]:
        """The deadlines of `tick`."""
        return [each.retry_at for each in self._sets.values() if each.retry_at is not None]

    @property
    def dropped(self) -> dict[str, Spans]:
        """By data set, units that must not be trained on any more, though samples of them may come."""
        return {name: each.dropped for name, each in self._sets.items() if each.dropped}

    # From training.

    def ask(self, take: TakeUnits) -> Iterator[effects.Effect]:
        """Request units; replaces an earlier request."""
        units = self._sets.setdefault(take.name, HeldUnits(take))
        units.take = units.wanted = take
        yield from self._send(units)

    def trained(self, event: UnitsTrained) -> None:
        """An optimizer step trained on these."""
        if (units := self._sets.get(event.name)) is None:
            return
        for ticket in event.begun:
            # Also one that others were given: its steps are in the model, so the broker must reject
            # the push with it.
            units.held.add(ticket, ticket + 1)
            units.begun.add(ticket, ticket + 1)
        for ticket in event.ended:
            if ticket in units.begun:  # else it was dropped
                units.begun.remove(ticket, ticket + 1)
                units.ended.add(ticket, ticket + 1)

    def steps_lost(self) -> None:
        """The steps since each fragment's last freeze are out of the model."""
        for units in self._sets.values():
            self._drop(units, units.begun | units.ended)
        for lot in list(self._lots):
            if len(lot.pushes) < self._fragments:
                self._drop_lot(lot)

    def offered(self, push: Push, layout: ModelLayout) -> Push:
        """The same push, with the units that count with it."""
        self._fragments = len(layout.fragments)
        ended = {name: each.ended for name, each in self._sets.items() if each.ended}
        if ended:
            self._lots.append(OpenLot(ended))
            for name in ended:
                self._sets[name].ended = Spans()
        begun = {name: each.begun.copy() for name, each in self._sets.items() if each.begun}
        if begun:
            self._begun[push.push_id] = begun
        whole = []
        for lot in self._lots:
            if push.fragment not in lot.pushes:
                lot.pushes[push.fragment] = push.push_id
                if len(lot.pushes) == self._fragments:
                    whole.append(_as_sent(lot))
        return replace(push, lots=tuple(whole)) if whole else push

    # How pushes end.

    def counted(self, push_id: int) -> None:
        """A version contains this push completely."""
        self._begun.pop(push_id, None)
        for lot in list(self._lots):
            lot.counted |= {f for f, each in lot.pushes.items() if each == push_id}
            if len(lot.counted) == self._fragments:
                self._lots.remove(lot)
                self._counted.append(_as_sent(lot))
                for name, spans in lot.units.items():
                    self._sets[name].drop(spans)
                    self._sets[name].is_due |= lot.is_older
                    self._sets[name].has_news |= lot.is_older

    def settle(self, in_flight: Collection[int]) -> Iterator[effects.Effect]:
        """Pushes that are neither in flight nor counted were dropped, and their steps are lost."""
        for push_id in [each for each in self._begun if each not in in_flight]:
            for name, spans in self._begun.pop(push_id).items():
                units = self._sets[name]
                self._drop(units, spans & (units.begun | units.ended))
        for lot in list(self._lots):
            open_ = {each for f, each in lot.pushes.items() if f not in lot.counted}
            if not open_ <= set(in_flight):
                self._drop_lot(lot)
        for units in self._sets.values():
            if units.is_due:
                yield from self._send(units)

    def _drop_lot(self, lot: OpenLot) -> None:
        self._lots.remove(lot)
        for name, spans in lot.units.items():
            self._drop(self._sets[name], spans)

    def _drop(self, units: HeldUnits, spans: Spans) -> None:
        if spans:
            units.dropped = units.dropped | (spans & units.begun)
            units.drop(spans)
            units.is_due = True

    # To the broker, and back.

    def welcomed(self) -> Iterator[effects.Effect]:
        for lot in self._lots:
            lot.is_older = True
        for units in self._sets.values():
            units.has_news = True
            yield from self._send(units)

    def disconnected(self) -> None:
        for units in self._sets.values():
            units.sent = units.retry_at = None

    def tick(self, now: float) -> Iterator[effects.Effect]:
        for units in self._sets.values():
            if units.retry_at is not None and now >= units.retry_at:
                units.retry_at = None
                yield from self._send(units)

    def _send(self, units: HeldUnits) -> Iterator[effects.Effect]:
        token = self._connection.live_token
        if token is None or units.sent is not None or units.retry_at is not None:
            return
        self._last_request += 1
        units.sent, units.is_due = self._last_request, False
        units.is_answer = units.wanted is not None
        take = units.take
        # Reset now, not with the answer: a lot that counts until then is news again.
        lots, units.has_news = tuple(self._counted) if units.has_news else (), False
        message = Take(
            token,
            units.sent,
            take.name,
            take.size,
            take.epochs,
            take.seed,
            count=units.wanted.count if units.wanted is not None else 0,
            holds=units.held.flat,
            lots=lots,
        )
        yield effects.Send(message)

    def answered(self, result: Result, now: float) -> Iterator[effects.Effect]:
        """The broker's answer to a request; ignores others."""
        found = [each for each in self._sets.values() if each.sent == result.request]
        if not found:
            return
        (units,) = found
        units.sent = None
        wanted = units.wanted if units.is_answer else None
        if not result.ok:
            yield from self._refused(units, result.text)
            return
        try:
            more, lost = (Spans.read(result.data[name]) for name in ("units", "lost"))
        except (KeyError, TypeError, ValueError) as error:
            yield from self._refused(units, f"The broker's answer cannot be read ({error!r:.100}).")
            return
        self._are_lost(units, lost)
        units.held, units.dropped = units.held | more, units.dropped - more
        if result.data.get("waits") is True:  # it has no parameters yet
            units.retry_at, units.has_news = now + RETRY_S, True
            return
        if wanted is not None:
            units.wanted = None if units.wanted is wanted else units.wanted
            data = {"units": more.flat, "is_over": result.data.get("is_over") is True}
            yield effects.Answered(wanted.request, True, "", data)
        if units.is_due or units.wanted is not None:
            yield from self._send(units)

    def _are_lost(self, units: HeldUnits, lost: Spans) -> None:
        """Other workers were given these. Trained ones stay: the push with them will be rejected."""
        trained = units.begun | units.ended
        for lot in self._lots:
            trained = trained | lot.units.get(units.take.name, Spans())
        units.drop(lost - trained)
        units.dropped = units.dropped | (lost - trained)

    def failed(self, error: Error) -> Iterator[effects.Effect]:
        """An error that names no push."""
        if error.about in (None, Take.kind):
            for units in self._sets.values():
                if units.sent is not None:
                    units.sent = None
                    yield from self._refused(units, error.text)

    def _refused(self, units: HeldUnits, text: str) -> Iterator[effects.Effect]:
        wanted, units.wanted = units.wanted, None
        units.has_news = True  # the broker may not have read the request
        if wanted is not None:
            yield effects.Answered(wanted.request, False, text)
        else:
            yield effects.Say(text, trouble=True)

    def check_invariants(self) -> None:
        """Raise AssertionError when an invariant is broken; for tests."""
        for name, units in self._sets.items():
            parts = [units.begun, units.ended]
            parts += [lot.units[name] for lot in self._lots if name in lot.units]
            together = Spans()
            for part in parts:
                together = together | part
            assert len(together) == sum(map(len, parts)), "a ticket is in two places"
        for lot in self._lots:
            assert lot.counted <= lot.pushes.keys()


def _as_sent(lot: OpenLot) -> Lot:
    pushes = tuple(push_id for _, push_id in sorted(lot.pushes.items()))
    return Lot(pushes, {name: spans.flat for name, spans in lot.units.items()})
