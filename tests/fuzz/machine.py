"""The broker's core among workers that keep to the protocol and others that do not.

An input is a run: how it is set up, and then what happens, one choice after the other. After each event
the feed is made, all that is sent must have a header, the invariants hold, and the state is within its
bounds. Nothing is raised at all: the broker's loop would end with it.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diloco_broker.core import effects, events
from diloco_broker.core.data.data_sets import MOST_DATA_SETS
from diloco_broker.core.data.units import MOST_LOTS
from diloco_broker.core.members.descriptions import AT_A_TIME
from diloco_broker.core.operations.refusals import CONNECTIONS_REMEMBERED
from diloco_broker.core.operations.status import round_line
from diloco_broker.core.state import CAUSES_KEPT, REJECTIONS_KEPT
from diloco_broker.core.versions.readers import MAX_OBSERVERS
from diloco_protocol.description import PIECE_BYTES, describe
from diloco_protocol.errors import ProtocolError
from diloco_protocol.frames import unpack
from diloco_protocol.messages import (
    Control,
    Credit,
    Describe,
    Join,
    Lot,
    Message,
    Pull,
    Take,
    encode,
)
from diloco_protocol.roles import Peer, Role
from diloco_protocol.version import VersionId
from fuzz import hostile_messages
from fuzz.draws import Draws
from fuzz.hostile_messages import Words, as_received
from kit.core_harness import FIGURES, Puppet, Stage, a_config, a_manifest, layered
from kit.noted_tensors import CHUNK_ELEMENTS, Payload

MODES: list[dict[str, Any]] = [
    {},
    {"weight_by": "tokens"},
    {"deterministic": True},
    {"aggregate": "clip-median-norm"},
    {"quorum": 1, "grace": 1.0},
    {"quorum": 1, "grace": 0.0, "late": "drop"},
    {"num_fragments": 2, "sync_every": 8, "fragment_sync_delay": 1},
    {"mode": "async", "max_staleness": 4, "staleness_weight": "poly"},
    {"mode": "async", "dylu": True, "grace": 1.0},
    {"mode": "async", "num_fragments": 2, "sync_every": 8, "outer": "fedbuff", "dn_buffer": 2},
]
SAVING: list[dict[str, Any]] = [{}, {"save_dir": "run"}, {"save_dir": "run", "durable": True}]
NAMES = ["a", "b", "c"]
MOST_EVENTS = 200
LONGEST_FEED = 100_000  # characters; a dozen workers with all that they may say of themselves
TO_BROKER = sorted(
    {"join", "describe", "leave", "heartbeat", "push", "chunk", "commit", "pull", "probe"}
)
TO_BROKER += ["credit", "control", "control", "heartbeat", "push", "chunk", "welcome", "result"]
SETTINGS: list[dict[str, Any]] = [
    *({"outer_lr": 0.5}, {"workers": 1}, {"min_workers": 2}, {"quorum": 1}, {"grace": 0.5}),
    *({"save_every": 2}, {"sync_every": 10}, {"outer_momentum": 0.5}),
]
ASKED = ["status", "manifest", "save", "kick", "pause", "resume", "shutdown", "set", "nonsense"]
ASKED += ["save_all", "stop_all"]


class WatchedStage(Stage):
    """A stage that looks at all that happens on it, and knows whose key each connection has."""

    messages = 0
    has_keys = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.words = Words()
        self.peers: dict[bytes, Peer] = {}
        self.last: Message | None = None  # the message before

    def happens(self, event: events.Event) -> None:
        if isinstance(event, events.Received):
            self.messages += 1
            self.last = event.message
            if self.has_keys:
                event = replace(event, peer=event.peer or self._peer_of(event))
        super().happens(event)

    def _peer_of(self, received: events.Received) -> Peer:
        """Whose key a connection came under: what its first message says, for the well-behaved."""
        known = self.peers.get(received.route)
        if known is None:
            message = received.message
            known = Peer(Role.OPERATOR, "op")
            if isinstance(message, Join):
                known = Peer(Role.WORKER, message.worker_id[:64])
            elif (session := getattr(message, "session", None)) is not None:
                member = self.state.members.with_session(session)
                known = Peer(Role.WORKER, member.worker_id) if member else Peer(Role.MONITOR, "m")
            self.peers[received.route] = known
        return known

    def send(self, send: effects.Send) -> bool:
        encode(send.message)
        for name in ("session", "push_id", "version", "run"):
            value = getattr(send.message, name, None)
            if value is not None:
                self.words.learn(value)
        return super().send(send)

    def handled(self, event: events.Event) -> None:
        super().handled(event)
        assert len(json.dumps(self.shown(), allow_nan=False)) < LONGEST_FEED
        self._is_bounded()

    def _is_bounded(self) -> None:
        state = self.state
        fragments, members = len(state.versions.fragments), len(state.members)
        assert len(state.descriptions) <= AT_A_TIME
        assert len(state.versions.observers) <= MAX_OBSERVERS
        assert len(state.versions.readers) <= MAX_OBSERVERS + members
        assert len(state.refusals.said_at) <= CAUSES_KEPT
        assert set(state.refusals.unsaid) <= set(state.refusals.said_at), "forgotten causes stay"
        assert len(state.refusals.noisy) <= CONNECTIONS_REMEMBERED + 1
        assert len(state.rejections) <= REJECTIONS_KEPT
        assert len(state.to_probe) <= members + MAX_OBSERVERS
        assert len(state.barriers) <= max(1, fragments)
        assert len(state.data.sets) <= MOST_DATA_SETS
        assert all(len(lots) <= MOST_LOTS for lots in state.data.lots.values())
        for member in state.members:
            assert len(member.deferred) <= fragments and len(member.early_pulls) <= fragments

    @property
    def versions_are_whole(self) -> bool:
        return all(each.version is not None for each in self.state.versions.trained)


class Play:
    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        options = {**draws.one_of(MODES), **draws.one_of(SAVING)}
        workers = 1 + draws.below(2)
        by_hand = not draws.below(4)
        self.has_keys = draws.is_so()
        config = a_config(workers, **options)
        pieces = config.num_fragments
        manifest = a_manifest(2) if pieces == 1 else layered(pieces, 2)
        self.stage = WatchedStage(config, manifest, by_hand)
        self.stage.has_keys = self.has_keys
        for name in NAMES:
            self.stage.worker(name)
        if draws.below(4):  # most of what there is to break comes once there are parameters
            self.stage.joined(*NAMES[:workers])

    def goes_on(self) -> bool:
        acts = self.draws.one_of(ACTS)
        acts(self)
        for worker in self.stage.puppets.values():
            self.stage.words.learn(worker.worker_id)
            if worker.session is not None:
                self.stage.words.learn(worker.session)
        return not self.stage.finishes

    @property
    def worker(self) -> Puppet:
        return self.stage.puppets[self.draws.one_of(NAMES)]

    @property
    def member(self) -> Puppet | None:
        """One that believes that it has joined."""
        worker = self.worker
        return worker if worker.session is not None else None

    @property
    def route(self) -> bytes:
        """A connection of a worker, or a new one."""
        worker = self.worker
        return self.draws.one_of([worker.control, worker.bulk, b""]) or self.stage.route()

    @property
    def peer(self) -> Peer | None:
        """Whose key the hostile has. None: the one that belongs to the connection."""
        if not self.has_keys or self.draws.is_so():
            return None
        name = self.draws.one_of([*NAMES, "m"])
        return Peer(self.draws.one_of(list(Role)), name)

    def receives(self, message: Message | None, route: bytes) -> None:
        if message is None:
            return
        size = self.draws.one_of([4 * CHUNK_ELEMENTS, 8 * CHUNK_ELEMENTS, 1])
        payload = Payload(size, is_finite=bool(self.draws.below(8)))
        self.stage.happens(events.Received(route, message, payload, self.peer))

    # What may happen.

    def joins(self) -> None:
        worker = self.worker
        if not self.draws.below(3):
            worker.session = None
        worker.joins()
        self.stage.provide()

    def comes_back_with_versions(self) -> None:
        worker = self.worker
        versions = self.stage.words.value(self.draws, tuple[VersionId | None, ...])
        join = as_received(Join(worker.worker_id, versions=versions))
        if isinstance(join, Join):
            first = next(iter(join.versions), None)
            worker.joins(versions=join.versions, run=first.run if first else None)

    def describes(self) -> None:
        """A join that only names its model, and some of what it then has to send."""
        route = self.route
        manifest = self.stage.words.value(self.draws, type(self.stage.manifest))
        try:
            found = describe(self.draws.one_of([self.stage.manifest, manifest]))
        except OverflowError:
            return
        size = self.draws.one_of([len(found.packed), 1, 2**40])
        name = self.draws.one_of(NAMES)
        self.receives(Join(name, digest=found.digest, size=size), route)
        at = 0
        while at < len(found.packed) and self.draws.below(8):
            size = PIECE_BYTES if self.draws.below(4) else 1 + self.draws.below(200)
            piece = found.packed[at : at + size]
            self.receives(Describe(piece), route)
            at += len(piece)

    def pushes(self) -> None:
        worker = self.member
        if worker is not None and self.stage.state.round is not None:
            fragment = self.draws.below(self.stage.config.num_fragments)
            assert self.stage.versions_are_whole, "a round is open and a fragment has no version"
            fields: dict[str, Any] = {"tokens": self.draws.below(9), "steps": self.draws.below(9)}
            number = self.draws.below(6)
            if not self.draws.below(3):
                pushes = (number,) * self.stage.config.num_fragments
                fields["lots"] = (Lot(pushes, {"text": self._range()}),)
            worker.begins(number, fragment=fragment, weight=1.0, **fields)

    def delivers(self) -> None:
        if (worker := self.member) is not None:
            worker.delivers([self.draws.below(3)], is_finite=bool(self.draws.below(6)))

    def commits(self) -> None:
        if (worker := self.member) is not None:
            worker.commits()

    def push_is_whole(self) -> None:
        self.pushes()
        if (worker := self.member) is not None and self.stage.state.versions.fragments:
            worker.completes()

    def beats(self) -> None:
        if (worker := self.member) is not None:
            worker.beats(self.draws.below(5), self.draws.one_of(["training", "waiting", "\x1b"]))

    def pulls(self) -> None:
        if (worker := self.member) is not None:
            fragment = self.draws.below(self.stage.config.num_fragments + 1)
            worker.pulls(self.draws.below(4) - 1, fragment, self.draws.below(4))

    def takes_units(self) -> None:
        if (worker := self.member) is not None:
            ranges = [edge for _ in range(self.draws.below(3)) for edge in self._range()]
            lot = Lot((self.draws.below(6),) * self.stage.config.num_fragments, {"text": (0, 2)})
            count, lots = self.draws.below(9), (lot,) * self.draws.below(2)
            worker.sends(Take(worker.token(), 1, "text", 10, 2, None, count, tuple(ranges), lots))

    def _range(self) -> tuple[int, int]:
        start = self.draws.one_of([0, 3, 9, 20, 2**40])
        return start, start + self.draws.below(4)

    def observes(self) -> None:
        route = self.route
        self.receives(Pull(self.draws.below(3), -1, None, self.draws.below(20)), route)
        self.receives(Credit(self.draws.below(200)), route)

    def leaves(self) -> None:
        if (worker := self.member) is not None:
            worker.leaves()

    def loses_connection(self) -> None:
        self.worker.loses_connection()

    def operates(self) -> None:
        action = self.draws.one_of(ASKED)
        arguments: dict[str, Any] = {}
        if action == "set":
            arguments = dict(self.draws.one_of(SETTINGS))
            if not self.draws.below(3):
                name = next(iter(arguments))
                arguments[name] = self.stage.words.value(self.draws, Any)
        elif action == "kick":
            arguments = {"worker": self.draws.one_of(NAMES)}
        elif action == "shutdown" and self.draws.below(8):
            return
        self.receives(Control(action, 1, arguments), self.stage.route())

    def is_hostile(self) -> None:
        message = self.stage.words.message(self.draws, TO_BROKER)
        self.receives(as_received(message), self.route)

    def repeats_with_a_change(self) -> None:
        if self.stage.last is not None:
            changed = self.stage.words.changed(self.draws, self.stage.last)
            self.receives(as_received(changed), self.route)

    def is_noise(self) -> None:
        route = self.route
        try:
            message, _ = unpack([hostile_messages.header(self.draws)])
        except ProtocolError as error:
            self.stage.happens(events.Malformed(route, error.code, str(error)))
            self.stage.messages += 1
            return
        self.receives(message, route)

    def time_passes(self) -> None:
        seconds = self.draws.one_of([0.0, 0.1, 1.1, 5.0, 31.0, 130.0, 700.0])
        self.stage.now += seconds
        self.stage.happens(events.Tick(lost=self.draws.is_so()))

    def stands_still(self) -> None:
        self.stage.stands_still(self.draws.one_of([0.5, 3.0, 1000.0]))

    def disk_answers(self) -> None:
        stage = self.stage
        if not stage.saves:
            return
        number = self.draws.one_of(stage.saves[-3:])
        if self.draws.is_so():
            stage.is_saved(number)
        else:
            stage.cannot_save(number=number)

    def works(self) -> None:
        self.stage.work(1 + self.draws.below(4))

    def key_is_revoked(self) -> None:
        peer = Peer(self.draws.one_of(list(Role)), self.draws.one_of(NAMES))
        self.stage.happens(events.KeysRevoked(frozenset({peer})))

    def connection_is_ended(self) -> None:
        self.stage.happens(events.ConnectionEnded("it had 64 MiB that were not read"))

    def is_told_to_stop(self) -> None:
        if not self.draws.below(8):
            self.stage.happens(events.Stop("a signal", self.draws.is_so()))


ACTS: list[Callable[[Play], None]] = [
    *(Play.is_hostile, Play.repeats_with_a_change, Play.joins, Play.pushes, Play.delivers),
    *(Play.commits, Play.push_is_whole, Play.beats, Play.pulls, Play.observes, Play.leaves),
    *(Play.loses_connection, Play.operates, Play.is_noise, Play.time_passes, Play.stands_still),
    *(Play.disk_answers, Play.works, Play.key_is_revoked, Play.connection_is_ended),
    *(Play.is_told_to_stop, Play.describes, Play.comes_back_with_versions, Play.is_hostile),
    *(Play.takes_units, Play.repeats_with_a_change, Play.push_is_whole, Play.is_hostile),
    Play.repeats_with_a_change,
]


def run(data: bytes) -> int:
    """Act out one input. Returns how many messages the core has had."""
    draws = Draws(data)
    play = Play(draws)
    for _ in range(MOST_EVENTS):
        if draws.is_used_up or not play.goes_on():
            break
    for report in play.stage.reports:
        json.dumps(round_line(play.stage.state, report, FIGURES), allow_nan=False)
    return play.stage.messages
