"""The worker's session with a broker that says anything at all.

An input is what the broker and the training do, one choice after the other. Nothing is raised: what does
not fit is dropped and said aloud. What the session asks for is bounded too: the effects of one message,
and how soon it wants to be called again.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diloco_protocol import messages
from diloco_protocol.errors import ProtocolError
from diloco_protocol.frames import unpack
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.version import Counted, Ledger, VersionId
from diloco_worker.session import effects, events
from diloco_worker.session.connection import Phase
from diloco_worker.session.session import Session
from fuzz import hostile_messages
from fuzz.draws import Draws
from fuzz.hostile_messages import Words, as_received

RUN = "0123456789abcdef"
MANIFEST = Manifest(
    (
        *(TensorEntry(name, (8,), "float32", Kind.TRAINABLE) for name in "abc"),
        TensorEntry("mean", (2,), "float32", Kind.BUFFER),
        TensorEntry("mask", (3,), "float32", Kind.FROZEN),
    )
)
WHOLE = messages.RunConfig(
    "sync", 5, chunk_elements=10, heartbeat_timeout=30.0, buffers=messages.BUFFERS
)
SPLIT = replace(WHOLE, sync_every=6, num_fragments=3)
CONFIGS = [(WHOLE, ()), (SPLIT, (0, 1, 2, 2, 3)), (replace(WHOLE, mode="async", dylu=True), ())]
MOST_EVENTS = 200
MOST_EFFECTS = 300  # of one event: the chunks of a fragment, and a notice for each
FROM_BROKER = [
    *("welcome", "grant", "ack", "released", "notice", "rejoin", "error", "chunk", "result")
]
NOTICES = ["ping", "describe", "seed", "shutdown", "restarting", "deferred", "kicked", "waiting"]
NOTICES += ["sync_every", "alive", "\x1b", ""]
LEDGERS = [{}, {"me": (Counted(77),)}, {"me": (Counted(78, b"\x01"),)}]
# Ticks that find something to do, one after the other without time passing: a loop would never end.
MOST_TICKS_AT_ONCE = 20


class Play:
    def __init__(self, draws: Draws, places: int = 1) -> None:
        self.draws, self.words = draws, Words()
        dice = random.Random(1)
        self.is_observer = not draws.below(8)
        join = None if self.is_observer else messages.Join("me", MANIFEST, wants={"sync_every": 5})
        interval = draws.one_of([None, 0.0, 5.0])
        self.session = Session(join, lambda: dice.getrandbits(64), interval)
        self.now, self.messages = 100.0, 0
        self.push_id, self.requests = 77, 0
        self.config, self.plan = draws.one_of(CONFIGS)
        self.last: messages.Message | None = None
        self.words.learn(
            VersionId(RUN, 0, 0), VersionId(RUN, 1, 1), 77, 78, b"s" * 16, RUN, *NOTICES
        )
        self.words.learn(self.config, *range(1, 6))
        self.happens(events.Start(places))
        if draws.below(8):
            self.connects()
            self.is_welcomed()

    def happens(self, event: events.Event) -> None:
        wanted = self.session.handle(event, self.now)
        if self.session.phase is not Phase.LEFT:
            self.session.check_invariants()
        assert len(wanted) <= MOST_EFFECTS
        for effect in wanted:
            if isinstance(effect, effects.Send):
                messages.encode(effect.message)

    def hears(self, message: messages.Message | None) -> None:
        if message is not None:
            self.messages += 1
            self.last = message
            self.happens(events.Received(message))

    # What may happen.

    def connects(self) -> None:
        self.happens(events.Connected())

    def is_welcomed(self) -> None:
        versions = tuple(VersionId(RUN, 0, 0) for _ in range(self.config.num_fragments))
        if not self.draws.below(4):
            versions = ()
        token = bytes([self.draws.below(9)]) * 16
        run = RUN if versions else None
        self.hears(messages.Welcome(token, "epoch", self.config, 0, run, versions, plan=self.plan))

    def breaks(self) -> None:
        if self.session.phase is Phase.CONNECTING:
            self.happens(events.Unreached())
        self.happens(events.Disconnected("It broke."))

    def is_locked_out(self) -> None:
        self.happens(events.LockedOut("The broker has no such key."))

    def time_passes(self) -> None:
        self.now += self.draws.one_of([0.0, 0.1, 2.0, 11.0, 31.0, 1000.0])
        for _ in range(MOST_TICKS_AT_ONCE):
            wakes_at = self.session.wakes_at()
            if wakes_at is None or wakes_at > self.now:
                return
            self.happens(events.Tick())
        raise AssertionError(
            f"it wants to be called again at once, without end ({self.session.config})"
        )

    def offers(self) -> None:
        layout = self.session.layout
        fragment = self.draws.below(self.config.num_fragments)
        if layout is None or self.is_observer or fragment >= len(layout.fragments):
            return
        self.push_id += 1
        chunks = layout.fragments[fragment].chunks
        push = messages.Push(b"", self.push_id, fragment, chunks, "bf16", base=VersionId(RUN, 0, 0))
        self.words.learn(self.push_id)
        self.happens(events.Offer(push))

    def asks_for_a_version(self) -> None:
        if self.session.layout is not None:
            fragment = self.draws.one_of(sorted(self.session.downloads.by_fragment))
            self.happens(events.RequestVersion(fragment, self.draws.one_of([None, 0, 5])))

    def asks(self) -> None:
        self.requests += 1
        self.happens(events.Ask(messages.Control("status", self.requests)))

    def is_prepared(self) -> None:
        for upload in list(self.session.uploads):
            self.happens(events.Prepared(upload.push.push_id))

    def is_granted(self) -> None:
        held = self.draws.one_of([None, b"\x01", b"\x00"])
        standing = self.draws.one_of(list(messages.Standing))
        credit = self.draws.one_of([4, 0, 1, 2**64 - 1])
        self.hears(messages.Grant(self.draws.one_of([self.push_id, 77]), 0, standing, held, credit))

    def is_acknowledged(self) -> None:
        self.hears(messages.Ack(self.push_id, 0, (self.draws.below(4),), self.draws.below(3)))

    def gets_a_chunk(self) -> None:
        version = VersionId(RUN, self.draws.below(4), 0)
        fragment, index = self.draws.below(4), self.draws.below(4)
        self.hears(messages.Chunk(fragment, index, version=version))

    def gets_a_version(self) -> None:
        counter = self.draws.below(4)
        fragment = self.draws.below(4)
        version = VersionId(RUN, counter, 0)
        for index in range(4):
            self.hears(messages.Chunk(fragment, index, version=version))
        ledger = {**self.draws.one_of(LEDGERS)}
        if self.draws.is_so():
            ledger["me"] = (Counted(self.push_id),)
        self.hears(messages.Released(fragment, version, Ledger(ledger), counter))

    def is_told(self) -> None:
        notice = messages.Notice(
            self.draws.one_of(NOTICES), "", self.draws.below(5), 0, self.draws.below(9)
        )
        self.hears(notice)

    def broker_is_hostile(self) -> None:
        self.hears(as_received(self.words.message(self.draws, FROM_BROKER)))

    def broker_welcomes_strangely(self) -> None:
        """On terms that no broker offers."""
        sound = messages.Welcome(b"s" * 16, "epoch", self.config, 0, RUN, plan=self.plan)
        if self.draws.is_so():
            sound = replace(sound, config=self.words.changed(self.draws, self.config))
        self.hears(as_received(self.words.changed(self.draws, sound)))

    def broker_changes_something(self) -> None:
        if self.last is not None:
            self.hears(as_received(self.words.changed(self.draws, self.last)))

    def broker_makes_noise(self) -> None:
        try:
            self.hears(
                unpack([hostile_messages.header(self.draws), b"xx"][: 1 + self.draws.below(2)])[0]
            )
        except ProtocolError:
            self.messages += 1

    def departs(self) -> None:
        if not self.draws.below(16):
            self.happens(events.Depart("done"))


ACTS: list[Callable[[Play], None]] = [
    *(Play.broker_is_hostile, Play.connects, Play.is_welcomed, Play.breaks, Play.time_passes),
    *(Play.offers, Play.asks_for_a_version, Play.asks, Play.is_prepared, Play.is_granted),
    *(Play.is_acknowledged, Play.gets_a_chunk, Play.gets_a_version, Play.is_told),
    *(Play.broker_welcomes_strangely, Play.broker_changes_something, Play.broker_makes_noise),
    *(Play.is_locked_out, Play.departs, Play.broker_is_hostile, Play.broker_changes_something),
    *(Play.offers, Play.time_passes),
]


def run(data: bytes) -> int:
    """Act out one input. Returns how many messages the session has had."""
    draws = Draws(data)
    play = Play(draws, places=1 + len(data) % 3)
    for _ in range(MOST_EVENTS):
        if draws.is_used_up or play.session.phase is Phase.LEFT:
            break
        act: Any = draws.one_of(ACTS)
        act(play)
    return play.messages
