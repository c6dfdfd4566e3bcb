"""A hub, its standby and voters in a network in which anything may happen: does the fence hold?

    Fence(seed=7).run()

The hub has the real core of a broker, the standby its own, a worker its real votes. Workers give
parameters and push, and every version that the hub makes known is noted: after the takeover there is no
new one. Besides, the hub is asked all the time whether it may release one.
Links are cut one by one, messages are held up for minutes, processes are killed, stopped and go on,
clocks run at rates of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.core.machine import Core
from diloco_broker.standby import core as standby
from diloco_protocol import messages
from diloco_protocol.errors import Code
from diloco_protocol.version import VersionId
from diloco_worker.session.connection import Votes
from diloco_worker.session.effects import Send
from kit.core_harness import a_config, a_manifest
from kit.noted_tensors import CHUNK_ELEMENTS, NotedTensors, Payload
from simulation.network import World
from simulation.tensors import demand

LEASE_S = 3.0
TICK_S = 0.2
# A worker that has no answer turns to the other address.
PATIENCE_S = 1.0
DRIFT = 0.01  # clocks are off by that much at most


class Process:
    """One life of a process: a clock of its own, and mail that waits while it is stopped."""

    def __init__(self, fence: Fence, name: str, rate: float) -> None:
        self.fence, self.world, self.name, self._rate = fence, fence.world, name, rate
        self.is_alive, self.is_stopped = True, False
        self._mail: list[tuple[Process, Any]] = []
        self.world.tell(name, "begins")

    def begins(self) -> None:
        self._again()

    @property
    def now(self) -> float:
        return 1000.0 + self._rate * self.world.now

    def _again(self) -> None:
        if self.is_alive:
            if not self.is_stopped:
                self.ticks()
            self.world.after(TICK_S, self._again)

    def gets(self, sender: Process, message: Any) -> None:
        if self.is_stopped:
            self._mail.append((sender, message))
        elif self.is_alive:
            self.hears(sender, message)

    def stops_for(self, seconds: float) -> None:
        self.is_stopped = True
        self.world.tell(self.name, "is stopped")

        def goes_on() -> None:
            self.is_stopped = False
            self.world.tell(self.name, "goes on")
            mail, self._mail = self._mail, []
            for sender, message in mail:
                self.gets(sender, message)

        self.world.after(seconds, goes_on)

    def ticks(self) -> None:
        raise NotImplementedError

    def hears(self, sender: Process, message: Any) -> None:
        raise NotImplementedError


class HubProcess(Process):
    def __init__(self, fence: Fence, rate: float, known: str) -> None:
        super().__init__(fence, "hub", rate)
        self.core = Core(
            fence.config,
            lambda: self.world.dice.getrandbits(63),
            self.now,
        )
        assert self.core.state.standby is not None
        self.lease = self.core.state.standby
        self.lease.standby = known
        self._peers: dict[bytes, Process] = {}
        state = self.core.state
        assert state.model is not None
        self._tensors = NotedTensors(lambda: state.model.layout, None)  # type: ignore[arg-type, return-value]
        self._is_working = False
        self._known: set[VersionId] = set()  # versions that somebody was told of

    @property
    def may_release(self) -> bool:
        lease = self.lease  # it knows the time of the last event
        return self.is_alive and lease.holds and (lease.is_alone or self.now < lease.ends_at)

    def feed(self, event: events.Event) -> None:
        for effect in self.core.handle(event, events.Now.both(self.now)):
            match effect:
                case effects.Send(route, message):
                    if isinstance(message, messages.Released):
                        self._releases(message.version)
                    self.fence.send(self, self._peers[route], message)
                case effects.RecordVersion(version) if not version.counter:
                    self._releases(version)
                case effects.Log(text=text):
                    self.world.tell("hub", text)
                case effects.StoreInitial() | effects.Fold() | effects.Step():
                    self._tensors.add(effect)
                case effects.DropInitial():
                    self._tensors.add(effect)
        self._works()

    def _releases(self, version: VersionId) -> None:
        if version not in self._known:
            self._known.add(version)
            self.fence.released(version)

    def _works(self) -> None:
        """Tensor work takes its time; a process that is stopped does it later."""
        if self._tensors.queue and not self._is_working:
            self._is_working = True
            self.world.after(self.world.dice.choice((0.01, 0.1, 2.0)), self._does_one)

    def _does_one(self) -> None:
        if self.is_stopped:
            self.world.after(TICK_S, self._does_one)
        elif self.is_alive:
            self._is_working = False
            if self._tensors.queue:
                self.feed(self._tensors.do_one())

    def ticks(self) -> None:
        self.feed(events.Tick())

    def hears(self, sender: Process, message: Any) -> None:
        is_bulk = isinstance(message, messages.Chunk | messages.Credit)
        route = b"%d%s" % (id(sender), b" bulk" if is_bulk else b"")
        self._peers[route] = sender
        payload = Payload(4 * CHUNK_ELEMENTS) if isinstance(message, messages.Chunk) else None
        self.feed(events.Received(route, message, payload))


class StandbyProcess(Process):
    def __init__(self, fence: Fence, rate: float) -> None:
        super().__init__(fence, "standby", rate)
        self.core = standby.Standby("sb", "hub", lambda: self.world.dice.getrandbits(63), self.now)
        self._peers: dict[bytes, Process] = {}

    def do(self, commands: standby.Commands) -> None:
        for command in commands:
            match command:
                case standby.SendToHub(message):
                    self.fence.send(self, self.fence.hub, message)
                case standby.Send(route, message):
                    self.fence.send(self, self._peers[route], message)
                case standby.TakeOver(term, why):
                    self.fence.takes_over(term, why)
                case standby.Log(text):
                    self.world.tell("standby", text)

    def ticks(self) -> None:
        if self.fence.taken_over:
            told = messages.Promise("sb", 1, wants="over", term=1)
            self.fence.send(self, self.fence.hub, told)
            return
        self.do(self.core.tick(self.now))

    def hears(self, sender: Process, message: Any) -> None:
        if self.fence.taken_over:
            return
        if isinstance(sender, HubProcess):
            if sender is self.fence.hub:  # an earlier life's connection is closed
                self.do(self.core.receive_from_hub(message, self.now))
            return
        route = b"%d" % id(sender)
        self._peers[route] = sender
        self.do(self.core.receive(route, message, self.now))


class Worker(Process):
    """Joins where it is let in, and votes by the real rules."""

    def __init__(self, fence: Fence, name: str, rate: float) -> None:
        super().__init__(fence, name, rate)
        self.votes = Votes(self.world.dice.getrandbits(63))
        self.at_hub, self.session = True, b""
        self._asked_at, self._heard_at = -100.0, self.now
        self.base: VersionId | None = None
        self._push: int | None = None  # that is offered and in no version yet

    def _server(self) -> Process:
        return self.fence.hub if self.at_hub else self.fence.standby

    def turns(self) -> None:
        self.at_hub, self.session = not self.at_hub, b""
        self._heard_at, self._asked_at = self.now, -100.0

    def ticks(self) -> None:
        if self.now - self._heard_at > PATIENCE_S and not self.session:
            self.turns()
        if self.now - self._asked_at >= 1.0:
            self._asked_at = self.now
            if self.session:
                beat = messages.Heartbeat(self.session, int(self.now))
                self.fence.send(self, self._server(), beat)
                self._trains()
                if self.now - self._heard_at > 4.0:
                    self.turns()
            else:
                join = messages.Join(self.name, self.fence.manifest, voter=self.votes.voter)
                self.fence.send(self, self._server(), join)

    def _trains(self) -> None:
        """Ask for the newest version, and push for it once."""
        if self.base is not None and self._push is None:
            push_id = self.world.dice.getrandbits(62)
            self._offers(messages.Push(self.session, push_id, 0, 1, "fp32", base=self.base))
        after = -1 if self.base is None else self.base.counter
        self.fence.send(self, self._server(), messages.Pull(0, after, self.session))

    def _offers(self, push: messages.Push) -> None:
        self._push = push.push_id
        self.fence.send(self, self._server(), push)

    def hears(self, sender: Process, message: Any) -> None:
        if sender is not self._server():
            return
        self._heard_at = self.now
        match message:
            case messages.Welcome(session=session):
                self.session = session
                self._push = None
                self.fence.send(self, sender, messages.Credit(1000, session))
            case messages.Notice("donate", fragment=int(fragment)):
                self._offers(
                    messages.Push(
                        self.session,
                        self.world.dice.getrandbits(62),
                        fragment,
                        1,
                        "fp32",
                        purpose=messages.Purpose.DONATION,
                    )
                )
            case messages.Released(version=version):
                self.base, self._push = version, None
            case messages.Grant(push_id=push_id, fragment=fragment) if self._push == push_id:
                chunk = messages.Chunk(fragment, 0, session=self.session, push_id=push_id)
                self.fence.send(self, sender, chunk)
                self.fence.send(self, sender, messages.Commit(self.session, push_id, fragment))
            case messages.Notice("lease" | "standby"):
                for effect in self.votes.asked(message, self.session, self.now):
                    assert isinstance(effect, Send)
                    self.fence.send(self, sender, effect.message)
            case messages.Error(code=Code.STANDBY.value) | messages.Rejoin():
                self.turns()


@dataclass(frozen=True)
class Troubles:
    """Mean seconds between two of a kind."""

    cuts: float = 8.0
    stops: float = 15.0
    kills: float = 20.0
    turns: float = (
        6.0  # part of the workers turn to the other broker, as if the one at hand were silent
    )
    delays: float = 0.03  # probability that a message, and all behind it, is held up
    longest_delay_s: float = 120.0


class FenceBroken(AssertionError):
    """The standby has taken over, and the hub releases a version, or may."""


class Fence:
    """See the head of this module."""

    def __init__(
        self, seed: int, workers: int | None = None, troubles: Troubles | None = None
    ) -> None:
        self.seed, self.world = seed, World(seed)
        self.troubles = troubles or Troubles()
        self.manifest = a_manifest(1)
        self.config: BrokerConfig = a_config(
            1, standby=True, lease=LEASE_S, disconnect_grace=1.0, heartbeat_timeout=6.0
        )
        dice = self.world.dice
        names = [f"w{n}" for n in range(workers or dice.choice((3, 3, 4, 5, 7)))]
        self._rates = {
            name: dice.uniform(1 - DRIFT, 1 + DRIFT) for name in ("hub", "standby", *names)
        }
        self.taken_over = ""  # why
        self.hub = HubProcess(self, self._rates["hub"], "")
        self.standby = StandbyProcess(self, self._rates["standby"])
        self.workers = {name: Worker(self, name, self._rates[name]) for name in names}
        self.releases = 0  # looks at which the hub might have released a version
        self.versions = 0  # that the hub has made known
        self._cut: set[frozenset[str]] = set()
        self._last: dict[tuple[int, int], float] = {}
        self._is_calm = False

    def run(self, seconds: float = 120.0, calm: float = 60.0) -> Fence:
        """Raises with the seed and the story when the fence is broken."""
        try:
            for process in self.processes:
                process.begins()
            self._look()
            self._plan()
            self.world.run(seconds)
            self._is_calm = True
            self.world.tell("", "from here on it is calm")
            self._cut.clear()
            self.world.run(seconds + self.troubles.longest_delay_s + calm)
            demand(bool(self.taken_over) or self.hub.may_release, "nobody has the run")
        except Exception as error:
            kind = FenceBroken if isinstance(error, FenceBroken) else AssertionError
            raise kind(f"seed {self.seed}\n{self.world.story(lines=80)}\n{error}") from error
        return self

    @property
    def processes(self) -> Iterator[Process]:
        yield self.hub
        yield self.standby
        yield from self.workers.values()

    def takes_over(self, term: int, why: str) -> None:
        self.taken_over = why
        self.world.tell("standby", f"takes over with term {term}: {why}")
        self._check()

    def released(self, version: VersionId) -> None:
        """The hub tells somebody of a version for the first time."""
        self.versions += 1
        if self.taken_over:
            raise FenceBroken(f"the hub releases {version}, and the standby took over")

    def _check(self) -> None:
        may = self.hub.may_release
        self.releases += may
        if self.taken_over and may:
            raise FenceBroken("the hub may release, and the standby took over")

    def _look(self) -> None:
        self._check()
        self.world.after(0.05, self._look)

    def send(self, sender: Process, to: Process, message: Any) -> None:
        """In order on each connection; what is held up holds up what is behind it."""
        dice, key = self.world.dice, (id(sender), id(to))
        if frozenset((sender.name, to.name)) in self._cut and dice.random() < 0.8:
            return
        delay = dice.expovariate(1 / 0.02)
        if not self._is_calm and dice.random() < self.troubles.delays:
            delay += dice.choice((0.5, 3.0, 8.0, self.troubles.longest_delay_s)) * dice.random()
        at = max(self.world.now + delay, self._last.get(key, 0.0))
        self._last[key] = at
        self.world.at(at, lambda: to.gets(sender, message) if to.is_alive else None)

    # What happens to them.

    def _plan(self) -> None:
        for action, mean in (
            (self._cuts, self.troubles.cuts),
            (self._stops, self.troubles.stops),
            (self._kills, self.troubles.kills),
            (self._turns, self.troubles.turns),
        ):
            self._repeat(action, mean)

    def _repeat(self, action: Callable[[], None], mean: float) -> None:
        def happens() -> None:
            if not self._is_calm:
                action()
                self._repeat(action, mean)

        self.world.after(self.world.dice.expovariate(1 / mean), happens)

    def _cuts(self) -> None:
        """The hub, the standby, both, or some pair are cut off; or all is whole again."""
        dice, names = self.world.dice, [each.name for each in self.processes]
        # A list: dice are thrown for each, and a set of texts has another order in each process.
        whole = [frozenset(pair) for pair in combinations(names, 2)]
        match dice.choice(("heal", "hub", "between", "some", "split")):
            case "heal":
                self._cut = set()
            case "hub":
                self._cut = {pair for pair in whole if "hub" in pair}
            case "between":
                self._cut = {frozenset(("hub", "standby"))}
            case "some":
                self._cut = {pair for pair in whole if dice.random() < 0.4}
            case "split":
                side = {name for name in names if dice.random() < 0.5} | {"hub"} - {"standby"}
                self._cut = {pair for pair in whole if len(pair & side) == 1}
        self.world.tell("", f"cut: {sorted(sorted(pair) for pair in self._cut)}")

    def _stops(self) -> None:
        process = self.world.dice.choice(list(self.processes))
        if process.is_alive and not process.is_stopped:
            process.stops_for(self.world.dice.choice((0.5, 2.0, 5.0, 20.0)))

    def _turns(self) -> None:
        for worker in self.workers.values():
            if self.world.dice.random() < 0.7 and worker.is_alive and not worker.is_stopped:
                worker.turns()

    def _kills(self) -> None:
        process = self.world.dice.choice([self.hub, self.standby, *self.processes])
        if not process.is_alive:
            return
        process.is_alive = False
        self.world.tell(process.name, "is killed")
        away = self.world.dice.choice((0.1, 2.0, 15.0)) * self.world.dice.random()
        self.world.after(away, lambda: self._comes_back(process))

    def _comes_back(self, process: Process) -> None:
        rate = self._rates[process.name]
        match process:
            case HubProcess(lease=lease):
                # What it knows of its standby is in its checkpoint.
                self.hub = HubProcess(self, rate, lease.standby)
                self.hub.begins()
            case StandbyProcess():
                self.standby = StandbyProcess(self, rate)
                self.standby.begins()
            case Worker(name=name):
                self.workers[name] = Worker(self, name, rate)
                self.workers[name].begins()
