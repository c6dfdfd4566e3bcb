"""The broker's loop in a simulated run: it feeds the core and carries out its effects.

Tensor work is done in order, a piece at a time; checkpoints are written meanwhile, as slowly as the
scenario says, to a disk that outlives the broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from diloco_broker.core import effects, events
from diloco_broker.core.machine import Core
from diloco_broker.shell.effects import Executor
from diloco_broker.shell.relays import RelayLines
from diloco_broker.storage import resume
from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_broker.storage.writer import checkpoint_of
from diloco_protocol.messages import Message
from diloco_protocol.relays import first_step, way
from simulation.disk import Disk
from simulation.network import Clock, Connection, World, Wrapped
from simulation.referee import Referee
from simulation.tensors import Copies, Tensors, demand

if TYPE_CHECKING:
    from simulation.relays import RelayHost
    from simulation.simulator import Scenario

# How long the last checkpoint may take to be written.
SAVE_WITHIN_S = 60.0
# Longest time between the thread that writes checkpoints and the loop.
BETWEEN_THREADS_S = 0.01
# How often a turn of the loop is over after an event, so that acknowledgements go out.
TURN_ENDS = 0.5


class BrokerHost:
    """One incarnation of a broker, which resumes the newest checkpoint on the disk, if there is one."""

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        referee: Referee,
        disk: Disk | None = None,
        relays: Mapping[str, RelayHost] | None = None,
        *,
        clock: Clock | None = None,
        term: int = 0,
        is_replaced: bool = False,
    ) -> None:
        self.world = world
        self.clock = clock or Clock(world)
        self.referee = referee
        self.is_alive = True  # until it is killed or has stopped
        self.messages = 0  # that have come in
        self._scenario = scenario
        self._incarnation = 1 if disk is None else disk.next_incarnation
        self._checkpoint = None if disk is None else disk.newest
        self._is_replaced = is_replaced  # a standby has the run, whom the referee follows
        records = Copies(referee.records) if is_replaced else referee.records
        self.tensors = Tensors(scenario.config, records, self._checkpoint)
        resumption = None
        if self._checkpoint is not None:
            layout = self._checkpoint.layout
            resumption = resume.load_into(self.tensors, self._checkpoint, layout)
        draw = partial(world.dice.getrandbits, 64)
        config = replace(scenario.config, standby=scenario.config.standby and not term)
        self.core = Core(config, draw, self.clock.now, resumption=resumption, term=term)
        self._disk = disk
        self._unsaved: Checkpoint | None = None  # of those that wait only the newest is written
        self._is_saving = False
        self._routes: dict[bytes, Connection] = {}
        self._lines = RelayLines()
        self._relays = {} if relays is None else relays
        self._executor = Executor(self.core, lambda: events.Now.both(self.clock.now), self)
        self._handled: events.Event | None = None
        self._finish: effects.Finish | None = None  # requested in the current turn
        self._is_working = False
        self._lost_a_connection = False
        self._is_deaf = False  # it writes its last checkpoint
        self._stopped_until = 0.0
        self._ended: Callable[[], None] | None = None  # called at the end of an orderly stop
        if not is_replaced:
            referee.begins_incarnation(self.tensors, self._checkpoint, self.owner_of)
        self._tick()

    @property
    def is_stopping(self) -> bool:
        return self.core.state.stopping is not None

    def is_replaced_now(self) -> None:
        """A standby has taken over: from here on this broker may release nothing."""
        self._is_replaced = True
        self.tensors.records = Copies(self.referee.records)

    # Connections.

    @property
    def connections(self) -> Iterable[Connection]:
        return self._routes.values()

    def connects(self, connection: Connection) -> None:
        self._routes[connection.route] = connection
        connection.on_gone = self._loses_a_connection

    def hears(self, connection: Connection, message: Message | Wrapped, payload: Any) -> None:
        if self.world.now < self._stopped_until:
            self._awake(lambda: self.hears(connection, message, payload))
        elif self.is_alive and not self._is_deaf and connection.route in self._routes:
            self.messages += 1
            route = connection.route
            if isinstance(message, Wrapped):
                route, payload = way(route, message.via.who), payload or message.via.held
                message = message.message
            self._feed(events.Received(route, message, payload))

    def owner_of(self, route: bytes) -> str:
        step = first_step(route)
        if step is None:
            return self._routes[route].owner
        return self._relays[self._routes[step[0]].owner].owner_of(step[1])

    def _loses_a_connection(self) -> None:
        self._lost_a_connection = True

    # Incarnation.

    def dies(self) -> None:
        """Killed: its connections break, what it knew is lost."""
        self.is_alive = False
        for connection in self._routes.values():
            connection.sever()

    def stops(self, ended: Callable[[], None]) -> None:
        """It ends in an orderly way, to be started again, and calls `ended` when it is gone."""
        self._ended = ended
        self._feed(events.Stop("it was asked to", restarting=True))

    def is_stopped_for(self, seconds: float) -> None:
        """The process stands still, as after SIGSTOP; its connections do not break."""
        self._stopped_until = max(self._stopped_until, self.world.now + seconds)

    def _awake(self, action: Callable[[], None]) -> None:
        """Do something at once, or when the process goes on."""
        if self.world.now >= self._stopped_until:
            action()
        else:
            self.world.at(self._stopped_until, lambda: self._awake(action))

    def _tick(self) -> None:
        if self.is_alive and not self._is_deaf:
            lost, self._lost_a_connection = self._lost_a_connection, False
            self._feed(events.Tick(lost))
            self.world.after(self._scenario.tick_s, lambda: self._awake(self._tick))

    def _ends(self, save: effects.Save | None) -> None:
        """The core is done: wait until the last checkpoint is written."""
        world, ended = self.world, self._ended
        assert ended is not None
        self._is_deaf = True
        if save is not None and self._disk is not None:
            self.save(save)
        until = world.now + SAVE_WITHIN_S

        def look() -> None:
            is_saved = self._unsaved is None and not self._is_saving
            if is_saved or world.now >= until:
                ended()
            else:
                world.after(0.1, look)

        look()

    # Events and effects.

    def _feed(self, event: events.Event) -> None:
        self.referee.now = self.world.now
        self._executor.feed(event)
        while self._ends_a_turn() and self._executor.acknowledge():
            pass
        self._plan_work()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._ends(finish.save)

    def _ends_a_turn(self) -> bool:
        return isinstance(self._handled, events.Tick) or self.world.dice.random() < TURN_ENDS

    def disconnect(self, route: bytes) -> None:
        """The core disconnects a relay. A simulated worker sends nothing that cannot be read."""
        connection = self._routes[route]
        connection.sever()
        relay = self._relays[connection.owner]
        seconds = self.world.dice.uniform(0.0, 0.2)
        self.world.after(seconds, partial(relay.loses_touch, connection))

    def finish(self, save: effects.Save | None) -> None:
        self._finish = effects.Finish(save)

    def handled(self, event: events.Event) -> None:
        self._handled = event
        if not self._is_replaced:
            self.referee.after(self.core, event, self.tensors.queue)

    def send(self, send: effects.Send) -> bool:
        if not self._is_replaced:
            self.referee.incarnations.says(self.core, send.message)
        behind = self._lines.down(send)
        if behind is None:
            return self._routes[send.route].down(send.message, send.payload)
        route, via, payload = behind
        return self._routes[route].down(Wrapped(via, send.message), payload)

    def write(self, record: effects.Record) -> None:
        match record:
            case effects.Log(level, text):
                if level != "debug":
                    self.world.tell("broker", text)
            case effects.RecordVersion():
                demand(not self._is_replaced, "the hub releases a version, and was replaced")
                self.referee.audited(record)

    def save(self, save: effects.Save) -> None:
        state = self.core.state
        self._unsaved = checkpoint_of(state, self.tensors, save.record, self._incarnation)
        self._save_next()

    def _save_next(self) -> None:
        """Write one at a time. A kill in the middle leaves no checkpoint."""
        checkpoint, disk, world = self._unsaved, self._disk, self.world
        if checkpoint is None or self._is_saving:
            return
        assert disk is not None, "a checkpoint is asked for where nothing is saved"
        self._unsaved, self._is_saving = None, True

        def write() -> None:
            if self.is_alive:
                error = disk.write(checkpoint)
                world.after(world.dice.uniform(0, BETWEEN_THREADS_S), lambda: reports(error))

        def reports(error: str | None) -> None:
            if self.is_alive:
                self._is_saving = False
                saved = events.Saved(checkpoint.number, "a checkpoint")
                failed = events.SaveFailed(checkpoint.number, error or "")
                self._feed(saved if error is None else failed)
                self._save_next()

        world.after(world.dice.uniform(0, self._scenario.save_s), write)

    def read(self, _: effects.ReadCheckpoint) -> None:
        raise AssertionError("checkpoints are copied without the core here")

    def end(self, end: effects.End) -> None:
        raise AssertionError("a simulated broker has no operator")

    def _plan_work(self) -> None:
        if self.tensors.queue and not self._is_working:
            self._is_working = True
            seconds = self.world.dice.uniform(0, self._scenario.work_s)
            self.world.after(seconds, lambda: self._awake(self._do_work))

    def _do_work(self) -> None:
        self._is_working = False
        if self.tensors.queue and self.is_alive:
            self._feed(self.tensors.do_one())
