"""Executes the effects of a session, with the sockets and memory of a link or a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from diloco_protocol import Code
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.dtypes import whole_dtype
from diloco_protocol.messages import Chunk, Heartbeat, Lane, Message, Notice, Push, Welcome
from diloco_worker.session import effects, events
from diloco_worker.session.session import Session
from diloco_worker.transport.inbox import Inbox

# Rejections that training handles without a warning here.
EXPECTED = (Code.LATE, Code.STALE)
# Effects that the training thread does not receive.
QUIET = (
    *(effects.Send, effects.SendChunk, effects.Beat, effects.BeginVersion),
    *(effects.StoreChunk, effects.NameFrozen),
)
# Effects for the training thread or the log alone.
TOLD = (effects.JoinRefused, effects.Told, effects.Answered, effects.Say)


class Network(Protocol):
    """The two connections to the broker, and facts that the session lacks."""

    address: str
    shortcut: str  # the Unix socket that chunks go through; empty where there is none

    @property
    def progress(self) -> Heartbeat:
        """The next heartbeat; its session is filled in on sending."""

    def now(self) -> float: ...
    def connect(self, place: int, /) -> None: ...  # to this one of the addresses
    def disconnect(self) -> None: ...
    def send(self, message: Message, payload: Any = None, *, bulk: bool = False) -> None: ...
    def welcomed(self, epoch: str, /) -> object: ...  # the broker accepted this worker
    def say(self, text: str, *, trouble: bool = False) -> None: ...


class Others(Protocol):
    """The other processes of this worker, each with a data connection (lane)."""

    def open(
        self, address: str, bindings: tuple[Lane, ...], reply_dtype: str, shortcut: str
    ) -> None: ...
    def send(self, effect: effects.SendChunk) -> None: ...
    def seed(self, push: Push) -> None: ...  # lay out their part of a seeding push
    def over(self, push_id: int) -> None: ...


class Memory(Protocol):
    """The values of fragments: arriving, held, being sent."""

    def begin(self, layout: FragmentLayout) -> None: ...  # overwrites an unfinished version
    def store(self, fragment: int, index: int, payload: Any, wire_dtype: str) -> None: ...
    def follow(
        self, fragment: int, index: int, payload: Any, wire_dtype: str, parts: Sequence[int]
    ) -> int | None:
        """Store a chunk that is a difference from the held version, in codes of these lengths.

        Returns the checksum of the result; None where no version is held.
        """

    def finish(self, fragment: int) -> Any: ...  # holds the assembled version; returns its values
    def held(self, fragment: int) -> Any: ...  # None where no copy is kept
    def forget(self) -> None: ...  # discards held versions
    def prepare(self, push_id: int, layout: FragmentLayout) -> bool:
        """Lay out the held version for seeding. False where it takes long: `Prepared` follows."""

    def name(self, layout: FragmentLayout) -> None: ...  # `FrozenNamed` follows
    def chunk(self, push_id: int, fragment: int, index: int) -> Any: ...  # the payload to be sent
    def drop(self, push_id: int) -> None: ...


@dataclass(eq=False, repr=False)
class Executor:
    """Feeds events to a session and executes its effects."""

    session: Session
    inbox: Inbox
    network: Network
    memory: Memory
    noticed: Callable[[effects.Effect], None] = lambda _: None  # called before each effect
    payload: Any = None  # of the received chunk
    others: Others | None = None  # None for a worker of one process

    def feed(self, event: events.Event) -> None:
        """Feed an event to the session, and execute its effects."""
        for effect in self.session.handle(event, self.network.now()):
            self.noticed(effect)
            values = self._carry_out(effect)
            if not isinstance(effect, QUIET):
                self.inbox.take_in(effect, values)
                self._say(effect)

    def _carry_out(self, effect: effects.Effect) -> Any:  # noqa: C901, PLR0912  a case for each effect
        """Returns the values of a delivered version."""
        network, memory, others = self.network, self.memory, self.others
        match effect:
            case effects.Open(place):
                network.connect(place)
            case effects.Close():
                network.disconnect()
            case effects.Send(message, bulk):
                network.send(message, bulk=bulk)
            case effects.OpenLanes(bindings):
                assert others is not None and self.session.config is not None
                wire = self.session.config.reply_dtype
                others.open(network.address, bindings, wire, network.shortcut)
            case effects.SendChunk() if effect.lane:
                assert others is not None
                others.send(effect)
            case effects.SendChunk(session, push_id, fragment, index):
                chunk = Chunk(fragment, index, session=session, push_id=push_id)
                network.send(chunk, memory.chunk(push_id, fragment, index), bulk=True)
            case effects.Beat(session, uploading):
                beat = replace(network.progress, session=session)
                network.send(replace(beat, state="pushing") if uploading else beat)
            case effects.BeginVersion(fragment):
                memory.begin(self._part(fragment))
            case effects.StoreChunk(fragment, index, parts, wanted):
                assert self.session.config is not None
                wire = self.session.config.reply_dtype
                if not parts:
                    memory.store(fragment, index, self.payload, whole_dtype(wire))
                else:
                    found = memory.follow(fragment, index, self.payload, wire, parts)
                    is_good = found == wanted
                    self.feed(events.Followed(fragment) if is_good else events.Spoilt(fragment))
            case effects.Deliver(released, _, unchanged):
                fragment = released.fragment
                return memory.held(fragment) if unchanged else memory.finish(fragment)
            case effects.PrepareSeeding(push_id, fragment):
                if others is not None:
                    others.seed(self.session.uploads.by_id[push_id].push)
                if memory.prepare(push_id, self._part(fragment)):
                    self.feed(events.Prepared(push_id))
            case effects.NameFrozen(fragment):
                memory.name(self._part(fragment))
            case effects.PushOver(push_id):
                if others is not None:
                    others.over(push_id)
                memory.drop(push_id)
            case effects.DropParts() | effects.ForgetCheckpoint():
                memory.forget()
            case _ if not isinstance(effect, TOLD):
                raise TypeError(f"not an effect of a session: {effect!r}")
        return None

    def _say(self, effect: effects.Effect) -> None:
        """Log an effect."""
        network = self.network
        match effect:
            case effects.Told(Welcome() as welcome):
                network.welcomed(welcome.epoch)
                is_back = self.session.connection.reconnections > 0
                how = "Back at" if is_back else "Joined the run at"
                network.say(f"{how} {network.address}, expected from round {welcome.first_round}.")
            case effects.PushOver(_, code, text) if code is not None and code not in EXPECTED:
                network.say(f"The broker refuses the pseudo-gradient: {text}", trouble=True)
            case effects.JoinRefused(_, text) | effects.ForgetCheckpoint(text):
                network.say(text, trouble=True)
            case effects.Told(Notice("shutdown" | "kicked", text)):
                network.say(text)
            case effects.Told(Notice("restarting", text)):
                network.say(f"{text} Training goes on, and takes part again when it is back.")
            case effects.Say(text, trouble):
                network.say(text, trouble=trouble)

    def _part(self, fragment: int) -> FragmentLayout:
        assert self.session.layout is not None
        return self.session.layout.all[fragment]
