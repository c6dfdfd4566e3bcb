"""Executes the effects of the core on ports.

The broker's loop, the simulated broker and the tests' harness each provide the ports. So all of them
execute effects in the same order, which tests rely on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from diloco_broker.core import effects
from diloco_broker.core.effects import (
    Effect,
    Log,
    RecordAction,
    RecordVersion,
    RoundReport,
    Route,
    Send,
)
from diloco_broker.core.events import Event, Now, PeerGone, Split
from diloco_broker.core.machine import Core
from diloco_protocol.errors import UsageError
from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import Ack

# Returns the fragment of each tensor of a model; raises UsageError if the model cannot be split.
SplitOf = Callable[[Manifest], tuple[int, ...]]


class TensorPort(Protocol):
    """The tensors of a run."""

    def add(self, work: effects.TensorWork | effects.AtOnce) -> None:
        """Queue work, whose result returns as an event, or execute an `AtOnce` immediately."""


class Ports(Protocol):
    """The operations that a broker, a simulated broker and a test implement differently."""

    @property
    def tensors(self) -> TensorPort: ...

    def send(self, send: Send) -> bool:
        """Send a message; returns False if the connection no longer exists."""

    def disconnect(self, route: Route) -> None:
        """End a connection."""

    def write(self, record: effects.Record) -> None:
        """Write a record to the log, the history or the audit."""

    def save(self, save: effects.Save) -> None:
        """Write a checkpoint of the tensors as they are now; returns at once."""

    def read(self, read: effects.ReadCheckpoint) -> None:
        """Read a part of a checkpoint and send it to the peer that requested it."""

    def end(self, end: effects.End) -> None:
        """Start the shutdown that the core requested."""

    def finish(self, save: effects.Save | None) -> None:
        """The core has finished: write this checkpoint, if any, wait for pending writes, and exit."""

    def handled(self, event: Event) -> None:
        """Called after an event is handled and its effects are executed."""


class Acks:
    """Pending acknowledgements; `chunks` is the number of chunks that they acknowledge.

    They are sent before any other message: a later `grant` to the same worker resets its credit, so it
    must not overtake an earlier `ack`.
    """

    def __init__(self) -> None:
        self._acks: dict[tuple[Route, int, int, int], Ack] = {}
        self.chunks = 0

    def add(self, route: Route, ack: Ack) -> None:
        key = (route, ack.push_id, ack.fragment, ack.lane)
        self.chunks += len(ack.chunks)
        before = self._acks.get(key)
        if before is not None:
            chunks, credit = before.chunks + ack.chunks, before.credit + ack.credit
            ack = Ack(ack.push_id, ack.fragment, chunks, credit, ack.lane)
        self._acks[key] = ack

    def take(self) -> list[Send]:
        """Remove all acknowledgements, and return them as messages."""
        gathered, self._acks, self.chunks = self._acks, {}, 0
        return [Send(route, ack) for (route, *_), ack in gathered.items()]


class Noted(Protocol):
    """Records events, as a tape does."""

    def note(self, event: Event, now: Now, asked_for: Sequence[Effect] | None) -> None:
        """Record an event and its effects; None: the core raised an exception."""


class Executor:
    """Feeds events to the core and executes the effects, in order.

    Acknowledgements are collected until `acknowledge` is called or another message is sent. `split` is
    the user's function that splits the model, if any; `tape` records the events.
    """

    def __init__(
        self,
        core: Core,
        clock: Callable[[], Now],
        ports: Ports,
        split: SplitOf | None = None,
        tape: Noted | None = None,
    ) -> None:
        self._core = core
        self._clock = clock
        self._ports = ports
        self._split_of = split
        self._tape = tape
        self._acks = Acks()
        self._pending: deque[Event] = deque()

    def feed(self, *events: Event) -> None:
        """Handle these events, and the events that their effects cause."""
        self._pending += events
        while self._pending:
            event = self._pending.popleft()
            now = self._clock()
            asked_for: list[Effect] | None = None
            try:
                asked_for = self._core.handle(event, now)
            finally:
                if self._tape is not None:
                    self._tape.note(event, now, asked_for)
            for effect in asked_for:
                self._carry_out(effect)
            self._ports.handled(event)

    @property
    def unacknowledged(self) -> int:
        """Number of chunks with pending acknowledgements."""
        return self._acks.chunks

    def acknowledge(self) -> bool:
        """Send pending acknowledgements; returns True if that caused events, which are then handled."""
        self._send_acks()
        if not self._pending:
            return False
        self.feed()
        return True

    def _carry_out(self, effect: Effect) -> None:
        ports = self._ports
        match effect:
            case Send(route, Ack() as ack):
                self._acks.add(route, ack)
            case Send():
                if effect.payload is None:  # chunks use another connection
                    self._send_acks()
                self._send(effect)
            case effects.Fold() | effects.Inspect() | effects.Step():  # the most frequent first
                ports.tensors.add(effect)
            case effects.SplitModel():
                self._pending.append(self._split(effect))
            case effects.Disconnect(route):
                ports.disconnect(route)
            case effects.Save():
                ports.save(effect)
            case effects.ReadCheckpoint():
                ports.read(effect)
            case effects.End():
                ports.end(effect)
            case effects.Finish(save):
                ports.finish(save)
            case Log() | RecordAction() | RoundReport() | RecordVersion():
                ports.write(effect)
            case _:
                ports.tensors.add(effect)

    def _split(self, asked: effects.SplitModel) -> Split:
        assert self._split_of is not None
        try:
            return Split(asked, self._split_of(asked.manifest))
        except UsageError as error:
            return Split(asked, error=str(error))

    def _send_acks(self) -> None:
        if self._acks.chunks:
            for send in self._acks.take():
                self._send(send)

    def _send(self, send: Send) -> None:
        if not self._ports.send(send):
            self._pending.append(PeerGone(send.route))
