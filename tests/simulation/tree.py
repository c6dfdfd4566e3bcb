"""A tree of brokers, simulated: a hub, relays on two levels, workers behind them, and what breaks.

    Tree(seed=7).run()

There is one question to each version of the hub's: is every push in it once, and whole, and does the
ledger say so? While there are faults processes are killed, connections break, workers turn to other
brokers with what they have in flight. Then it is calm, and everybody must get on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.core.versions.record import Resumption
from kit.core_harness import a_config, a_manifest, layered
from simulation.contents import Key
from simulation.network import Weather, World
from simulation.sites import CHUNKS, Caller, Host, Hub, Pace, RelayHost
from simulation.tensors import demand
from simulation.trainers import Trainer

# Options that the hub and its sites have in common here; the rest comes from the hub.
OF_SITES = ("relays", "stall_timeout", "disconnect_grace", "heartbeat_timeout", "recover_wait")


@dataclass(frozen=True)
class Faults:
    """How often each comes, in an hour."""

    workers: float = 40.0
    relays: float = 25.0
    connections: float = 50.0
    moves: float = 20.0
    hubs: float = 0.0
    lost_disks: float = 0.0  # part of the hub's deaths that take its checkpoints along
    cuts: float = 0.0  # of a relay's line


class Tree:
    """See the head of this module: relays `north`, `south` and `middle`, and `deep` behind that.

    Without `has_model` the hub begins with the parameters of a worker. `places` are where the workers
    are, `options` those of the hub, and of the sites where they have them.
    """

    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        *,
        has_model: bool = True,
        places: Sequence[str] = ("north", "north", "south", "middle", "deep", "deep", "hub"),
        pace: Pace | None = None,
        weather: Weather | None = None,
        **options: Any,
    ) -> None:
        self.seed, self.faults, self.has_model = seed, faults or Faults(), has_model
        self.world = World(seed)
        self.weather, self.pace = weather or Weather(stall=0.002), pace or Pace()
        pieces = options.get("num_fragments", 1)
        self.manifest = a_manifest(CHUNKS) if pieces == 1 else layered(pieces, CHUNKS)
        usual = {"disconnect_grace": 1.0, "heartbeat_timeout": 60.0, "recover_wait": 5.0}
        options = usual | {"relays": True, "stall_timeout": 0.0} | options
        is_async = options.get("mode") == "async"
        # With rounds that many relays and workers at the hub, else workers in all.
        expected = len(places) if is_async else 2 + places.count("hub")
        self.config: BrokerConfig = a_config(expected, save_dir="run", **options)
        kept = {name: options[name] for name in OF_SITES if name in options}
        of_site = a_config(1, **kept | ({"mode": "async"} if is_async else {}))
        self.relays = {name: replace(of_site) for name in ("north", "south", "middle", "deep")}
        self.parents = {"north": "hub", "south": "hub", "middle": "hub", "deep": "middle"}
        self.servers = ("hub", *self.relays)
        self.server_of = {f"w{number}": place for number, place in enumerate(places)}
        self.hosts: dict[str, Host] = {}
        self.workers: dict[str, Trainer] = {}
        self.told: set[Key] = set()  # pushes that their workers heard to be counted
        self.refused: list[tuple[str, str]] = []
        self.versions, self.longest, self.made_at = 0, 0.0, 0.0  # of the hub, and between two
        self._disk: dict[str, Resumption] = {}
        self._numbers = iter(range(1 << 30))
        self.strikes = 0  # faults so far
        self._is_calm = False

    def route(self) -> bytes:
        return b"route-%d" % next(self._numbers)

    @property
    def hub(self) -> Hub:
        hub = self.hosts["hub"]
        assert isinstance(hub, Hub)
        return hub

    def run(self, seconds: float = 900.0) -> Tree:
        """Raises with the seed and the story when a promise is broken."""
        try:
            Hub(self, self._disk).begins()
            for name in self.relays:
                RelayHost(self, name).begins()
            for worker_id in self.server_of:
                self._process(worker_id)
            self._plan()
            self.world.run(seconds)
            self._is_calm = True
            self.world.tell("", "from here on it is calm")
            self.world.run(seconds + 20.0)
            before = {name: each.counted for name, each in self.workers.items()}
            patience = max(400.0, 8 * self.pace.cycle[1])
            self.world.run(seconds + patience, lambda: not self._waiting(before))
            demand(not self._waiting(before), "no progress in calm: {}", self._waiting(before))
            self._at_the_end()
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

    def _at_the_end(self) -> None:
        if not self.faults.hubs:
            chunks = self.hub.chunks.values()
            lost = [key for key in self.told if not any(key in each.contents for each in chunks)]
            demand(not lost, "counted, and lost: {}", lost)

    # What breaks.

    def _plan(self) -> None:
        for action, an_hour in (
            (self._kill_worker, self.faults.workers),
            (self._kill_relay, self.faults.relays),
            (self._break, self.faults.connections),
            (self._move, self.faults.moves),
            (self._cut_off, self.faults.cuts),
            (self._kill_hub, self.faults.hubs),
        ):
            if an_hour:
                self._again(action, an_hour)

    def _again(self, action: Callable[[], None], an_hour: float) -> None:
        def happens() -> None:
            if not self._is_calm:
                action()
                self.strikes += 1
                self._again(action, an_hour)

        self.world.after(self.world.dice.expovariate(an_hour / 3600.0), happens)

    def _process(self, worker_id: str) -> None:
        former = self.workers.get(worker_id)
        if former is None or former.is_gone:
            self.workers[worker_id] = Trainer(self, worker_id, next(self._numbers))
            self.workers[worker_id].begins()

    def _kill_worker(self) -> None:
        worker_id = self.world.dice.choice(list(self.workers))
        if not self.workers[worker_id].is_gone:
            self.workers[worker_id].dies()
        self.world.after(
            self.world.dice.uniform(0.0, self.pace.back), lambda: self._process(worker_id)
        )

    def _kill_relay(self) -> None:
        name = self.world.dice.choice(list(self.relays))
        if not self.hosts[name].is_alive:
            return
        self.hosts[name].dies()
        away = self.world.dice.choice(self.pace.away)
        self.world.after(self.world.dice.uniform(0, away), lambda: RelayHost(self, name).begins())

    def _kill_hub(self) -> None:
        if self.hub.is_alive:
            self.hub.dies()
            if self.world.dice.random() < self.faults.lost_disks:
                self.world.tell("hub", "loses its checkpoints")
                self._disk.clear()
            away = self.world.dice.uniform(0, 5.0)
            self.world.after(away, lambda: Hub(self, self._disk).begins())

    def _callers(self) -> Iterator[Caller]:
        yield from self.workers.values()
        for host in self.hosts.values():
            if isinstance(host, RelayHost):
                yield host.uplink

    def _break(self) -> None:
        self.world.dice.choice(list(self._callers())).breaks()

    def _cut_off(self) -> None:
        """The line of a site is down for a while; its parent does not hear of it at once."""
        host = self.hosts[self.world.dice.choice(list(self.relays))]
        if isinstance(host, RelayHost) and host.is_alive:
            seconds = self.world.dice.uniform(*self.pace.cut)
            self.world.tell(host.name, f"is cut off for {seconds:.0f} s")
            host.uplink.cut_until = self.world.now + seconds
            host.uplink.breaks()

    def _move(self) -> None:
        """A worker turns to another broker of the tree, with what it has in flight."""
        worker_id = self.world.dice.choice(list(self.workers))
        self.server_of[worker_id] = self.world.dice.choice(self.servers)
        self.world.tell(worker_id, f"moves to {self.server_of[worker_id]}")
        self.workers[worker_id].breaks()
