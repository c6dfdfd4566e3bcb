"""Whole runs, simulated: one real broker core, many real worker sessions, a network that breaks.

    Simulation(Scenario(a_config(workers=4, num_fragments=2)), seed=7).run()

A run has two parts. While there are *troubles*, workers are killed, come back, leave, join, lose single
connections or the whole network. Then it is *calm*, and everyone who is left must get on: each worker
has to see some of its pushes end, or the run fails. The referee checks every promise all the time. The
same seed gives the same run; a failure names the seed and recounts the story.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from diloco_broker.config import BrokerConfig
from kit.core_harness import layered
from simulation.broker import BrokerHost
from simulation.disk import Disk
from simulation.network import Clock, Connection, Listener, Weather, World
from simulation.referee import Referee
from simulation.relays import RelayHost
from simulation.standby import DRIFT, HUB, PLACES, STANDBY, StandbyHost, copy_checkpoints, look
from simulation.tensors import Violation
from simulation.training import Habits
from simulation.troubles import Accidents, Troubles
from simulation.worker import Worker

BUSY = {"forces": 0.01, "blunders": 0.01, "repeats": 0.02}


@dataclass(frozen=True)
class Scenario:
    """What is simulated. `speeds`, `wants` and `timeouts` are drawn from for each worker."""

    config: BrokerConfig
    workers: int = 4  # processes at the beginning; they come within the first seconds
    most: int = 12  # processes at a time
    chunks: int = 3  # of each fragment
    steps_per_s: float = 4.0  # of a worker of speed 1
    speeds: tuple[float, float] = (0.3, 3.0)  # slowest and fastest worker, relative to that
    wants: tuple[dict[str, Any], ...] = ({},)
    timeouts: tuple[float, ...] = (600.0, 20.0)
    goal: int = 2  # pushes of each fragment that each worker must see end when it is calm
    troubles: Troubles = field(default_factory=Troubles)
    weather: Weather = field(default_factory=Weather)
    habits: dict[str, float] = field(default_factory=lambda: dict(BUSY))  # the same for all workers
    work_s: float = 0.002  # longest time that a piece of tensor work takes at the broker
    save_s: float = 0.5  # longest time that a checkpoint takes
    tick_s: float = 0.2  # between two ticks; the loop's own are closer, which only costs more
    watch_s: float = 1.0  # how often the referee checks that all workers make progress
    thoroughness: int = 1  # see `Referee`
    has_units: bool = False  # workers train on the units of a data set
    processes: tuple[int, ...] = (1,)  # of a worker, drawn from for each
    # What each relay connects to, the hub or another relay; of a worker its place is drawn.
    relays: Mapping[str, str] = field(default_factory=dict)

    @property
    def places(self) -> int:
        """Addresses that each worker knows."""
        return 2 if self.config.standby else 1

    @property
    def cycle_s(self) -> float:
        """Seconds in which the slowest worker makes its H steps."""
        return self.config.sync_every / (self.steps_per_s * self.speeds[0])

    @property
    def patience(self) -> float:
        """Seconds in which everything that depends on others comes to an end.

        Others may be a slow worker that has just joined, goes through several cycles until it has
        caught up, and dies unnoticed. In asynchronous mode they may all be in line for a slot.
        """
        config = self.config
        windows = config.fixed_grace + config.staging_deadline + config.recover_wait
        if self.troubles.hangs:
            windows += config.stall_timeout + config.heartbeat_timeout
        if config.durable:
            windows += 4 * self.troubles.full_s * bool(self.troubles.fulls) + 2 * self.save_s
        waits = 60.0 + 6 * self.cycle_s + 4 * config.heartbeat_timeout + windows
        if config.is_async:
            upload = self.chunks * self.weather.chunk_s[1]
            in_line = self.most * config.num_fragments * upload / config.staging_slots
            waits += in_line * (config.num_fragments if self.habits.get("forces") else 1)
        return waits


class Simulation:
    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.seed = seed
        self.world = World(seed)
        config = scenario.config
        self.disk = None if config.save_dir is None else Disk(config.keep)
        self.referee = Referee(
            config, scenario.patience, scenario.thoroughness, self.disk, lambda: self.alive
        )
        self.referee.has_relays = bool(scenario.relays)
        self.relays: dict[str, RelayHost] = {}
        self._up_at: dict[str, float] = {}  # by place, from when on it can be reached
        self._places: dict[str, str] = {}  # of workers, by process: where it connects
        self.hub = self._broker(self.disk)
        self._routes = 0
        self.accidents = Accidents(self)
        for name in scenario.relays:
            self.relay_begins(name)
        self.processes: list[Worker] = []
        self._manifest = layered(scenario.config.num_fragments, scenario.chunks)
        self._alive: list[Worker] = []
        self._calm_since: float | None = None
        self._goals: dict[str, list[int]] = {}
        self.term: int | None = None  # of the standby, once it has taken over
        self.standby: StandbyHost | BrokerHost | None = None
        self.standby_disk = Disk(config.keep)
        self.link_up_at = 0.0  # from when on the standby can reach the hub
        if config.standby:
            self.standby = StandbyHost(self)
            copy_checkpoints(self)
            look(self)
        self._watch()

    def run(self) -> Simulation:
        """Simulate it all; raises Violation, with the seed and the story, when a promise is broken."""
        world, scenario = self.world, self.scenario
        for _ in range(scenario.workers):
            world.after(world.dice.uniform(0, 3), self.newcomer_if_room)
        self.accidents.begin()
        self.passes(scenario.troubles.seconds)
        self.accidents.end()
        world.tell("", "from here on it is calm")
        self._calm_since = world.now
        self.newcomer()
        with self._telling():
            hung_s = max((each.hangs_until - world.now for each in self.alive), default=0.0)
            long = scenario.goal * scenario.patience + max(hung_s, 0.0)
            world.run(world.now + long, self._is_enough)
            slow = self._laggards()
            if slow:
                raise Violation(f"no end within {long:.0f} s of calm: {slow}")
            self.referee.at_the_end(self.broker.core)
        return self

    def passes(self, seconds: float) -> None:
        """Time goes on; raises Violation as `run` does."""
        with self._telling():
            self.world.run(self.world.now + seconds)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Errors in the body are raised with the seed and the story that led to them."""
        try:
            yield
        except Exception as error:
            what = f"At {self.world.now:.3f} s: {type(error).__name__}: {error}"
            named = [p.name for p in self.processes if p.name in what or p.worker_id in what]
            chapters = [self.world.story(name, lines=20) for name in named[-3:]]
            told = "\n\n".join((*chapters, self.world.story(lines=60), what))
            raise Violation(f"seed {self.seed}, {self.scenario}\n{told}") from error

    @property
    def fingerprint(self) -> object:
        tags = [each.version for each in self.broker.core.state.versions.fragments]
        return tags, self.world.events, self.broker.messages, self.world.now

    def counted(self) -> int:
        """Pushes that ended well, as their workers heard."""
        return sum(record.ending == "counted" for record in self.referee.records.values())

    # Who takes part.

    @property
    def alive(self) -> list[Worker]:
        if not all(process.is_alive for process in self._alive):
            self._alive = [process for process in self._alive if process.is_alive]
        return self._alive

    def newcomer(self, worker_id: str | None = None, **habits: Any) -> Worker:
        """A new process begins, by default with an id of its own and habits that are drawn."""
        scenario, dice = self.scenario, self.world.dice
        number = len(self.processes)
        worker_id = worker_id or f"w{number}"
        slowest, fastest = scenario.speeds
        drawn: dict[str, Any] = {
            "speed": scenario.steps_per_s * slowest * (fastest / slowest) ** dice.random(),
            "first_step": dice.choice((0, dice.randrange(scenario.config.sync_every))),
            "wants": dice.choice(scenario.wants),
            "timeout": dice.choice(scenario.timeouts),
        }
        if len(scenario.processes) > 1:
            drawn["processes"] = dice.choice(scenario.processes)
        process = Worker(
            self.world,
            self.referee,
            f"{worker_id}/{number}",
            worker_id,
            manifest=self._manifest,
            habits=Habits(**drawn | scenario.habits | habits),
            connect=self._connect,
            has_units=scenario.has_units,
            places=scenario.places,
            clock=self.clock(worker_id),
        )
        self.world.tell(process.name, f"begins: {process.habits}")
        self.processes.append(process)
        self._alive.append(process)
        process.start()
        return process

    def newcomer_if_room(self) -> None:
        if len(self.alive) < self.scenario.most:
            self.newcomer()

    def comes_again(self, worker_id: str) -> None:
        """A new process with the id of one that is gone."""
        if not any(process.worker_id == worker_id for process in self.alive):
            self.newcomer(worker_id)

    def _connect(self, worker: Worker, to_worker: Listener) -> Connection:
        place, world = self.place_of(worker), self.world
        connection = self.connection(place, worker.name, to_worker)
        own = max(worker.offline_until, worker.reaches_at[worker.place])
        reachable = max(world.now, own, self.up_at(place))
        connection.comes_up(reachable + world.dice.expovariate(1 / 0.1))
        world.after(connection.is_up_at - world.now, lambda: self.host(place).connects(connection))
        if world.now < worker.reaches_at[worker.place] and world.dice.random() < 0.5:
            self.finds_out(connection, world.dice.uniform(0, 0.3))  # it is refused at once
        return connection

    def connection(
        self, place: str, owner: str, to_worker: Listener, weather: Weather | None = None
    ) -> Connection:
        self._routes += 1
        return Connection(
            self.world,
            weather or self.scenario.weather,
            b"route-%d" % self._routes,
            owner,
            to_broker=lambda *heard: self.host(place).hears(*heard),  # that of then
            to_worker=to_worker,
        )

    # Brokers and relays.

    @property
    def broker(self) -> BrokerHost:
        """The one that has the run."""
        if self.term is not None:
            assert isinstance(self.standby, BrokerHost)
            return self.standby
        return self.hub

    def host(self, place: str) -> BrokerHost | RelayHost | StandbyHost:
        if place == STANDBY:
            assert self.standby is not None
            return self.standby
        return self.relays.get(place, self.hub)

    def up_at(self, place: str) -> float:
        return self._up_at.get(place, 0.0)

    def is_away(self, place: str, seconds: float) -> None:
        """It cannot be reached for this many seconds."""
        self._up_at[place] = max(self.up_at(place), self.world.now + seconds)

    def _broker(self, disk: Disk | None, place: str = HUB, **given: Any) -> BrokerHost:
        parts = (self.world, self.scenario, self.referee, disk, self.relays)
        return BrokerHost(*parts, clock=self.clock(place), **given)

    def clock(self, machine: str) -> Clock:
        """Clocks differ where leases depend on them. They are not drawn from the world's dice."""
        is_exact = not self.scenario.config.standby
        rate = 1.0 if is_exact else Random(f"{self.seed} {machine}").uniform(1 - DRIFT, 1 + DRIFT)
        return Clock(self.world, rate)

    def begin_anew(self, place: str) -> None:
        """Start the next incarnation of the host that was killed there."""
        if place == HUB and not self.hub.is_alive:
            self.hub = self._broker(self.disk, is_replaced=self.term is not None)
        elif place == STANDBY and self.standby is not None and not self.standby.is_alive:
            self.standby = StandbyHost(self) if self.term is None else self._successor(self.term)

    # The standby.

    @property
    def hub_answers(self) -> bool:
        """Whether the standby can reach the hub."""
        return self.hub.is_alive and self.world.now >= max(self.up_at(HUB), self.link_up_at)

    def takes_over(self, term: int) -> None:
        assert self.standby is not None
        self.hub.is_replaced_now()
        self.standby.dies()
        self.standby, self.term = self._successor(term), term
        for process in self.alive:
            process.online_since = max(process.online_since, self.world.now)
            self.accidents.may_begin_another_run(process, self.standby_disk)
            if process.place and process.connections is not None:
                self.finds_out(process.connections[0], self.world.dice.uniform(0, 0.5))

    def _successor(self, term: int) -> BrokerHost:
        return self._broker(self.standby_disk, STANDBY, term=term)

    # Relays.

    def place_of(self, worker: Worker) -> str:
        if not self.scenario.relays:
            return PLACES[worker.place]
        if worker.name not in self._places:
            self.moves(worker)
        return self._places[worker.name]

    def moves(self, worker: Worker) -> None:
        self._places[worker.name] = self.world.dice.choice((HUB, *self.scenario.relays))

    def relay_begins(self, name: str) -> None:
        self._up_at[name] = self.world.now
        self.relays[name] = RelayHost(self, name, self.scenario.relays[name])

    def relay_is_away(self, name: str, seconds: float) -> None:
        """A relay was killed, and begins again after `seconds`; its workers and relays find that out."""
        up_at = self._up_at[name] = self.world.now + seconds
        self.world.at(up_at, lambda: self.relay_begins(name))
        for process in self.alive:
            if self._places.get(process.name) == name:
                process.online_since = max(process.online_since, up_at)
                if process.connections is not None:
                    self.finds_out(process.connections[0], self.world.dice.uniform(0, 0.5))
        for each in self.relays.values():
            if each.hub == name and each.is_alive:
                self.world.after(self.world.dice.uniform(0, 0.5), each.loses_touch)

    def finds_out(self, connection: Connection, seconds: float) -> None:
        """The process that opened this connection finds out after `seconds` that it broke."""
        relay = self.relays.get(connection.owner)
        if relay is not None:
            self.world.after(seconds, lambda: relay.loses_touch(connection))
            return
        process = next((each for each in self.alive if each.name == connection.owner), None)
        if process is not None:
            self.accidents.finds_out(process, connection, seconds)

    def _fill_up(self) -> None:
        """In calm there are as many workers as a round needs."""
        config, state = self.scenario.config, self.broker.core.state
        floor = config.workers if state.first_round_pending else config.min_workers
        staying = sum(not process.training.leaving for process in self.alive)
        for _ in range(floor - staying):
            self.newcomer()

    # Getting on.

    def _watch(self) -> None:
        self.referee.now = self.world.now
        self.referee.watch(self.broker.core)
        if self._calm_since is not None:
            self._fill_up()
        self.world.after(self.scenario.watch_s, self._watch)

    def _is_enough(self) -> bool:
        return self.world.now > (self._calm_since or 0.0) + 2.0 and not self._laggards()

    def _laggards(self) -> list[str]:
        """Workers that have not seen enough of their pushes end since it is calm."""
        pieces, slow = self.scenario.config.num_fragments, []
        for process in self.alive:
            endings = [process.training.endings.get(piece, 0) for piece in range(pieces)]
            goal = self._goals.setdefault(process.name, [n + self.scenario.goal for n in endings])
            if any(n < wanted for n, wanted in zip(endings, goal, strict=True)):
                slow.append(f"{process.name} {endings} of {goal}")
        return slow
