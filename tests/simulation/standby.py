"""The standby of a simulated hub: the real core, and copies of the hub's checkpoints.

Once it has taken over, a broker at its address has the run. The hub that it replaced may be alive, and
releases nothing any more.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from diloco_broker.standby import core
from diloco_protocol.messages import Message, Promise
from simulation.network import Connection
from simulation.tensors import demand

if TYPE_CHECKING:
    from simulation.simulator import Simulation

PLACES = HUB, STANDBY = "hub", "standby"
TICK_S = 0.25
LOOK_S = 0.05  # between two checks that a replaced hub may release nothing
DRIFT = 0.01  # clocks are slow or fast by at most this much
COPY_S = (0.5, 3.0)  # least and most time between two copies of the hub's checkpoint
NAME = "sb"  # by which the hub knows its standby


class StandbyHost:
    """One incarnation of a standby that has not taken over."""

    def __init__(self, run: Simulation) -> None:
        self.run, self.world = run, run.world
        self.is_alive = True
        draw = partial(run.world.dice.getrandbits, 63)
        self.clock = run.clock(STANDBY)
        self.core = core.Standby(NAME, HUB, draw, self.clock.now)
        self._routes: dict[bytes, Connection] = {}
        self._uplink: Connection | None = None
        self._tick()

    def connects(self, connection: Connection) -> None:
        self._routes[connection.route] = connection

    def hears(self, connection: Connection, message: Message, _: Any) -> None:
        if self.is_alive and connection.route in self._routes:
            self._do(self.core.receive(connection.route, message, self.clock.now))

    def dies(self) -> None:
        """Killed, or replaced by the broker that it becomes."""
        self.is_alive = False
        for connection in self._routes.values():
            connection.sever()
        self.loses_hub()

    def loses_hub(self) -> None:
        if self._uplink is not None:
            self._uplink.sever()
            self._uplink = None
            self.core.hub_lost()

    def _tick(self) -> None:
        if self.is_alive:
            self._do(self.core.tick(self.clock.now))
            self.world.after(TICK_S, self._tick)

    def _do(self, commands: core.Commands) -> None:
        for command in commands:
            match command:
                case core.SendToHub(message):
                    self._send_to_hub(message)
                case core.Send(route, message):
                    self._routes[route].down(message)
                case core.TakeOver(term, why):
                    self.world.tell(STANDBY, f"takes over: {why}")
                    self.run.takes_over(term)
                case core.Log(text):
                    self.world.tell(STANDBY, text)

    def _send_to_hub(self, message: Message) -> None:
        if not self.run.hub_answers:
            return
        if self._uplink is None:
            self._uplink = self.run.connection(HUB, STANDBY, self._hears_hub)
            self.run.hub.connects(self._uplink)
        self._uplink.up(message)

    def _hears_hub(self, connection: Connection, message: Message, _: Any) -> None:
        if self.is_alive and connection is self._uplink:
            self._do(self.core.receive_from_hub(message, self.clock.now))


def copy_checkpoints(run: Simulation) -> None:
    """Repeatedly copy the hub's newest checkpoint, or after the takeover notify the hub of it."""
    assert run.disk is not None and run.standby is not None
    if run.hub_answers and run.term is not None:
        told = run.connection(HUB, STANDBY, lambda *_: None)
        run.hub.connects(told)
        told.up(Promise(NAME, 1, wants="over", term=run.term))
    elif run.hub_answers and run.standby.is_alive and run.disk.newest is not None:
        newest = run.disk.newest
        run.standby_disk.checkpoints[newest.incarnation, newest.number] = newest
    run.world.after(run.world.dice.uniform(*COPY_S), lambda: copy_checkpoints(run))


def look(run: Simulation) -> None:
    """Check repeatedly that a hub that was replaced may not release a version."""
    lease = run.hub.core.state.standby
    may_release = lease is not None and lease.holds and lease.ends_at > run.hub.clock.now
    is_replaced = run.term is not None and run.hub.is_alive
    demand(not (is_replaced and may_release), "the hub may release a version, and was replaced")
    run.world.after(LOOK_S, lambda: look(run))
