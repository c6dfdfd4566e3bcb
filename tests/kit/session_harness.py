"""A desk for the worker's session: a fake clock, a scripted broker, effects to look at."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeVar

from diloco_protocol import Counted, Kind, Ledger, Manifest, RunConfig, TensorEntry, VersionId
from diloco_protocol.messages import Chunk, Join, Message, Push, Released, Welcome
from diloco_worker.session.connection import LONGEST_BACKOFF_S
from diloco_worker.session.downloads import Held
from diloco_worker.session.effects import Effect, Open, Send, SendChunk
from diloco_worker.session.events import Connected, Disconnected, Event, Received, Start, Tick
from diloco_worker.session.session import Session

RUN = "0123456789abcdef"
CONFIG = RunConfig(mode="sync", sync_every=5, chunk_elements=10, heartbeat_timeout=30.0)
# 10 chunks of parameters, then none of buffers; a frozen fragment of one chunk.
MANIFEST = Manifest(
    (
        TensorEntry("weight", (100,), "float32", Kind.TRAINABLE),
        TensorEntry("embedding", (3,), "float32", Kind.FROZEN),
    )
)
CHUNKS = 10
FROZEN = 1
# A run in three fragments, and a model that can be cut so: one chunk each.
STREAMING = RunConfig(mode="sync", sync_every=6, num_fragments=3, heartbeat_timeout=30.0)
LAYERS = Manifest(tuple(TensorEntry(name, (4,), "float32", Kind.TRAINABLE) for name in "abc"))

E = TypeVar("E", bound=Effect)
M = TypeVar("M", bound=Message)


def version(counter: int, tag: int | None = None) -> VersionId:
    return VersionId(RUN, counter, counter if tag is None else tag)


def whole(push_id: int, worker: str = "me") -> Ledger:
    return Ledger({worker: (Counted(push_id),)})


def gradient(push_id: int = 77, base: int = 0) -> Push:
    return Push(b"", push_id, 0, CHUNKS, "bf16", base=version(base))


@dataclass
class Desk:
    """A session under test, what it asked for last, and shorthand for what may happen to it."""

    session: Session
    now: float = 100.0
    effects: list[Effect] = field(default_factory=list)
    sessions: int = 0

    def happens(self, *events: Event) -> list[Effect]:
        self.effects = []
        for event in events:
            self.effects += self.session.handle(event, self.now)
            self.session.check_invariants()
        return self.effects

    def hears(self, *messages: Message) -> list[Effect]:
        return self.happens(*(Received(message) for message in messages))

    def passes(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.happens(Tick())

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def sent(self, kind: type[M]) -> list[M]:
        return [e.message for e in self.all(Send) if isinstance(e.message, kind)]

    @property
    def chunks_sent(self) -> list[int]:
        return [effect.index for effect in self.all(SendChunk)]

    def connects(self) -> Desk:
        self.happens(Connected())
        return self

    def is_welcomed(
        self,
        *versions: VersionId | None,
        config: RunConfig = CONFIG,
        plan: tuple[int, ...] = (),
        term: int = 0,
    ) -> Desk:
        self.sessions += 1
        token = bytes([self.sessions]) * 16
        run = RUN if any(versions) else None
        self.hears(Welcome(token, "epoch", config, 0, run, versions, plan=plan, term=term))
        return self

    def receives(
        self, what: VersionId, ledger: Ledger | None = None, fragment: int = 0, chunks: int = CHUNKS
    ) -> list[Effect]:
        arrive = [Chunk(fragment, index, version=what) for index in range(chunks)]
        return self.hears(*arrive, Released(fragment, what, ledger or Ledger()))

    def holds(self, what: VersionId, ledger: Ledger | None = None, fragment: int = 0) -> None:
        self.session.downloads.of(fragment).held = Held(what, ledger or Ledger())
        self.session.run = what.run

    def breaks(self) -> Desk:
        """The connection breaks, and a new one comes up."""
        self.happens(Disconnected("It broke."))
        self.passes(LONGEST_BACKOFF_S)
        assert self.all(Open)
        return self.connects()


def desk(
    heartbeat_interval: float | None = None,
    manifest: Manifest = MANIFEST,
    *,
    has_frozen: bool = False,
    places: int = 1,
) -> Desk:
    dice = random.Random(1)
    session = Session(
        Join("me", manifest),
        lambda: dice.getrandbits(64),
        heartbeat_interval,
        has_frozen=has_frozen,
    )
    made = Desk(session)
    made.happens(Start(places))
    return made
