"""Carrying out what a session asks for: the one place where each effect is named.

Sockets and memory are handed in: the I/O thread has real ones, a simulation its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from diloco_protocol import Code
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import Chunk, Heartbeat, Message
from diloco_worker.core import effects, events
from diloco_worker.core.session import Session
from diloco_worker.shell.inbox import Inbox

# Rejections that are a matter of course: whoever moves on from one tells of it.
EXPECTED = (Code.LATE, Code.STALE)


class Network(Protocol):
    """The two connections to the broker, and what is known beside the session."""

    address: str

    def now(self) -> float: ...

    def open(self) -> None: ...

    def close(self) -> None: ...

    def send(self, message: Message, payload: Any = None, *, bulk: bool = False) -> None: ...

    def heartbeat(self, session: bytes, *, uploading: bool) -> Heartbeat:
        """How training stands."""

    def welcomed(self, epoch: str) -> None:
        """The broker has taken this worker in."""

    def say(self, text: str, *, trouble: bool = False) -> None: ...


class Memory(Protocol):
    """The values of fragments: arriving, held, being sent."""

    def begin(self, layout: FragmentLayout) -> None:
        """Chunks of a version begin to arrive. What was assembled of another one is overwritten."""

    def store(self, fragment: int, index: int, payload: Any, wire_dtype: str) -> None:
        """Keep a chunk that has arrived."""

    def finish(self, fragment: int) -> Any:
        """The version that was assembled is whole, and held from now on. Returns its values."""

    def held(self, fragment: int) -> Any:
        """The values that are held; None where no copy is kept."""

    def forget(self) -> None:
        """Nothing is held any more."""

    def prepare(self, push_id: int, layout: FragmentLayout) -> bool:
        """Lay out what is held as a donation. Returns False where that takes a while: the session
        gets `Prepared` later."""

    def chunk(self, push_id: int, fragment: int, index: int) -> Any:
        """The payload of a chunk to be sent."""

    def drop(self, push_id: int) -> None:
        """This push is over."""


class Executor:
    """See the head of this module.

    Args:
        noticed: called with each effect before it is carried out.

    Attributes:
        payload: of the chunk that the session is told of.
    """

    def __init__(
        self,
        session: Session,
        inbox: Inbox,
        network: Network,
        memory: Memory,
        noticed: Callable[[effects.Effect], None],
    ) -> None:
        self.payload: Any = None
        self._session = session
        self._inbox = inbox
        self._network = network
        self._memory = memory
        self._noticed = noticed

    def feed(self, event: events.Event) -> None:
        """Let the session take in an event, and carry out what it asks for."""
        for effect in self._session.handle(event, self._network.now()):
            self._noticed(effect)
            self._carry_out(effect)

    def _carry_out(self, effect: effects.Effect) -> None:  # noqa: C901, PLR0912  a case for each effect
        network, memory, inbox = self._network, self._memory, self._inbox
        match effect:
            case effects.Open():
                network.open()
            case effects.Close():
                network.close()
            case effects.Send(message, bulk):
                network.send(message, bulk=bulk)
            case effects.SendChunk(session, push_id, fragment, index):
                chunk = Chunk(fragment, index, session=session, push_id=push_id)
                network.send(chunk, memory.chunk(push_id, fragment, index), bulk=True)
            case effects.Beat(session, uploading):
                network.send(network.heartbeat(session, uploading=uploading))
            case effects.BeginVersion(fragment):
                memory.begin(self._part(fragment))
            case effects.StoreChunk(fragment, index):
                assert self._session.config is not None
                memory.store(fragment, index, self.payload, self._session.config.reply_dtype)
            case effects.Deliver(released, _, unchanged):
                fragment = released.fragment
                values = memory.held(fragment) if unchanged else memory.finish(fragment)
                inbox.deliver(effect, values)
            case effects.PrepareDonation(push_id, fragment):
                if memory.prepare(push_id, self._part(fragment)):
                    self.feed(events.Prepared(push_id))
            case effects.PushOver(push_id, code, text):
                memory.drop(push_id)
                if code is not None:
                    inbox.reject(push_id, code, text)
                    if code not in EXPECTED:
                        network.say(f"The broker refuses the pseudo-gradient: {text}", trouble=True)
            case effects.DropParts():
                memory.forget()
                inbox.drop_arrivals()
            case _:
                self._tell(effect)

    def _tell(self, effect: effects.Effect) -> None:
        """What the training thread is to know, and people."""
        network, inbox = self._network, self._inbox
        match effect:
            case effects.Joined(welcome, _, again):
                inbox.joined(effect)
                network.welcomed(welcome.epoch)
                how = "Back at" if again else "Joined the run at"
                network.say(f"{how} {network.address}, expected from round {welcome.first_round}.")
            case effects.JoinRefused(code, text, final):
                inbox.refused(code, text, final=final)
                network.say(text, trouble=True)
            case effects.ForgetCheckpoint(text):
                self._memory.forget()
                inbox.has_forgotten = True
                network.say(text, trouble=True)
            case effects.Answered():
                inbox.answered(effect)
            case effects.Granted() | effects.Carried():
                inbox.turn(effect)
            case effects.Paced(sync_every):
                inbox.sync_every = sync_every
            case effects.Stopping(text):
                inbox.stopping = text
                network.say(text)
            case effects.Restarting(text):
                inbox.restarting = text
                network.say(f"{text} Training goes on, and takes part again when it is back.")
            case effects.Say(text, trouble):
                network.say(text, trouble=trouble)
            case _:
                raise TypeError(f"not an effect of a session: {effect!r}")

    def _part(self, fragment: int) -> FragmentLayout:
        assert self._session.layout is not None
        return self._session.layout.all[fragment]
