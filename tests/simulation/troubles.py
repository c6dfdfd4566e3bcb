"""Faults of a simulated run: which host has which fault when, and how both ends notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from diloco_protocol.errors import Code
from simulation.disk import Disk
from simulation.network import Connection
from simulation.standby import HUB, PLACES, STANDBY, StandbyHost
from simulation.worker import Worker

if TYPE_CHECKING:
    from simulation.relays import RelayHost
    from simulation.simulator import Simulation


@dataclass(frozen=True)
class Troubles:
    """What goes wrong, as the mean number of times a second, and for how many seconds (`_s`)."""

    seconds: float = 60.0  # how long there are troubles
    kills: float = 0.1  # a process dies; mostly one with the same id comes back after a while
    breaks: float = 0.3  # a single connection breaks
    outages: float = 0.05  # a worker is cut off for some seconds, without a sign
    leaves: float = 0.04  # a worker finishes
    joins: float = 0.06  # a new one comes
    hangs: float = 0.0  # a training loop stands still, heartbeats go on
    freezes: float = 0.0  # a whole process stands still
    restarts: float = 0.0  # the broker is killed or stopped; the next one has what is on the disk
    fulls: float = 0.0  # the disk is full for a while
    relay_kills: float = 0.0  # a relay is killed; the next one is back after `back_s`
    relay_cuts: float = 0.0  # a relay's connections to the hub break, for `outage_s`
    hub_cuts: float = 0.0  # the hub cannot be reached for `outage_s`
    hub_stops: float = 0.0  # the hub's process stands still for `freeze_s`
    # Hub and standby, each with some of the workers, lose each other for `outage_s`.
    splits: float = 0.0
    standby_kills: float = 0.0  # a standby is killed; the next one is back after `back_s`
    moves: float = 0.0  # a worker turns to another relay, or to the hub
    silent: float = 0.3  # share of the kills without a sign
    returns: float = 0.6  # share of the killed whose id comes back; half of the others are replaced
    orderly: float = 0.2  # share of the restarts that are orderly
    back_s: float = 3.0  # until a killed process is back
    outage_s: float = 6.0
    hang_s: float = 15.0
    freeze_s: float = 4.0
    restart_s: float = 2.0
    full_s: float = 10.0


NO_TROUBLES = Troubles(seconds=0.0)


class Accidents:
    """Strikes a simulation at the rates of its troubles, until `end`."""

    def __init__(self, simulation: Simulation) -> None:
        self._run = simulation
        self._world = simulation.world
        self._dice = simulation.world.dice
        self._troubles = simulation.scenario.troubles
        self._is_over = False

    def begin(self) -> None:
        troubles = self._troubles
        for action, rate in (
            (self._on_a_worker(self._kill), troubles.kills),
            (self._break, troubles.breaks),
            (self._on_a_worker(self._cut_off), troubles.outages),
            (self._on_a_worker(Worker.leaves), troubles.leaves),
            (self._join, troubles.joins),
            (self._on_a_worker(self._hang), troubles.hangs),
            (self._on_a_worker(self._freeze), troubles.freezes),
            (self._restart, troubles.restarts),
            (self._fill_disk, troubles.fulls),
            (self._kill_relay, troubles.relay_kills),
            (self._cut_relay, troubles.relay_cuts),
            (self._on_a_worker(self._move), troubles.moves),
            (self._cut_hub, troubles.hub_cuts),
            (self._kill_standby, troubles.standby_kills),
            (self._stop_hub, troubles.hub_stops),
            (self._split, troubles.splits),
        ):
            self._repeat(action, rate)

    def end(self) -> None:
        """Nothing goes wrong from here on. What is going on ends in its time."""
        self._is_over = True

    def _repeat(self, action: Callable[[], None], rate: float) -> None:
        if rate <= 0:
            return

        def again() -> None:
            if not self._is_over:
                action()
                self._repeat(action, rate)

        self._world.after(self._dice.expovariate(rate), again)

    def _victim(self) -> Worker | None:
        alive = self._run.alive
        return self._dice.choice(alive) if alive else None

    def _about(self, seconds: float) -> float:
        """Drawn anew, with that mean."""
        return self._dice.expovariate(1 / seconds)

    # Processes.

    def _on_a_worker(self, does: Callable[[Worker], None]) -> Callable[[], None]:
        def strike() -> None:
            victim = self._victim()
            if victim is not None:
                does(victim)

        return strike

    def _kill(self, victim: Worker) -> None:
        """A process dies; if its host dies with it, no connection breaks."""
        dice, troubles = self._dice, self._troubles
        victim.dies()
        silent = dice.random() < troubles.silent
        for connection in victim.all_connections:
            if silent or dice.random() < 0.5:
                connection.sever()
            if not silent:
                connection.is_found_gone(self._about(0.2))
        again = dice.random()
        back = self._about(troubles.back_s)
        if again < troubles.returns:
            self._world.after(back, lambda: self._run.comes_again(victim.worker_id))
        elif again < (1 + troubles.returns) / 2:
            self._world.after(back, self._run.newcomer_if_room)

    def _join(self) -> None:
        self._run.newcomer_if_room()

    def _hang(self, victim: Worker) -> None:
        victim.hangs(self._about(self._troubles.hang_s))

    def _freeze(self, victim: Worker) -> None:
        victim.freezes(self._about(self._troubles.freeze_s))

    # The network.

    def _break(self) -> None:
        """One of a worker's two connections breaks, and both ends find out in their own time."""
        victim, dice = self._victim(), self._dice
        if victim is None or victim.connections is None:
            return
        connections = victim.all_connections
        which = dice.randrange(len(connections))
        connection = connections[which]
        self._world.tell(
            victim.name, f"loses {'control' if not which else 'bulk'} {connection.route!r}"
        )
        connection.sever()
        connection.is_found_gone(dice.choice((0.0, 0.1, 3.0, 30.0)) * dice.random())
        self.finds_out(victim, connection, dice.choice((0.0, 0.1, 3.0, 10.0)) * dice.random())

    def finds_out(self, victim: Worker, connection: Connection, seconds: float) -> None:
        def find_out() -> None:
            if victim.connections is not None and connection in victim.connections:
                victim.loses_touch("The connection broke.")
            elif victim.lanes is not None:
                victim.lanes.breaks(connection)

        self._world.after(seconds, find_out)

    def _cut_off(self, victim: Worker) -> None:
        """Either end finds out by the silence, or the worker when it is over."""
        seconds = self._about(self._troubles.outage_s)
        self._world.tell(victim.name, f"is cut off for {seconds:.1f} s")
        victim.offline_until = max(victim.offline_until, self._world.now + seconds)
        victim.online_since = max(victim.online_since, victim.offline_until)
        for connection in victim.all_connections:
            connection.sever()
        if victim.connections is not None and self._dice.random() < 0.7:
            self.finds_out(victim, victim.connections[0], seconds)

    # The broker.

    def _restart(self) -> None:
        broker = self._run.broker
        if not broker.is_alive or broker.is_stopping:
            return
        if self._dice.random() < self._troubles.orderly:
            self._world.tell("broker", "is asked to stop")
            broker.stops(self._crash)
        else:
            self._crash()

    def _crash(self) -> None:
        """The broker is gone; another one comes up after a while."""
        world, dice, run = self._world, self._dice, self._run
        place, disk = (HUB, run.disk) if run.term is None else (STANDBY, run.standby_disk)
        world.tell("broker", "is gone")
        run.broker.dies()
        run.is_away(place, self._about(self._troubles.restart_s))
        up_at = run.up_at(place)
        world.at(up_at, lambda: run.begin_anew(place))
        for relay in run.relays.values():
            world.after(dice.uniform(0, 0.5), partial(relay.loses_touch, relay.uplinks[0]))
        if isinstance(run.standby, StandbyHost):
            run.standby.loses_hub()
        for process in run.alive:
            process.online_since = max(process.online_since, up_at)
            self.may_begin_another_run(process, disk)
            is_here = process.place == (place == STANDBY)
            if is_here and process.connections is not None and dice.random() < 0.8:
                self.finds_out(process, process.connections[0], dice.uniform(0, 0.5))

    def may_begin_another_run(self, process: Worker, disk: Disk | None) -> None:
        """A run that is not recovered begins anew under another name."""
        if disk is None or disk.newest is None:
            process.may_be_refused |= {(Code.RUN_DIFFERS, True), (Code.RUN_DIFFERS, False)}

    def _cut_hub(self) -> None:
        """The hub goes on without its workers and its standby; all find out in their own time."""
        run, dice = self._run, self._dice
        if not run.hub.is_alive:
            return
        seconds = self._about(self._troubles.outage_s)
        self._world.tell(HUB, f"is cut off for {seconds:.1f} s")
        run.is_away(HUB, seconds)
        if isinstance(run.standby, StandbyHost):
            run.standby.loses_hub()
        for connection in run.hub.connections:
            connection.sever()
            connection.is_found_gone(dice.choice((0.1, 3.0, 10.0)) * dice.random())
        for process in run.alive:
            process.online_since = max(process.online_since, run.up_at(HUB))
            if process.connections is not None and not process.place and dice.random() < 0.7:
                self.finds_out(process, process.connections[0], seconds * dice.random())

    def _stop_hub(self) -> None:
        seconds = self._about(self._troubles.freeze_s)
        self._world.tell(HUB, f"is stopped for {seconds:.1f} s")
        self._run.hub.is_stopped_for(seconds)

    def _split(self) -> None:
        """Each worker reaches only the hub or only the standby, which do not reach each other."""
        run, dice = self._run, self._dice
        if not isinstance(run.standby, StandbyHost):
            return
        until = self._world.now + self._about(self._troubles.outage_s)
        run.link_up_at = max(run.link_up_at, until)
        run.standby.loses_hub()
        for process in run.alive:
            lost = dice.randrange(2)
            self._world.tell(process.name, f"does not reach {PLACES[lost]} until {until:.1f}")
            process.reaches_at = [until if place == lost else 0.0 for place in range(2)]
            if process.connections is not None and process.place == lost:
                for connection in process.all_connections:
                    connection.sever()
                    connection.is_found_gone(self._about(0.5))
                self.finds_out(process, process.connections[0], self._about(0.5))

    def _kill_standby(self) -> None:
        run = self._run
        if isinstance(run.standby, StandbyHost) and run.standby.is_alive:
            self._world.tell(STANDBY, "is killed")
            run.standby.dies()
            run.is_away(STANDBY, self._about(self._troubles.back_s))
            self._world.at(run.up_at(STANDBY), lambda: run.begin_anew(STANDBY))

    def _fill_disk(self) -> None:
        disk, world = self._run.disk, self._world
        if disk is None or disk.is_full:
            return
        seconds = self._about(self._troubles.full_s)
        world.tell("disk", f"is full for {seconds:.1f} s")
        disk.is_full = True
        world.after(seconds, lambda: setattr(disk, "is_full", False))

    # Relays.

    def _relay(self) -> RelayHost | None:
        alive = [each for each in self._run.relays.values() if each.is_alive]
        return self._dice.choice(alive) if alive else None

    def _kill_relay(self) -> None:
        relay = self._relay()
        if relay is not None:
            relay.dies()
            self._run.relay_is_away(relay.name, self._about(self._troubles.back_s))

    def _cut_relay(self) -> None:
        """Both ends find out in their own time, the hub perhaps when it is over."""
        relay, dice = self._relay(), self._dice
        if relay is None:
            return
        seconds = self._about(self._troubles.outage_s)
        self._world.tell(relay.name, f"is cut off for {seconds:.1f} s")
        relay.cut_until = max(relay.cut_until, self._world.now + seconds)
        for connection in relay.uplinks:
            connection.sever()
            if dice.random() < 0.7:
                connection.is_found_gone(dice.choice((0.0, 0.1, 3.0, 10.0)) * dice.random())
        if dice.random() < 0.7:
            lost = relay.uplinks[0]
            self._world.after(seconds * dice.random(), lambda: relay.loses_touch(lost))
        for process in self._run.alive:
            if self._run.place_of(process) == relay.name:
                process.online_since = max(process.online_since, relay.cut_until)

    def _move(self, victim: Worker) -> None:
        self._run.moves(victim)
        if victim.connections is not None:
            self._world.tell(victim.name, f"moves to {self._run.place_of(victim)}")
            for connection in victim.all_connections:
                connection.sever()
                connection.is_found_gone(self._about(0.2))
            self.finds_out(victim, victim.connections[0], self._dice.uniform(0.0, 0.2))
