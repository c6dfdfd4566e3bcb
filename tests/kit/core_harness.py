"""A stage for the broker's core: a fake clock, puppets for workers, and tensor work that is only noted.

Instead of adding tensors the stage keeps, for every chunk of every version, which pushes are in it. So a
test can ask the one question that matters: was each contribution counted exactly once?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.core.machine import Core
from diloco_broker.core.operations.status import EventLog, LoopFigures, snapshot_and_line
from diloco_broker.core.rounds.round import Barrier
from diloco_broker.core.versions.record import InitialModel, Resumption
from diloco_broker.shell.effects import Executor
from diloco_broker.shell.served_time import ServedTime
from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_broker.storage.resume import load_into
from diloco_broker.storage.writer import checkpoint_of
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.feed import Loop
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.messages import (
    Chunk,
    Commit,
    Control,
    Credit,
    Error,
    Grant,
    Heartbeat,
    Join,
    Leave,
    Message,
    Notice,
    Pull,
    Purpose,
    Push,
    Released,
    Result,
    Welcome,
)
from diloco_protocol.version import Ledger, VersionId
from kit.noted_tensors import CHUNK_ELEMENTS, NotedTensors, Payload, Wire

M = TypeVar("M", bound=Message)

RUN = "00000000000000aa"
FIGURES = LoopFigures("0", "tcp://127.0.0.1:1", Loop(0.0, 0.0, 0))


def a_manifest(chunks: int = 3, **others: TensorEntry) -> Manifest:
    """A model whose one trainable tensor takes `chunks` chunks of the stage's size."""
    entries = [TensorEntry("weight", (chunks * CHUNK_ELEMENTS,), "float32", Kind.TRAINABLE)]
    return Manifest((*entries, *others.values()))


def layered(layers: int, chunks: int = 2) -> Manifest:
    """A model of `layers` layers, each of `chunks` chunks of the stage's size."""
    size = (chunks * CHUNK_ELEMENTS,)
    names = [f"layers.{number}.weight" for number in range(layers)]
    return Manifest(tuple(TensorEntry(name, size, "float32", Kind.TRAINABLE) for name in names))


@dataclass(frozen=True)
class Held:
    """One fragment as a worker holds it."""

    version: VersionId
    ledger: Ledger
    wires: tuple[Wire, ...]


Holdings = tuple[Held | None, ...]


@dataclass
class Stage:
    """The core under a fake clock. With `by_hand`, tensor work waits until `work()` is called."""

    config: BrokerConfig
    manifest: Manifest = field(default_factory=a_manifest)
    by_hand: bool = False
    initial: InitialModel | None = None
    resumption: Resumption | None = None
    incarnation: int = 1
    moved_aside: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.now = 1000.0
        self._draws = iter(range(self.incarnation << 40, (self.incarnation + 1) << 40))
        self.core = Core(
            self.config,
            lambda: next(self._draws),
            self.now,
            self.initial,
            self.resumption,
            moved_aside=self.moved_aside,
        )
        self.inbox: dict[bytes, list[Message]] = {}
        self.received: dict[bytes, list[tuple[Chunk, Any]]] = {}
        self.logs: list[str] = []
        self.saves: list[int] = []  # numbers of the checkpoints asked for
        self.checkpoints: list[Checkpoint] = []  # what each of them would have in it
        self.audits: list[effects.RecordVersion] = []
        self.acts: list[effects.RecordAction] = []
        self.reports: list[effects.RoundReport] = []
        self.ends: list[effects.End] = []
        self.finishes: list[effects.Finish] = []
        self.gone: set[bytes] = set()
        self.tensors = NotedTensors(lambda: self.state.model.layout, self.resumption)
        self._executor = Executor(self.core, lambda: events.Now.both(self.now), self)
        self._routes = 0
        self.puppets: dict[str, Puppet] = {}  # the newest of each name

    # The world.

    @property
    def state(self) -> Any:
        return self.core.state

    def route(self) -> bytes:
        self._routes += 1
        return b"route-%d" % self._routes

    def passes(self, seconds: float) -> None:
        """Time goes on, with a tick at least every tenth of a second of it."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + max(0.1, seconds / 50))
            self.happens(events.Tick())

    def stands_still(self, seconds: float) -> None:
        """The broker's process is stopped for so long, or its machine sleeps; then it serves again."""
        readings = iter((self.now, self.now + seconds))
        clock = ServedTime(readings.__next__)
        self.now = clock()
        if left_out := clock.stood_still():
            self.happens(events.StoodStill(left_out))
        self.happens(events.Tick())

    def happens(self, event: events.Event) -> None:
        """Feed the core and carry out what it asks for; invariants are checked after each event."""
        self._feed(event)
        if not self.by_hand:
            self.work()

    def _feed(self, event: events.Event) -> None:
        self._executor.feed(event)
        self._executor.acknowledge()

    def work(self, pieces: int | None = None) -> None:
        for _ in count() if pieces is None else range(pieces):
            if not self.tensors.queue:
                return
            self._feed(self.tensors.do_one())

    # What effects come to.

    def send(self, send: effects.Send) -> bool:
        if send.route in self.gone:
            return False
        if isinstance(send.message, Chunk):
            self.received.setdefault(send.route, []).append((send.message, send.payload))
        else:
            self.inbox.setdefault(send.route, []).append(send.message)
        return True

    def write(self, record: effects.Record) -> None:
        match record:
            case effects.Log(text=text):
                self.logs.append(text)
            case effects.RecordAction(by=by, text=text):
                self.acts.append(record)
                self.logs.append(f"{by}: {text}.")
            case effects.RoundReport():
                self.reports.append(record)
            case effects.RecordVersion():
                self.audits.append(record)

    def save(self, save: effects.Save) -> None:
        self.saves.append(save.number)
        self.checkpoints.append(
            checkpoint_of(self.state, self.tensors, save.record, self.incarnation)
        )

    def read(self, read: effects.ReadCheckpoint) -> None:
        """Files are the shell's."""

    def end(self, end: effects.End) -> None:
        self.ends.append(end)

    def disconnect(self, route: bytes) -> None:
        self.gone.add(route)

    def finish(self, save: effects.Save | None) -> None:
        self.finishes.append(effects.Finish(save))

    def handled(self, event: events.Event) -> None:
        self.core.check_invariants()
        queue = self.tensors.queue
        waiting = [work for work in queue if isinstance(work, effects.Fold | effects.Inspect)]
        assert self.state.chunks_waiting == len(waiting), "chunks that wait are miscounted"

    # The disk.

    def is_saved(self, number: int | None = None) -> None:
        """A checkpoint is written: that of this number, or the one asked for last."""
        number = self.saves[-1] if number is None else number
        self.happens(events.Saved(number, f"run/checkpoint-{number}"))

    def cannot_save(
        self, error: str = "No space left on device", number: int | None = None
    ) -> None:
        self.happens(events.SaveFailed(self.saves[-1] if number is None else number, error))

    def restarted(self, checkpoint: Checkpoint | None = None, **options: Any) -> Stage:
        """A broker that was killed and goes on from a checkpoint, the last one asked for."""
        checkpoint = checkpoint or self.checkpoints[-1]
        config = replace(self.config, **options)
        return Stage(
            config,
            self.manifest,
            self.by_hand,
            resumption=resumption(checkpoint),
            incarnation=self.incarnation + 1,
        )

    # What came of it.

    @property
    def round(self) -> Any:
        assert self.state.round is not None, "no round is open: there are no parameters yet"
        return self.state.round

    @property
    def expected(self) -> set[str]:
        """Whom the round waits for."""
        barrier: Barrier | None = self.round.barrier
        return barrier.expected if barrier else set()

    def version(self, fragment: int = 0) -> VersionId:
        version = self.state.versions[fragment].version
        assert isinstance(version, VersionId)
        return version

    @property
    def counters(self) -> list[int]:
        """How far each fragment is."""
        return [self.version(fragment).counter for fragment in range(self.config.num_fragments)]

    def shown(self) -> dict[str, Any]:
        """The snapshot that the feed publishes."""
        return snapshot_and_line(self.state, EventLog(), FIGURES, 1, self.now)[0]

    @property
    def here(self) -> set[str]:
        """The workers that have joined and are not gone, as displays show them."""
        return {row["id"] for row in self.shown()["workers"]}

    def column(self, figure: str) -> dict[str, Any]:
        """A figure of each worker, as displays show it."""
        return {row["id"]: row[figure] for row in self.shown()["workers"]}

    def row(self, worker_id: str) -> dict[str, Any]:
        (found,) = (row for row in self.shown()["workers"] if row["id"] == worker_id)
        return dict(found)

    @property
    def ledger(self) -> Ledger:
        """That of the current version of the first fragment."""
        ledger = self.state.versions[0].ledger
        assert isinstance(ledger, Ledger)
        return ledger

    def said(self, *words: str) -> list[str]:
        """The lines of the log that have all these words."""
        return [line for line in self.logs if all(each in line for each in words)]

    def counted(self, fragment: int = 0) -> list[Counter[tuple[str, int]]]:
        """For each chunk of the current version: how often each push is in it."""
        return [Counter(wire.contents) for wire in self.state.versions[fragment].wires]

    @property
    def merged(self) -> list[str]:
        """The workers in each merge of chunk 0, in the order in which they are added."""
        return [
            "".join(part.worker_id for group in merge.groups for part in group)
            for merge in self.tensors.merges
            if merge.index == 0
        ]

    def holdings(self) -> Holdings:
        """What a worker holds that has the newest version of every fragment."""
        return tuple(
            Held(versions.version, versions.ledger, versions.wires) if versions.version else None
            for versions in self.state.versions.fragments
        )

    def worker(self, worker_id: str) -> Puppet:
        self.puppets[worker_id] = Puppet(self, worker_id)
        return self.puppets[worker_id]

    def pushes(self, fragment: int = 0, /, **push_ids: int) -> None:
        """Each of these workers makes a whole push, in this order: `pushes(a=1, b=2)`."""
        for worker_id, push_id in push_ids.items():
            self.puppets[worker_id].pushes(push_id, fragment=fragment)

    def beats(self, *worker_ids: str) -> None:
        for worker_id in worker_ids:
            self.puppets[worker_id].beats()

    def passes_with(self, seconds: int, *worker_ids: str) -> None:
        """Time goes on, and these workers send a heartbeat each second."""
        for _ in range(seconds):
            self.passes(1.0)
            self.beats(*worker_ids)

    def kicks(self, worker_id: str) -> Result:
        return self.asks("kick", worker=worker_id)

    def asks(self, action: str, **arguments: Any) -> Result:
        """An operator asks for something; returns the answer."""
        desk = self.route()
        self.happens(events.Received(desk, Control(action, 1, arguments)))
        (result,) = self.inbox[desk]
        assert isinstance(result, Result)
        return result

    def joined(self, *worker_ids: str) -> list[Puppet]:
        """Workers that have joined and hold the current parameters."""
        puppets = [self.worker(worker_id) for worker_id in worker_ids]
        for puppet in puppets:
            puppet.joins()
        self.provide()
        for puppet in puppets:
            puppet.pulls()
        return puppets

    def provide(self) -> None:
        """Let the seed worker upload its parameters, if one was asked."""
        seeding = self.state.seeding
        worker = self.state.members.named(seeding.worker_id)
        for fragment in seeding.wanted if worker else ():
            layout = self.state.versions[fragment].layout
            push = Push(
                worker.session, 77, fragment, layout.chunks, "fp32", purpose=Purpose.SEEDING
            )
            self.happens(events.Received(worker.control, push))
            for span in layout.spans:
                size = span.elements * (8 if span.segment.value == "integers" else 4)
                chunk = Chunk(fragment, span.index, session=worker.session, push_id=77)
                self.happens(events.Received(worker.control, chunk, Payload(size)))
                self.work()


@dataclass
class Puppet:
    """A worker on the stage: does as it is told, by the protocol or against it."""

    stage: Stage
    worker_id: str
    session: bytes | None = None
    control: bytes = b""
    bulk: bytes = b""
    push_id: int = 0
    fragment: int = 0
    base: VersionId | None = None
    held: Holdings = ()

    def sends(self, message: Message, payload: Any = None, *, on: bytes | None = None) -> None:
        self.stage.happens(events.Received(self.control if on is None else on, message, payload))

    def joins(self, **fields: Any) -> Puppet:
        """Join on new connections; with the last session, if there is one."""
        self.control, self.bulk = self.stage.route(), self.stage.route()
        fields = {"manifest": self.stage.manifest, "session": self.session, **fields}
        self.sends(Join(self.worker_id, **fields))
        welcome = self.last(Welcome)
        if welcome is not None:
            self.session = welcome.session
            self.sends(Credit(1000, self.session), on=self.bulk)
        return self

    def comes_with(self, held: Holdings, **fields: Any) -> Puppet:
        """Join a broker that was started again, holding these versions."""
        self.held = held
        versions = tuple(each.version if each else None for each in held)
        runs = (version.run for version in versions if version)
        return self.joins(run=next(runs, None), versions=versions, **fields)

    @property
    def asked_for(self) -> list[int]:
        """The fragments that it was asked to seed, in order."""
        return [n.fragment for n in self.all(Notice) if n.what == "seed"]

    def seeds(self, fragment: int = 0, indexes: Iterable[int] | None = None, **fields: Any) -> None:
        """Offer what it holds of a fragment and send these chunks of it, all by default."""
        held = self.held[fragment] if self.held else None
        layout = self.stage.state.versions[fragment].layout
        is_finite = fields.pop("is_finite", True)
        fields = {"base": held.version, "ledger": held.ledger, **fields} if held else fields
        self.push_id, self.fragment = 7_000 + fragment, fragment
        push = Push(
            self.token(),
            self.push_id,
            fragment,
            layout.chunks,
            "fp32",
            purpose=Purpose.SEEDING,
            **fields,
        )
        self.sends(push)
        for index in range(layout.chunks) if indexes is None else indexes:
            contents = held.wires[index].contents if held else ()
            payload = Payload(4 * CHUNK_ELEMENTS, is_finite=is_finite, contents=contents)
            chunk = Chunk(fragment, index, session=self.session, push_id=self.push_id)
            self.sends(chunk, payload, on=self.bulk)

    def token(self) -> bytes:
        assert self.session is not None, f"{self.worker_id} has not joined"
        return self.session

    def pulls(self, after: int = -1, fragment: int = 0, credit: int = 0) -> None:
        self.sends(Pull(fragment, after, self.token(), credit))
        released = self.last(Released)
        if released is not None:
            self.base = released.version

    def offers(self, push_id: int, **fields: Any) -> Grant:
        """Offer a push that is not refused; returns the grant."""
        before = len(self.all(Grant))
        self.begins(push_id, **fields)
        assert len(self.all(Grant)) > before, f"push {push_id} got no grant: {self.last(Error)}"
        return self.got(Grant)

    def begins(self, push_id: int, *, weight: float = 1.0, **fields: Any) -> None:
        """Offer a push, whatever comes of it."""
        self.push_id = push_id
        fragment = self.fragment = fields.setdefault("fragment", 0)
        there = fragment if 0 <= fragment < len(self.stage.state.versions.fragments) else 0
        base = self.base if there == 0 and self.base else self.stage.version(there)
        fields = {"base": base, "wire_dtype": "fp32", **fields}
        chunks = self.stage.state.versions[there].layout.chunks
        self.sends(Push(self.token(), push_id, chunks=chunks, weight=weight, **fields))

    def delivers(
        self, indexes: Iterable[int], *, is_finite: bool = True, size: int = 0, **found: Any
    ) -> None:
        """Send these chunks. `found` is what a look at them finds: squares, fingerprint."""
        for index in indexes:
            chunk = Chunk(self.fragment, index, session=self.session, push_id=self.push_id)
            nbytes = size or 4 * CHUNK_ELEMENTS
            payload = Payload(nbytes, is_finite=is_finite, **found)
            self.sends(chunk, payload, on=self.bulk)

    def completes(self, *indexes: int) -> None:
        """Send these chunks, all by default, and say that it was the last of the push."""
        self.delivers(indexes or range(self.stage.state.versions[self.fragment].layout.chunks))
        self.commits()

    def commits(self) -> None:
        self.sends(Commit(self.token(), self.push_id, self.fragment))

    def pushes(
        self,
        push_id: int,
        *,
        weight: float = 1.0,
        squares: float = 1.0,
        fingerprint: int = 0,
        **fields: Any,
    ) -> None:
        """A whole push, as a well-behaved worker makes it: what is held is not sent again."""
        grant = self.offers(push_id, weight=weight, **fields)
        assert grant.standing.value in ("new", "resume"), grant
        size = self.stage.state.versions[self.fragment].layout.chunks
        held = Bitmap.from_bytes(grant.held, size) if grant.held else Bitmap(size)
        self.delivers(held.missing(), squares=squares, fingerprint=fingerprint)
        self.commits()

    def beats(self, step: int = 1, state: str = "training") -> None:
        self.sends(Heartbeat(self.token(), step, state=state))

    def leaves(self) -> None:
        self.sends(Leave(self.token()))

    def loses_connection(self) -> None:
        """Its connections are gone, as the broker finds out when it sends something."""
        self.stage.gone |= {self.control, self.bulk}
        self.stage.happens(events.PeerGone(self.control))

    def dies(self) -> None:
        self.loses_connection()
        self.stage.passes(self.stage.config.disconnect_grace + 0.2)

    def last(self, kind: type[M]) -> M | None:
        """The last message of a kind that came in on the control connection."""
        return next(reversed(self.all(kind)), None)

    def got(self, kind: type[M]) -> M:
        """The last message of a kind, which must have come."""
        message = self.last(kind)
        assert message is not None, f"{self.worker_id} got no {kind.__name__}"
        return message

    @property
    def notices(self) -> list[str]:
        """What it was told, but for signs of life."""
        return [notice.what for notice in self.all(Notice) if notice.what != "alive"]

    def all(self, kind: type[M]) -> list[M]:
        return [m for m in self.stage.inbox.get(self.control, ()) if isinstance(m, kind)]

    def error(self) -> Error:
        return self.got(Error)

    @property
    def chunks(self) -> list[tuple[Chunk, Any]]:
        return self.stage.received.get(self.bulk, [])

    def holds(self) -> VersionId | None:
        """The version of which it has every chunk and the `released`, if there is one."""
        released = self.last(Released)
        if released is None:
            return None
        size = self.stage.state.versions[released.fragment].layout.chunks
        indexes = {c.index for c, _ in self.chunks if c.version == released.version}
        return released.version if indexes == set(range(size)) else None


def a_config(workers: int = 2, **fields: Any) -> BrokerConfig:
    # At a new address a run begins at once: no worker can be on the way with an older one.
    usual: dict[str, Any] = {"bind": "tcp://127.0.0.1:*", "wire_dtype": "fp32"}
    fields = {"chunk_elements": CHUNK_ELEMENTS, **usual, **fields}
    return BrokerConfig(workers=workers, **fields)


def a_stage(workers: int = 2, chunks: int = 3, *, by_hand: bool = False, **fields: Any) -> Stage:
    config = a_config(workers, **fields)
    pieces = config.num_fragments
    return Stage(config, a_manifest(chunks) if pieces == 1 else layered(pieces, chunks), by_hand)


def alone(chunks: int = 3, **fields: Any) -> tuple[Stage, Puppet]:
    """A run of one worker, a, before its first push."""
    stage = a_stage(1, chunks, **fields)
    (a,) = stage.joined("a")
    return stage, a


def resumption(found: Checkpoint) -> Resumption:
    layout = found.layout
    return load_into(NotedTensors(lambda: layout, None), found, layout)


def a_run(*worker_ids: str, rounds: int = 1, **options: Any) -> tuple[Stage, list[Puppet]]:
    """Workers past round one; the push of the second of them for round n is 10 n + 2."""
    stage = a_stage(**{"workers": len(worker_ids), "chunks": 2, **options})
    puppets = stage.joined(*worker_ids)
    for number in range(rounds):
        a_round(puppets, number)
    return stage, puppets


def a_round(puppets: Iterable[Puppet], number: int) -> None:
    """Each of them pushes for a round, of the fragment whose turn it is."""
    for place, puppet in enumerate(puppets, start=1):
        fragment = number % puppet.stage.config.num_fragments
        puppet.pushes(10 * number + place, fragment=fragment)
