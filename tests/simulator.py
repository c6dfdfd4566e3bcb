"""Whole runs, simulated: one real broker core, many real worker sessions, a network that breaks.

    outcome = Simulation(Scenario(a_config(workers=4, num_fragments=2)), seed=7).run()

A run has two parts. While there are *troubles*, workers are killed, come back, leave, join, lose single
connections or the whole network. Then it is *calm*, and everyone who is left must get on: each worker
has to see some of its pushes end, or the run fails. The referee checks every promise all the time. The
same seed gives the same run; a failure names the seed and tells the story.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from referee import Referee
from simulated_network import Connection, Weather, World
from simulated_tensors import Violation
from simulated_training import Habits
from simulated_worker import Listener, Worker
from stage import layered

from diloco_broker.config import BrokerConfig
from diloco_broker.core import Core
from diloco_broker.events import (
    Audit,
    DropPlaces,
    Event,
    ForgetBuffer,
    Log,
    PeerGone,
    Place,
    Received,
    Send,
    Tick,
    Work,
)
from diloco_protocol.errors import Code
from diloco_protocol.messages import Message

# Between two ticks of the core; the loop's own are closer, which changes nothing but the cost.
TICK_S = 0.2


@dataclass(frozen=True)
class Troubles:
    """What goes wrong, as the mean number of times a second, and for how long.

    Attributes:
        seconds: how long there are troubles.
        kills: a process dies; mostly one with the same id comes back after a while.
        breaks: a single connection breaks.
        outages: a worker is cut off for some seconds, and nobody is told.
        leaves, joins: a worker finishes; a new one comes.
        restarts: the broker is killed, and one that knows nothing is started in its place.
    """

    seconds: float = 60.0
    kills: float = 0.1
    breaks: float = 0.3
    outages: float = 0.05
    leaves: float = 0.04
    joins: float = 0.06
    restarts: float = 0.0


NO_TROUBLES = Troubles(seconds=0.0)


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        config: of the broker.
        workers: processes at the beginning; they come within the first seconds.
        most: processes at a time.
        chunks: of each fragment.
        steps_per_s: of a worker of speed 1.
        speeds: slowest and fastest worker, relative to that.
        wants, timeouts: drawn from for each worker; see `Habits`.
        weights, forces, blunders, repeats: of every worker; see `Habits`.
        goal: pushes of each fragment that each worker must see end when it is calm.
        troubles, weather: what goes wrong with workers, and how the network behaves.
        work_s: longest time that a piece of tensor work takes at the broker.
        thoroughness: see `Referee`.
    """

    config: BrokerConfig
    workers: int = 4
    most: int = 12
    chunks: int = 3
    steps_per_s: float = 4.0
    speeds: tuple[float, float] = (0.3, 3.0)
    wants: tuple[dict[str, Any], ...] = ({},)
    weights: tuple[float, ...] = (1.0, 1.0, 2.5)
    forces: float = 0.01
    blunders: float = 0.01
    repeats: float = 0.02
    timeouts: tuple[float, ...] = (600.0, 20.0)
    goal: int = 2
    troubles: Troubles = field(default_factory=Troubles)
    weather: Weather = field(default_factory=Weather)
    work_s: float = 0.002
    thoroughness: int = 1

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
        windows = config.grace + config.staging_deadline + config.recover_wait
        waits = 60.0 + 6 * self.cycle_s + 4 * config.heartbeat_timeout + windows
        if config.is_async:
            upload = self.chunks * self.weather.chunk_s[1]
            waits += self.most * config.num_fragments * upload / config.staging_slots
        return waits


@dataclass
class Outcome:
    """What a run came to. `fingerprint` is the same for the same seed.

    Attributes:
        rounds: versions made; in synchronous mode, rounds.
        endings: pushes by how they ended, as their workers heard.
        lost: pushes whose process was gone before it heard anything.
        processes: that took part, one after the other or together.
        seconds: simulated.
        events: things that happened.
    """

    rounds: int
    endings: dict[str, int]
    lost: int
    processes: int
    seconds: float
    events: int
    fingerprint: tuple[Any, ...] = field(repr=False, default=())


class BrokerHost:
    """The broker's loop: feeds the core and carries out what it asks for, tensor work in its order."""

    def __init__(self, world: World, scenario: Scenario, referee: Referee) -> None:
        self.world = world
        self.referee = referee
        self.core = Core(scenario.config, partial(world.dice.getrandbits, 64), world.now)
        self.is_alive = True
        self.messages = 0
        self._work_s = scenario.work_s
        self._routes: dict[bytes, Connection] = {}
        self._queue: deque[Work] = deque()
        self._is_working = False
        self._tick()

    def connects(self, connection: Connection) -> None:
        self._routes[connection.route] = connection

    def hears(self, connection: Connection, message: Message, payload: Any) -> None:
        if self.is_alive and connection.route in self._routes:
            self.messages += 1
            self._feed(Received(connection.route, message, payload))

    def dies(self) -> None:
        """Killed: its connections break, what it knew is lost."""
        self.is_alive = False
        for connection in self._routes.values():
            connection.sever()

    def _tick(self) -> None:
        if self.is_alive:
            self._feed(Tick())
            self.world.after(TICK_S, self._tick)

    def _feed(self, event: Event) -> None:
        pending = deque([event])
        while pending:
            event = pending.popleft()
            for effect in self.core.handle(event, self.world.now):
                match effect:
                    case Send(route, message, payload):
                        if not self._routes[route].down(message, payload):
                            pending.append(PeerGone(route))
                    case Log(level, text):
                        if level != "debug":
                            self.world.tell("broker", text)
                    case Audit() | ForgetBuffer():
                        pass  # the referee keeps books of its own; gradients are merged as sums
                    case DropPlaces():
                        kept = (work for work in self._queue if not isinstance(work, Place))
                        self._queue = deque(kept)
                    case _:
                        self._queue.append(effect)
            self.referee.now = self.world.now
            self.referee.after(self.core, event, self._queue)
        self._plan_work()

    def _plan_work(self) -> None:
        if self._queue and not self._is_working:
            self._is_working = True
            self.world.after(self.world.dice.uniform(0, self._work_s), self._do_work)

    def _do_work(self) -> None:
        self._is_working = False
        if self._queue and self.is_alive:
            self.referee.now = self.world.now
            self._feed(self.referee.tensors.carry_out(self._queue.popleft()))


class Simulation:
    """One run; see the head of this module."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.seed = seed
        self.world = World(seed)
        self.referee = Referee(scenario.config, scenario.patience, scenario.thoroughness)
        self.broker = BrokerHost(self.world, scenario, self.referee)
        self.processes: list[Worker] = []
        self._manifest = layered(scenario.config.num_fragments, scenario.chunks)
        self._routes = 0
        self._broker_up_at = 0.0
        self._calm_since: float | None = None
        self._goals: dict[str, list[int]] = {}
        self._watch()

    def run(self) -> Outcome:
        """Simulate it all; raises Violation, with the seed and the story, when a promise is broken."""
        world, scenario = self.world, self.scenario
        for _ in range(scenario.workers):
            self.world.after(world.dice.uniform(0, 3), self._newcomer)
        for action, rate in self._accidents():
            self._repeat(action, rate)
        self.passes(scenario.troubles.seconds)
        world.tell("", "from here on it is calm")
        self._calm_since = world.now
        self.newcomer()
        with self._telling():
            long = scenario.goal * scenario.patience
            world.run(world.now + long, self._is_enough)
            slow = self._laggards()
            if slow:
                raise Violation(f"no end within {long:.0f} s of calm: {slow}")
            self.referee.at_the_end(self.broker.core)
        return self._outcome()

    def passes(self, seconds: float) -> None:
        """Time goes on; raises Violation as `run` does."""
        with self._telling():
            self.world.run(self.world.now + seconds)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Whatever goes wrong in here is told with the seed and what led to it."""
        try:
            yield
        except Exception as error:
            what = f"At {self.world.now:.3f} s: {type(error).__name__}: {error}"
            named = [p.name for p in self.processes if p.name in what or p.worker_id in what]
            chapters = [self.world.story(name, lines=20) for name in named[-3:]]
            told = "\n\n".join((*chapters, self.world.story(lines=60), what))
            raise Violation(f"seed {self.seed}, {self.scenario}\n{told}") from error

    # Who takes part.

    @property
    def alive(self) -> list[Worker]:
        return [process for process in self.processes if process.is_alive]

    def newcomer(self, worker_id: str | None = None, **habits: Any) -> Worker:
        """A new process begins, by default with an id of its own and habits that are drawn."""
        scenario, dice = self.scenario, self.world.dice
        number = len(self.processes)
        worker_id = worker_id or f"w{number}"
        slowest, fastest = scenario.speeds
        drawn = {
            "speed": scenario.steps_per_s * slowest * (fastest / slowest) ** dice.random(),
            "first_step": dice.choice((0, dice.randrange(scenario.config.sync_every))),
            "wants": dice.choice(scenario.wants),
            "weights": scenario.weights,
            "timeout": dice.choice(scenario.timeouts),
            "forces": scenario.forces,
            "blunders": scenario.blunders,
            "repeats": scenario.repeats,
        }
        process = Worker(
            self.world,
            self.referee,
            f"{worker_id}/{number}",
            worker_id,
            self._manifest,
            Habits(**{**drawn, **habits}),
            self._connect,
        )
        self.world.tell(process.name, f"begins: {process.habits}")
        self.processes.append(process)
        process.start()
        return process

    def _newcomer(self) -> None:
        if len(self.alive) < self.scenario.most:
            self.newcomer()

    def _connect(self, worker: Worker, to_worker: Listener) -> Connection:
        self._routes += 1
        route = b"route-%d" % self._routes
        world = self.world

        def to_broker(connection: Connection, message: Message, payload: Any) -> None:
            self.broker.hears(connection, message, payload)

        connection = Connection(world, self.scenario.weather, route, to_broker, to_worker)
        reachable = max(world.now, worker.offline_until, self._broker_up_at)
        connection.comes_up(reachable + world.dice.expovariate(1 / 0.1))
        world.after(connection.is_up_at - world.now, lambda: self.broker.connects(connection))
        return connection

    def _fill_up(self) -> None:
        """In calm there are as many workers as a round needs."""
        config, state = self.scenario.config, self.broker.core.state
        floor = config.workers if state.first_round_pending else config.min_workers
        staying = sum(not process.training.leaving for process in self.alive)
        for _ in range(floor - staying):
            self.newcomer()

    # What goes wrong.

    def _accidents(self) -> Iterator[tuple[Callable[[], None], float]]:
        troubles = self.scenario.troubles
        yield self._kill, troubles.kills
        yield self._break, troubles.breaks
        yield self._outage, troubles.outages
        yield self._leave, troubles.leaves
        yield self._newcomer, troubles.joins
        yield self._restart, troubles.restarts

    def _repeat(self, action: Callable[[], None], rate: float) -> None:
        if rate <= 0:
            return

        def again() -> None:
            if self._calm_since is None:
                action()
                self._repeat(action, rate)

        self.world.after(self.world.dice.expovariate(rate), again)

    def _victim(self) -> Worker | None:
        alive = self.alive
        return self.world.dice.choice(alive) if alive else None

    def _kill(self) -> None:
        """A process dies; its host may die with it, and then nobody hears of it."""
        victim, dice = self._victim(), self.world.dice
        if victim is None:
            return
        victim.dies()
        silent = dice.random() < 0.3
        for connection in victim.connections or ():
            if silent or dice.random() < 0.5:
                connection.sever()
            if not silent:
                connection.is_found_gone(dice.expovariate(1 / 0.2))
        again = dice.random()
        if again < 0.6:
            self.world.after(dice.expovariate(1 / 3), lambda: self._comes_again(victim.worker_id))
        elif again < 0.8:
            self.world.after(dice.expovariate(1 / 5), self._newcomer)

    def _comes_again(self, worker_id: str) -> None:
        if not any(process.worker_id == worker_id for process in self.alive):
            self.newcomer(worker_id)

    def _break(self) -> None:
        """One of a worker's two connections breaks, and both ends find out in their own time."""
        victim, dice = self._victim(), self.world.dice
        if victim is None or victim.connections is None:
            return
        which = dice.randrange(2)
        connection = victim.connections[which]
        self.world.tell(victim.name, f"loses {'bulk' if which else 'control'} {connection.route!r}")
        connection.sever()
        connection.is_found_gone(dice.choice((0.0, 0.1, 3.0, 30.0)) * dice.random())
        self._finds_out(victim, connection, dice.choice((0.0, 0.1, 3.0, 10.0)) * dice.random())

    def _finds_out(self, victim: Worker, connection: Connection, seconds: float) -> None:
        def find_out() -> None:
            if victim.connections is not None and connection in victim.connections:
                victim.loses_touch("The connection broke.")

        self.world.after(seconds, find_out)

    def _outage(self) -> None:
        """A worker is cut off. Either end finds out by the silence, or the worker when it is over."""
        victim, dice = self._victim(), self.world.dice
        if victim is None:
            return
        seconds = dice.expovariate(1 / 6)
        self.world.tell(victim.name, f"is cut off for {seconds:.1f} s")
        victim.offline_until = victim.online_since = self.world.now + seconds
        for connection in victim.connections or ():
            connection.sever()
        if victim.connections is not None and dice.random() < 0.7:
            self._finds_out(victim, victim.connections[0], seconds)

    def _leave(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.leaves()

    def _restart(self) -> None:
        """The broker is killed; another one, which gets its parameters from the workers, comes up."""
        world, dice = self.world, self.world.dice
        world.tell("broker", "is killed")
        self.broker.dies()
        self._broker_up_at = world.now + dice.expovariate(1 / 2)
        world.after(self._broker_up_at - world.now, self._begin_anew)
        for process in self.alive:
            process.online_since = self._broker_up_at
            # A run that nobody has brought back goes on under another name.
            process.may_be_refused |= {(Code.RUN_DIFFERS, True), (Code.RUN_DIFFERS, False)}
            if process.connections is not None and dice.random() < 0.8:
                self._finds_out(process, process.connections[0], dice.uniform(0, 0.5))

    def _begin_anew(self) -> None:
        if not self.broker.is_alive:
            self.referee.forgets()
            self.broker = BrokerHost(self.world, self.scenario, self.referee)

    # Getting on.

    def _watch(self) -> None:
        self.referee.now = self.world.now
        self.referee.watch(self.broker.core, self.processes)
        if self._calm_since is not None:
            self._fill_up()
        self.world.after(1.0, self._watch)

    def _is_enough(self) -> bool:
        return self.world.now > (self._calm_since or 0.0) + 2.0 and not self._laggards()

    def _laggards(self) -> list[str]:
        """Who has not seen enough of its pushes end since it is calm."""
        pieces, slow = self.scenario.config.num_fragments, []
        for process in self.alive:
            endings = [process.training.endings.get(piece, 0) for piece in range(pieces)]
            goal = self._goals.setdefault(process.name, [n + self.scenario.goal for n in endings])
            if any(n < wanted for n, wanted in zip(endings, goal, strict=True)):
                slow.append(f"{process.name} {endings} of {goal}")
        return slow

    def _outcome(self) -> Outcome:
        endings: dict[str, int] = {}
        for record in self.referee.records.values():
            name = str(record.ending or "")
            endings[name] = endings.get(name, 0) + 1
        lost = endings.pop("", 0)
        stocks = self.broker.core.state.shelf.stocks
        tags = tuple(stock.version for stock in stocks)
        return Outcome(
            self.referee.versions_made,
            endings,
            lost,
            len(self.processes),
            self.world.now,
            self.world.events,
            (tags, self.world.events, self.broker.messages, self.world.now),
        )
