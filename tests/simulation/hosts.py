"""Simulated brokers whose disk outlives them, and callers with the real session of a worker.

Brokers have the real core. Instead of numbers a chunk holds the pushes of workers that are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.core.machine import Core
from diloco_broker.core.versions.fragment import WholeVersion
from diloco_broker.core.versions.record import InitialModel, Resumption
from diloco_broker.shell.effects import Executor
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.dtypes import span_bytes
from diloco_protocol.messages import Heartbeat, Message
from diloco_protocol.version import VersionId
from diloco_worker.session import effects as asked
from diloco_worker.session import events as said
from diloco_worker.session.connection import Phase
from diloco_worker.session.session import Session
from diloco_worker.transport.executor import Executor as WorkerExecutor
from simulation.contents import Contents, Key
from simulation.network import Connection
from simulation.tensors import demand

if TYPE_CHECKING:
    from simulation.takeover import Takeover

CHUNKS = 3
TICK_S = 0.25
WORK_S = 0.002  # longest time that a piece of tensor work takes
SAVE_S = 0.3  # and the writing of a checkpoint
FOUND_OUT_S = (0.1, 1.0)  # least and most until a broken connection is found out


@dataclass(frozen=True)
class Up:
    """A chunk on its way up: the push that it is of."""

    contents: Any  # `Key`s; where a version is given to a broker that has lost it, its `Contents`
    nbytes: int


@dataclass(frozen=True)
class Down:
    """A chunk of a version: all that it has ever averaged."""

    contents: Contents
    nbytes: int


class Host:
    """One life of a broker: what the loop is in a real one."""

    def __init__(self, run: Takeover, name: str) -> None:
        self.run, self.world, self.name = run, run.world, name
        self.is_alive = True
        self.queue: list[effects.TensorWork] = []
        self.routes: dict[bytes, Connection] = {}
        self.core: Core
        self._executor: Executor
        self._has_lost = self._is_working = False

    def follow(self, core: Core) -> None:
        """This core is the host's from now on."""
        self.core = core
        self._executor = Executor(core, lambda: events.Now.both(self.world.now), self)

    def begins(self) -> None:
        self.world.tell(self.name, "begins")
        self.run.hosts[self.name] = self
        self._tick()

    def dies(self) -> None:
        """Killed: nobody is told, connections break."""
        self.world.tell(self.name, "is killed")
        self.is_alive = False
        for connection in self.routes.values():
            connection.sever()

    def _tick(self) -> None:
        if self.is_alive:
            lost, self._has_lost = self._has_lost, False
            self.feed(events.Tick(lost))
            self.world.after(TICK_S, self._tick)

    def feed(self, event: events.Event) -> None:
        self._executor.feed(event)
        self._executor.acknowledge()
        self.core.check_invariants()
        self._work_on()

    def _work_on(self) -> None:
        if self.queue and not self._is_working:
            self._is_working = True
            self.world.after(self.world.dice.uniform(0, WORK_S), self._work)

    def _work(self) -> None:
        self._is_working = False
        if self.is_alive and self.queue:
            self.does(self.queue.pop(0))
            self._work_on()

    def does(self, work: effects.TensorWork) -> None:
        raise NotImplementedError

    def hears(self, connection: Connection, message: Message, payload: Any) -> None:
        if self.is_alive:
            self.takes(events.Received(connection.route, message, payload))

    def takes(self, received: events.Received) -> None:
        self.feed(received)

    def connects(self, connection: Connection) -> None:
        self.routes[connection.route] = connection

        def gone() -> None:
            self._has_lost = True

        connection.on_gone = gone

    # What effects come to.

    @property
    def tensors(self) -> Host:
        return self

    def add(self, work: effects.TensorWork | effects.AtOnce) -> None:
        if isinstance(work, effects.Inspect | effects.AggregateAndStep | effects.StoreInitial):
            self.queue.append(work)
        elif isinstance(work, effects.DropInitial):
            self.queue = [each for each in self.queue if not isinstance(each, effects.StoreInitial)]

    def send(self, send: effects.Send) -> bool:
        connection = self.routes.get(send.route)
        return connection is not None and connection.down(send.message, send.payload)

    def disconnect(self, route: bytes) -> None:
        if route in self.routes:
            self.routes[route].sever()

    def write(self, record: effects.Record) -> None:
        if isinstance(record, effects.Log):
            self.world.tell(self.name, record.text)

    def save(self, save: effects.Save) -> None:
        raise AssertionError("nothing is saved here")

    def read(self, _: effects.ReadCheckpoint) -> None:
        raise AssertionError("nobody copies checkpoints here")

    def end(self, end: effects.End) -> None:
        raise AssertionError(f"nobody ends {self.name}: {end.reason}")

    def finish(self, save: effects.Save | None) -> None:
        raise AssertionError("nobody stops it")

    def handled(self, event: events.Event) -> None:
        pass


class Hub(Host):
    """A broker with the parameters; `disk` outlives it."""

    def __init__(
        self,
        run: Takeover,
        disk: dict[str, Resumption],
        name: str,
        config: BrokerConfig,
        term: int,
    ) -> None:
        super().__init__(run, name)
        self._disk = disk
        self.chunks: dict[tuple[int, int], Down] = {}
        found = disk.get("newest")
        for fragment, wires in found.wires.items() if found is not None else ():
            self.chunks |= {(fragment, index): wire for index, wire in enumerate(wires)}
        shapes = {each.name: each.shape for each in run.manifest.entries}
        draw = partial(run.world.dice.getrandbits, 64)
        self.follow(
            Core(config, draw, run.world.now, InitialModel(shapes), resumption=found, term=term)
        )
        self._seen: dict[int, VersionId] = {}
        self._added: dict[tuple[int, int], list[Key]] = {}  # to each chunk, by its last version

    def does(self, work: effects.TensorWork) -> None:
        match work:
            case effects.Inspect(payload=Up()):
                self.feed(events.WorkDone(work, 1.0))
            case effects.StoreInitial(fragment, index, payload):
                made = self.chunks[fragment, index] = Down(_placed(payload), 16)
                self.feed(events.InitialStored(work, made))
            case effects.AggregateAndStep(fragment, index, groups):
                before = self.chunks[fragment, index].contents
                added = [
                    key
                    for group in groups
                    for part in group
                    for key in part.payloads[index].contents
                ]
                demand(len(added) == len(set(added)), "twice in one round: {}", sorted(added))
                again = [key for key in added if key in before]
                demand(not again, "counted again: {}", again)
                made = self.chunks[fragment, index] = Down(before.plus(added), 16)
                self._added[fragment, index] = added
                self.feed(events.Stepped(fragment, index, made))
            case _:
                raise AssertionError(f"pushes are kept whole here: {work}")

    def save(self, save: effects.Save) -> None:
        wires = {f: tuple(self.core.state.versions[f].wires) for f in save.record.fragments}
        layout = self.core.state.model.layout
        assert layout is not None
        kept = Resumption(f"checkpoint {save.number}", save.record, layout, wires, "")

        def written() -> None:
            if self.is_alive:
                self._disk["newest"] = kept
                self.feed(events.Saved(save.number, f"checkpoint {save.number}"))

        self.world.after(self.world.dice.uniform(0, SAVE_S), written)

    def handled(self, event: events.Event) -> None:
        for each in self.core.state.versions.trained:
            if each.current is not None:
                self._check(each.layout.fragment, each.current)

    def _check(self, fragment: int, current: WholeVersion) -> None:
        if self._seen.get(fragment) == current.version:
            return
        self._seen[fragment] = current.version
        wires: Sequence[Down] = current.wires
        added = [self._added.pop((fragment, index), []) for index in range(len(wires))]
        same = all(each == added[0] for each in added)
        demand(same, "version {} has a push in part", current.version)
        if added[0]:
            self.run.versions += 1
        for worker_id, pushes in current.record.ledger.pushes.items():
            for each in pushes:
                key = (worker_id, each.push_id)
                demand(key in wires[0].contents, "the ledger names {}, which is not in", key)
        named = current.record.ledger
        for worker_id, push_id in added[0]:
            demand(named.names_whole(worker_id, push_id), "{} is not in the ledger", worker_id)


def _placed(given: Up | None) -> Contents:
    """What is in a chunk of parameters that somebody gives, or the model file."""
    contents = () if given is None else given.contents
    return contents if isinstance(contents, Contents) else Contents()


class Caller:
    """Who has a session: its connections to a server of the run, and its ends of the session's ports.

    `server` names the host that it turns to; it may be another one each time.
    """

    shortcut = ""

    def __init__(self, run: Takeover, name: str, server: Callable[[], str]) -> None:
        self.run, self.world, self.caller = run, run.world, name
        self.address, self._server = name, server
        self.is_gone = False
        self.outgoing: dict[int, tuple[Up, ...]] = {}
        self.session: Session | None = None
        self._link: WorkerExecutor | None = None
        self._connections: tuple[Connection, Connection] | None = None
        self._arriving: dict[int, list[Any]] = {}
        self._held: dict[int, tuple[Any, ...]] = {}
        self._news: list[tuple[asked.Effect, Any]] = []

    def speak(self, session: Session) -> None:
        self.disconnect()
        self.session = session
        self._link = WorkerExecutor(session, self, self, self)

    def tell(self, event: said.Event) -> None:
        if self._link is None or self.is_gone or self._link.session.phase is Phase.LEFT:
            return
        self._link.feed(event)
        self._link.session.check_invariants()
        while self._news:
            effect, values = self._news.pop(0)
            self.learns(effect, values)

    def learns(self, effect: asked.Effect, values: Any) -> None:
        raise NotImplementedError

    # Network.

    @property
    def progress(self) -> Heartbeat:
        raise NotImplementedError

    def now(self) -> float:
        return self.world.now

    def connect(self, place: int = 0) -> None:
        server, pair = self._server(), []
        for _ in range(2):
            pair.append(
                Connection(
                    self.world,
                    self.run.weather,
                    self.run.route(),
                    self.caller,
                    to_broker=lambda *_: None,  # there is nobody yet
                    to_worker=self._hears,
                )
            )
        control, bulk = self._connections = (pair[0], pair[1])

        def comes_up() -> None:
            if self._connections is None or self._connections[0] is not control:
                return
            host = self.run.hosts.get(server)
            if host is None or not host.is_alive:
                self.world.after(0.3 * FOUND_OUT_S[1], comes_up)
                return
            for each in (control, bulk):
                host.connects(each)
                each.comes_up(self.world.now)
            # It ends with this life of the server.
            for each in (control, bulk):
                each._to_broker = lambda *heard: host.hears(*heard)  # noqa: PLW0108
            self._watch(host, control)
            self.tell(said.Connected())

        self.world.after(self.world.dice.uniform(0.01, 0.2), comes_up)

    def _watch(self, host: Host, control: Connection) -> None:
        """Find out that the server is gone, as the system tells of it."""
        if self._connections is None or self._connections[0] is not control:
            return
        if not host.is_alive or control.is_severed:
            self.tell(said.Disconnected("The connection broke."))
            return
        self.world.after(self.world.dice.uniform(*FOUND_OUT_S), lambda: self._watch(host, control))

    def _hears(self, connection: Connection, message: Message, payload: Any) -> None:
        if self._connections is None or connection not in self._connections or self._link is None:
            return
        self._link.payload = payload
        self.tell(said.Received(message))
        if self._link is not None:
            self._link.payload = None

    def breaks(self) -> None:
        """Its connections break: what is under way is lost, and both ends find out."""
        for each in self._connections or ():
            each.sever()
            each.is_found_gone(self.world.dice.uniform(0, 2.0))

    def disconnect(self) -> None:
        connections, self._connections = self._connections, None
        for each in connections or ():
            each.hang_up()

    def send(self, message: Message, payload: Any = None, *, bulk: bool = False) -> None:
        if self._connections is not None:
            self._connections[bulk].up(message, payload)

    def welcomed(self, epoch: str) -> None:
        pass

    def say(self, text: str, *, trouble: bool = False) -> None:
        self.world.tell(self.caller, text)

    def take_in(self, effect: asked.Effect, values: Any = None) -> None:
        self._news.append((effect, values))

    # Memory.

    def begin(self, layout: FragmentLayout) -> None:
        self._arriving[layout.fragment] = [None] * layout.chunks

    def store(self, fragment: int, index: int, payload: Any, wire_dtype: str) -> None:
        self._arriving[fragment][index] = payload

    def follow(self, *_: Any) -> int | None:
        raise AssertionError("versions come whole")

    def finish(self, fragment: int) -> tuple[Any, ...]:
        self._held[fragment] = tuple(self._arriving.pop(fragment))
        return self._held[fragment]

    def held(self, fragment: int) -> tuple[Any, ...] | None:
        return self._held.get(fragment)

    def forget(self) -> None:
        self._held.clear()

    def prepare(self, push_id: int, layout: FragmentLayout) -> bool:
        held = self._held.get(layout.fragment)
        if held is None:
            return False
        sizes = [span_bytes(span, "fp32") for span in layout.spans]
        self.outgoing[push_id] = tuple(
            Up(each.contents, size) for each, size in zip(held, sizes, strict=True)
        )
        return True

    def name(self, layout: FragmentLayout) -> None:
        raise AssertionError("nothing is frozen")

    def chunk(self, push_id: int, fragment: int, index: int) -> Up:
        return self.outgoing[push_id][index]

    def drop(self, push_id: int) -> None:
        self.outgoing.pop(push_id, None)
