"""One process of a worker in a simulated run: the real session, and around it what the link does.

It carries out what the session asks for, on connections of the simulated network, and passes on between
the session and the training thread what each wants of the other, with a short delay, as threads do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.dtypes import span_bytes
from diloco_protocol.errors import Code
from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import Chunk, Heartbeat, Join, Message, Notice, Welcome
from diloco_protocol.version import VersionId
from diloco_worker.session import effects, events
from diloco_worker.session.compatibility import heartbeat_interval
from diloco_worker.session.connection import Phase
from diloco_worker.session.session import Session
from diloco_worker.transport.executor import Executor
from diloco_worker.transport.inbox import Inbox
from simulation.fragments import Fragments
from simulation.lanes import Lanes
from simulation.network import INSTANT_S, Clock, Connection, Listener, World
from simulation.referee import Referee
from simulation.tensors import Delta, Violation
from simulation.training import Habits, Training
from simulation.units import UnitsAtWork

# Longest time between the two threads of a worker.
BETWEEN_THREADS_S = 0.002
# Wake-ups of one session at one moment after which it is spinning.
SPINNING = 1000


class Worker:
    """A worker's process.

    `name` is that of the process; `worker_id` may be that of an earlier one. `connect` opens a
    connection, whose listener is called with each message to the worker. `has_units`: it trains on
    units. `places` is the number of addresses that it knows.
    """

    def __init__(
        self,
        world: World,
        referee: Referee,
        name: str,
        worker_id: str,
        *,
        manifest: Manifest,
        habits: Habits,
        connect: Callable[[Worker, Listener], Connection],
        has_units: bool = False,
        places: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self.world = world
        self._clock = clock or Clock(world)
        self.referee = referee
        self.name = name
        self.worker_id = worker_id
        self.habits = habits
        self.is_alive = True
        self.is_killed = self.is_welcome = False
        self.offline_until = 0.0  # until then no connection comes up
        self.online_since = world.now  # welcome and connected, as far as anybody knows
        self.frozen_until = -1.0  # the whole process stands still
        # Training takes no step in between. From: infinite while it trains, or waits for others.
        self.hangs_from, self.hangs_until = math.inf, -1.0
        # Codes, and whether finally. An earlier process with this id may still have been heard.
        self.may_be_refused: set[tuple[str, bool]] = {(Code.ID_TAKEN, True)}
        # The first number is a voter's, of which nothing depends here; it is not drawn from the world's.
        voter = iter([Random(f"{name} of {worker_id}").getrandbits(64)])
        self.session = Session(
            Join(worker_id, manifest, wants=habits.wants, processes=habits.processes),
            lambda: next(voter, None) or world.dice.getrandbits(64),
            habits.heartbeat_interval,
        )
        self.connections: tuple[Connection, Connection] | None = None  # control, bulk
        self.inbox = Inbox()
        self._memory = Fragments(self._layout_of, self._gradient)
        several = habits.processes > 1
        self.lanes = Lanes(self, habits.processes, connect) if several else None
        self._executor = Executor(
            *(self.session, self.inbox, self, self._memory, self._notice), others=self.lanes
        )
        self.training = Training(self)
        self.units = UnitsAtWork(self) if has_units else None
        self.bad_chunks: set[tuple[int, int]] = set()  # (push id, chunk) of those not finite
        self.address = "the simulated broker"
        self.shortcut = ""
        self.place = 0  # number of the address that it uses
        self.reaches_at = [0.0] * places  # from when on it can reach each of them
        self._connect = connect
        self._held: dict[int, VersionId] = {}  # the last that was delivered, by fragment
        self._tick_at: float | None = None
        self._ticks: tuple[float, int] = (0.0, 0)  # how many at the latest moment
        self._command_at = 0.0
        self._has_asked = False  # the session has asked for an effect at the current event
        self._plan = 0  # number of the latest plan to let the training thread go on
        self._is_nudged = False

    @property
    def all_connections(self) -> list[Connection]:
        """Control, bulk, and those of its other processes."""
        lanes = self.lanes.connections.values() if self.lanes is not None else ()
        return [*(self.connections or ()), *lanes]

    @property
    def has_news(self) -> bool:
        return bool(self.inbox.turns) or self.inbox.has_news

    @property
    def beat_s(self) -> float:
        config = self.session.config
        return heartbeat_interval(config, self.habits.heartbeat_interval) if config else 0.0

    # Incarnation.

    def start(self) -> None:
        self._feed(events.Start(len(self.reaches_at)))
        self._train_on(after=0.0)

    def dies(self) -> None:
        """Killed without a message. Its connections are left to the caller."""
        self.world.tell(self.name, "is killed")
        self.is_alive, self.is_killed = False, True

    def leaves(self) -> None:
        """Asked to finish: it waits for what is in flight, says goodbye and ends."""
        self.world.tell(self.name, "is asked to leave")
        self.training.leaving = True
        self._nudge()

    def hangs(self, seconds: float) -> None:
        """Its training loop stands still between two steps; nothing else does."""
        self.world.tell(self.name, f"hangs for {seconds:.1f} s")
        self.hangs_until = max(self.hangs_until, self.world.now + seconds)

    def freezes(self, seconds: float) -> None:
        """The whole process stands still; its connections do not break."""
        self.world.tell(self.name, f"is stopped for {seconds:.1f} s")
        self.frozen_until = max(self.frozen_until, self.world.now + seconds)
        self.online_since = max(self.online_since, self.frozen_until)

    def _awake(self, action: Callable[[], None]) -> None:
        """Do something at once, or when the process goes on."""
        if self.world.now >= self.frozen_until:
            action()
        else:
            self.world.at(self.frozen_until, lambda: self._awake(action))

    def loses_touch(self, reason: str) -> None:

        def find_out() -> None:
            if self.connections is not None:
                self._feed(events.Disconnected(reason))

        self._awake(find_out)

    # The session.

    def command(self, event: events.Event) -> None:
        between = self.world.dice.uniform(0, BETWEEN_THREADS_S)
        self._command_at = max(self._command_at, self.world.now + between)
        self.world.at(self._command_at, lambda: self._awake(lambda: self._feed(event)))

    def hears(self, connection: Connection, message: Message, payload: Any) -> None:
        if self.world.now < self.frozen_until:
            self._awake(lambda: self.hears(connection, message, payload))
        elif self.connections is not None and connection in self.connections:
            self._executor.payload = payload
            self._feed(events.Received(message))
            self._executor.payload = None

    def _feed(self, event: events.Event) -> None:
        if not self.is_alive:
            return
        self._has_asked = False
        self._executor.feed(event)
        if self.session.phase is Phase.LEFT:
            self._ends()
            return
        if self.world.events % self.referee.thoroughness == 0:
            self.session.check_invariants()
        if self._has_asked or self._tick_at is None or not isinstance(event, events.Received):
            self._plan_tick()  # of a message that changes nothing it would wake no earlier
        if self.has_news:
            self._nudge()

    def _ends(self) -> None:
        self.disconnect()
        self.is_alive = False

    def _plan_tick(self) -> None:
        wakes_at = self.session.wakes_at()
        if wakes_at is None:
            return
        at = self._clock.in_world(wakes_at)
        if self._tick_at is not None and self._tick_at <= at:
            return
        # Sums of floats are inexact: a deadline has passed for sure an instant later.
        self._tick_at = at = max(at, self.world.now) + INSTANT_S

        def tick() -> None:
            if self._tick_at != at:
                return
            self._tick_at = None
            moment, times = self._ticks
            self._ticks = (self.world.now, times + 1 if moment == self.world.now else 1)
            if times > SPINNING:
                raise Violation(f"the session of {self.name} wakes up again and again")
            self._feed(events.Tick())

        self.world.after(at - self.world.now, lambda: self._awake(tick))

    def _notice(self, effect: effects.Effect) -> None:  # noqa: C901  a case for each effect
        """Record an effect in the story and with the referee before it is carried out."""
        self._has_asked = True
        match effect:
            case effects.Deliver():
                self._delivered(effect)
            case effects.PushOver(push_id, code) if code is not None:
                self.world.tell(self.name, f"hears that push {push_id:#x} is over: {code}")
                self.referee.told(self.worker_id, push_id, code)
            case effects.Told(Welcome() as welcome):
                self.world.tell(self.name, f"is welcome from round {welcome.first_round}")
                self.online_since = self.world.now
                if not self.is_welcome:
                    self.is_welcome = True
                    self._share_out()
                if welcome.run is not None:
                    self.referee.incarnations.heard_of(self.name)
            case effects.Told(Notice("shutdown" | "kicked" | "restarting", text)):
                self.world.tell(self.name, f"hears: {text}")
                self._nudge()
            case effects.JoinRefused(code, text, final):
                self.world.tell(self.name, f"is refused: {text}")
                if (code, final) not in self.may_be_refused:
                    raise Violation(f"{self.name} is refused: {text}")
                self._ends()
            case effects.DropParts():
                self._held.clear()
            case effects.Told(message):
                self.world.tell(self.name, message)
            case effects.Say(text, trouble):
                if trouble:
                    self.world.tell(self.name, text)

    def _delivered(self, effect: effects.Deliver) -> None:
        released, counted = effect.released, effect.counted
        fragment = released.fragment
        if self.lanes is not None and not effect.unchanged:
            self.lanes.hand_over(fragment, released.version, self._memory)
        wires = None if effect.unchanged else self._memory.assembled(fragment)
        self.referee.delivered(self.worker_id, released, counted, wires, self._held.get(fragment))
        self._held[fragment] = released.version
        if counted is not None:
            self.world.tell(self.name, f"has {released.version}, which contains {counted:#x}")
            self.referee.told(self.worker_id, counted, "counted")

    # Other processes of this worker.

    def _share_out(self) -> None:
        """Training finds out how the model is cut, and the processes agree who has what."""

        def share_out() -> None:
            owners = None if self.lanes is None else self.lanes.owners()
            if owners is not None and self.session.lanes.owners is None:
                self._feed(events.ShareOut(owners))

        if self.lanes is not None:
            between = self.world.dice.uniform(0, BETWEEN_THREADS_S)
            self.world.after(between, lambda: self._awake(share_out))

    def is_told(self, event: events.Event) -> None:
        """Another process of this worker reports an event."""
        self._awake(lambda: self._feed(event) if self.connections is not None else None)

    def payload_of(self, push_id: int, fragment: int, index: int) -> Any:
        return self._memory.chunk(push_id, fragment, index)

    # Connections; see `diloco_worker.transport.executor.Network`.

    def now(self) -> float:
        return self._clock.now

    def connect(self, place: int = 0) -> None:
        self.place = place
        control, bulk = self._connect(self, self.hears), self._connect(self, self.hears)
        self.connections = (control, bulk)

        def connected() -> None:
            if self.connections is not None and self.connections[0] is control:
                self._feed(events.Connected())

        self.world.at(control.is_up_at, lambda: self._awake(connected))

    def disconnect(self) -> None:
        connections, self.connections = self.connections, None
        for connection in connections or ():
            connection.hang_up()
        if self.lanes is not None:
            self.lanes.close()

    def send(self, message: Message, payload: Any = None, *, bulk: bool = False) -> None:
        for _ in range(self._times(message)):
            if self.connections is not None:
                self.connections[bulk].up(message, payload)

    def _times(self, message: Message) -> int:
        """How often a message is sent: once; a chunk sometimes twice, if its credit allows."""
        if not isinstance(message, Chunk) or message.push_id is None:
            return 1
        upload = self.session.uploads.by_id[message.push_id]
        if self.world.dice.random() >= self.habits.repeats or upload.credits[0] < 1:
            return 1
        upload.credits[0] -= 1  # it comes back with the second `ack`
        return 2

    @property
    def progress(self) -> Heartbeat:
        return self.training.progress

    def welcomed(self, epoch: str) -> None:
        """The story has it already, and so it is with what is said."""

    def say(self, text: str, *, trouble: bool = False) -> None:
        pass

    def _layout_of(self, fragment: int) -> FragmentLayout:
        assert self.session.layout is not None
        return self.session.layout.all[fragment]

    def _gradient(self, push_id: int, fragment: int, index: int) -> Delta:
        span = self._layout_of(fragment).spans[index]
        nbytes = span_bytes(span, self.training.wire_dtype())
        is_finite = (push_id, index) not in self.bad_chunks
        return Delta((self.worker_id, push_id), (fragment, index), nbytes, is_finite)

    # The training thread.

    def _nudge(self) -> None:
        """There is something new for the training thread; it looks at it if it waits."""
        if self.training.waiting_since is not None and not self._is_nudged:
            self._is_nudged = True
            self._train_on(after=self.world.dice.uniform(0, BETWEEN_THREADS_S))

    def _train_on(self, *, after: float) -> None:
        """Let the training thread go on then. A later plan replaces an earlier one."""
        self._plan += 1
        plan = self._plan

        def go_on() -> None:
            if not self.is_alive or self._plan != plan:
                return
            if self.world.now < self.hangs_until and self.training.waiting_since is None:
                self.hangs_from = min(self.hangs_from, self.world.now)
                self.world.at(self.hangs_until, go_on)
                return
            self.hangs_from = math.inf
            self._is_nudged = False
            pause = self.training.goes_on()
            self._train_on(after=self.habits.look_s if pause is None else pause)

        self.world.after(after, lambda: self._awake(go_on))
