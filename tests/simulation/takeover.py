"""A run with a hub, a standby and workers that train, through kills, cuts and takeovers.

    Takeover(seed=7).run()

The cores of the hub and of the standby are the real ones, and so are the workers' sessions. Each version
is looked at: is every push in it once, and whole, and named in its ledger?
Besides, no hub releases a version once another has taken over, and when it is calm everybody gets on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.core.versions.record import Resumption
from diloco_broker.standby import core as standby
from diloco_protocol import messages
from diloco_protocol.messages import Message
from kit.core_harness import a_config, a_manifest, layered
from simulation.hosts import CHUNKS, TICK_S, Host, Hub
from simulation.network import Connection, Weather, World
from simulation.tensors import demand
from simulation.trainers import Trainer

LEASE_S = 3.0
SERVERS = ("hub", "standby")
BACK_WITHIN_S = 20.0  # a worker that was killed is started again


@dataclass(frozen=True)
class Faults:
    """How often each comes, in an hour: kills of workers and of brokers, broken connections, cuts."""

    workers: float = 30.0
    connections: float = 40.0
    cuts: float = 120.0
    brokers: float = 60.0


class Roamer(Trainer):
    """A worker that knows both addresses."""

    places = 2

    def __init__(self, run: Takeover, worker_id: str, process: int) -> None:
        super().__init__(run, worker_id, process, self._where)
        self.place = 0

    def _where(self) -> str:
        name = SERVERS[self.place]
        return "nowhere" if self.run.is_cut(self.worker_id, name) else name

    def connect(self, place: int = 0) -> None:
        self.place = place
        super().connect(place)


class Watched(Hub):
    """A hub of which every version is compared with who may release any."""

    def __init__(
        self, run: Takeover, disk: dict[str, Resumption], name: str, term: int = 0
    ) -> None:
        has_standby = name == "hub"
        config = replace(run.config, standby=has_standby)
        super().__init__(run, disk, name, config, term)
        self.is_stopped, self._mail = False, list[Any]()
        self._newest = self._versions()

    def _versions(self) -> list[object]:
        return [each.version for each in self.core.state.versions.trained]

    def handled(self, event: events.Event) -> None:
        super().handled(event)
        newest = self._versions()
        if newest != self._newest:
            self._newest = newest
            self.run.released(self)

    def dies(self) -> None:
        super().dies()
        self.run.link.breaks(self)

    def _tick(self) -> None:
        if self.is_stopped and self.is_alive:
            self.world.after(TICK_S, self._tick)
        else:
            super()._tick()

    def hears(self, connection: Connection, message: Message, payload: Any) -> None:
        if self.is_stopped:
            self._mail.append((connection, message, payload))
        else:
            super().hears(connection, message, payload)

    def _work(self) -> None:
        if self.is_stopped:
            self.world.after(TICK_S, self._work)
        else:
            super()._work()

    def stops_for(self, seconds: float) -> None:
        self.is_stopped = True
        self.world.tell(self.name, f"is stopped for {seconds:.1f} s")

        def goes_on() -> None:
            self.is_stopped = False
            mail, self._mail = self._mail, []
            for each in mail:
                self.hears(*each)

        self.world.after(seconds, goes_on)


class Link:
    """What a standby says to the hub of the moment, and hears of it, over one connection at a time."""

    def __init__(self, run: Takeover) -> None:
        self._run = run
        self._connection: Connection | None = None

    def breaks(self, host: Host | None = None) -> None:
        if self._connection is not None:
            self._connection.sever()
            self._connection = None
            self._run.follower.core.hub_lost()

    def send(self, message: Message) -> None:
        run, host = self._run, self._run.hosts["hub"]
        if not host.is_alive or run.is_cut("standby", "hub"):
            return
        if self._connection is None:
            self._connection = Connection(
                run.world,
                run.weather,
                run.route(),
                "standby",
                to_broker=host.hears,
                to_worker=self._hears,
            )
            host.connects(self._connection)
        self._connection.up(message)

    def _hears(self, connection: Connection, message: Message, _: Any) -> None:
        if connection is self._connection:
            self._run.follower.hears_hub(message)


class Follower(Host):
    """One life of a standby; what it has taken over is another host of the same name."""

    def __init__(self, run: Takeover) -> None:
        super().__init__(run, "standby")
        draw = partial(run.world.dice.getrandbits, 63)
        self.core: Any = standby.Standby("sb", "hub", draw, self.world.now)

    def _tick(self) -> None:
        if self.is_alive and self.run.taken_over is None:
            self.do(self.core.tick(self.world.now))
            self.world.after(TICK_S, self._tick)

    def takes(self, received: events.Received) -> None:
        self.do(self.core.receive(received.route, received.message, self.world.now))

    def hears_hub(self, message: Message) -> None:
        if self.is_alive and self.run.taken_over is None:
            self.do(self.core.receive_from_hub(message, self.world.now))

    def do(self, commands: standby.Commands) -> None:
        for command in commands:
            match command:
                case standby.SendToHub(message):
                    self.run.link.send(message)
                case standby.Send(route, message):
                    self.send(effects.Send(route, message))
                case standby.TakeOver(term, why):
                    self.world.tell("standby", f"takes over: {why}")
                    self.run.takes_over(term)
                case standby.Log(text):
                    self.world.tell("standby", text)


class Takeover:
    """See the head of this module."""

    def __init__(self, seed: int, faults: Faults | None = None, **of_the_run: Any) -> None:
        self.seed, self.faults = seed, faults or Faults()
        self.world = World(seed)
        self.weather = Weather(stall=0.002)
        pieces = of_the_run.get("num_fragments", 1)
        self.manifest = a_manifest(CHUNKS) if pieces == 1 else layered(pieces, CHUNKS)
        self.config: BrokerConfig = a_config(
            3,
            save_dir="run",
            disconnect_grace=1.0,
            heartbeat_timeout=60.0,
            recover_wait=5.0,
            deterministic=of_the_run.get("mode") != "async",  # so that pushes count whole
            stall_timeout=0.0,
            standby=True,
            lease=LEASE_S,
            **of_the_run,
        )
        self.hosts: dict[str, Host] = {}
        self._names = [f"w{number}" for number in range(self.world.dice.choice((3, 4, 5)))]
        self.workers: dict[str, Roamer] = {}
        self.refused: list[tuple[str, str]] = []
        self.versions = 0
        self.taken_over: int | None = None  # the term
        self.releases: list[tuple[str, float]] = []
        self.link = Link(self)
        self._disk: dict[str, Resumption] = {}
        self._disk_there: dict[str, Resumption] = {}  # of the standby
        self._cut: set[frozenset[str]] = set()
        self._numbers = iter(range(1 << 30))
        self._is_calm = False

    def route(self) -> bytes:
        return b"route-%d" % next(self._numbers)

    @property
    def follower(self) -> Any:
        return self.hosts["standby"]

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cut

    def released(self, host: Watched) -> None:
        self.releases.append((host.name, self.world.now))
        replaced = host.name == "hub" and self.taken_over is not None
        demand(not replaced, "the hub releases a version, and was replaced")

    def takes_over(self, term: int) -> None:
        self.taken_over = term
        self.link.breaks()
        self.follower.dies()  # its sockets are closed
        self._begins_at("standby")

    def _begins_at(self, name: str) -> None:
        """A life of a broker, with what it has on its disk."""
        if name == "hub":
            Watched(self, self._disk, name).begins()
        elif self.taken_over is None:
            Follower(self).begins()
        else:
            Watched(self, self._disk_there, name, self.taken_over).begins()

    def run(self, seconds: float = 150.0) -> Takeover:
        """Raises with the seed and the story when a promise is broken."""
        try:
            for name in SERVERS:
                self._begins_at(name)
            for worker_id in self._names:
                self._process(worker_id)
            self._copies()
            self._plan()
            self.world.run(seconds)
            self._is_calm = True
            self._cut.clear()
            self.world.tell("", "from here on it is calm")
            self.world.run(seconds + 30.0)
            before = {name: each.counted for name, each in self.workers.items()}
            self.world.run(seconds + 400.0, lambda: not self._waiting(before))
            demand(not self._waiting(before), "no progress in calm: {}", self._waiting(before))
        except Exception as error:
            story = self.world.story(lines=120)
            raise AssertionError(f"seed {self.seed}\n{story}\n{error}") from error
        return self

    def _waiting(self, before: dict[str, int]) -> list[str]:
        return [
            name
            for name, each in self.workers.items()
            if each.is_gone or each.counted < before[name] + 2
        ]

    def _process(self, worker_id: str) -> None:
        former = self.workers.get(worker_id)
        if former is None or former.is_gone:
            self.workers[worker_id] = Roamer(self, worker_id, next(self._numbers))
            self.workers[worker_id].begins()

    def _copies(self) -> None:
        """The standby has the hub's newest checkpoint; and tells a hub that it was replaced."""
        if not self.is_cut("hub", "standby") and self.hosts["standby"].is_alive:
            if self.taken_over is None and "newest" in self._disk:
                self._disk_there["newest"] = self._disk["newest"]
            elif self.taken_over is not None:
                told = messages.Promise("sb", 1, wants="over", term=self.taken_over)
                self._tells(told)
        self.world.after(self.world.dice.uniform(0.5, 3.0), self._copies)

    def _tells(self, told: Message) -> None:
        host = self.hosts["hub"]
        connection = Connection(
            self.world,
            self.weather,
            self.route(),
            "standby",
            to_broker=host.hears,
            to_worker=lambda *_: None,
        )
        host.connects(connection)
        connection.up(told)

    # What breaks.

    def _plan(self) -> None:
        for action, an_hour in (
            (self._kill_worker, self.faults.workers),
            (self._break, self.faults.connections),
            (self._cut_off, self.faults.cuts),
            (self._kill_broker, self.faults.brokers),
        ):
            if an_hour:
                self._again(action, an_hour)

    def _again(self, action: Callable[[], None], an_hour: float) -> None:
        def happens() -> None:
            if not self._is_calm:
                action()
                self._again(action, an_hour)

        self.world.after(self.world.dice.expovariate(an_hour / 3600.0), happens)

    def _kill_worker(self) -> None:
        worker_id = self.world.dice.choice(list(self.workers))
        if not self.workers[worker_id].is_gone:
            self.workers[worker_id].dies()
        self.world.after(
            self.world.dice.uniform(0.0, BACK_WITHIN_S), lambda: self._process(worker_id)
        )

    def _break(self) -> None:
        self.world.dice.choice(list(self.workers.values())).breaks()

    def _cut_off(self) -> None:
        """Some are cut off from others, or all is whole again."""
        dice, names = self.world.dice, [*SERVERS, *self.workers]
        whole = {frozenset((a, b)) for a in names for b in SERVERS if a != b}
        match dice.choice(("heal", "heal", "hub", "between", "some")):
            case "heal":
                self._cut = set()
            case "hub":
                self._cut = {pair for pair in whole if "hub" in pair}
            case "between":
                self._cut = {frozenset(SERVERS)}
            case "some":
                self._cut = {pair for pair in whole if dice.random() < 0.4}
        self.world.tell("", f"cut: {sorted(sorted(pair) for pair in self._cut)}")
        if self.is_cut(*SERVERS):
            self.link.breaks()
        for worker in self.workers.values():
            if self.is_cut(worker.worker_id, SERVERS[worker.place]):
                worker.breaks()

    def _kill_broker(self) -> None:
        """Either is killed, or the hub's process stopped."""
        name = self.world.dice.choice(SERVERS)
        host = self.hosts[name]
        if not host.is_alive:
            return
        if isinstance(host, Watched) and not host.is_stopped and self.world.dice.random() < 0.5:
            host.stops_for(self.world.dice.choice((1.0, 4.0, 20.0)))
            return
        host.dies()
        if name == "standby":
            self.link.breaks()
        away = self.world.dice.choice((0.5, 5.0, 40.0)) * self.world.dice.random()
        self.world.after(away, lambda: self._begins_at(name))
