"""Relays in a simulated run: the real core of each, between workers and the broker, and what breaks.

A message on its way through a relay is a pair here: whose it is, and what it says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from diloco_broker.relay import core
from diloco_protocol.chunks import ChunkSpan
from diloco_protocol.dtypes import span_bytes
from diloco_protocol.messages import Message, Via
from diloco_protocol.relays import first_step
from simulation.contents import Key
from simulation.network import Connection, Wrapped
from simulation.tensors import Delta, Record, Sum, parts_of

if TYPE_CHECKING:
    from simulation.simulator import Simulation

TICK_S = 0.2
# Workers that share one connection.
SHARING = 20


class Sums:
    """Instead of adding numbers it records the terms."""

    def __init__(self, records: dict[Key, Record]) -> None:
        self._records = records

    def inspect(self, span: ChunkSpan, payload: Delta | Sum, _: str) -> tuple[float | None, int]:
        if isinstance(payload, Sum):
            return 1.0, 0
        if not payload.is_finite:
            return None, 0
        record = self._records[payload.key]
        record.taken.add(span.index)
        record.was_at_relay = True
        return payload.squares, 0

    def mean(self, _: int, span: ChunkSpan, terms: list[core.Term], dtype: str) -> Sum:
        parts = tuple(part for each in terms for part in parts_of(each.payload, each.weight))
        return Sum(parts, span_bytes(span, dtype))

    def reset(self) -> None:
        pass


class RelayHost:
    """One incarnation of a relay; `hub` is the name of what it connects to."""

    def __init__(self, run: Simulation, name: str, hub: str) -> None:
        self.run, self.world, self.name, self.hub = run, run.world, name, hub
        self.is_alive = True
        self.cut_until = 0.0
        draw = partial(self.world.dice.getrandbits, 64)
        self.core = core.Relay(name, draw, Sums(run.referee.records))
        self._routes: dict[bytes, Connection] = {}
        self._owners: dict[bytes, str] = {}  # of those that are closed, too
        self.uplinks: tuple[Connection, ...] = ()
        self._has_lost = False
        self._reach()
        self._tick()

    def owner_of(self, route: bytes) -> str:
        step = first_step(route)
        if step is None:
            return self._owners[route]
        return self.run.relays[self._owners[step[0]]].owner_of(step[1])

    # Connections of the site.

    def connects(self, connection: Connection) -> None:
        self._routes[connection.route] = connection
        self._owners[connection.route] = connection.owner
        connection.on_gone = self._loses_one

    def _loses_one(self) -> None:
        self._has_lost = True

    def hears(self, connection: Connection, message: Message | Wrapped, payload: Any) -> None:
        if self.is_alive and connection.route in self._routes:
            via, inner = _unwrapped(message)
            self._do(self.core.receive(connection.route, via, inner, payload))

    # To the hub.

    def _reach(self) -> None:
        """New connections to the hub; they come up when it can be reached."""
        links, usual = [], self.run.scenario.weather
        # Messages of many workers stall as seldom together as those of one.
        weather = replace(usual, stall=usual.stall / SHARING)
        for _ in range(2):
            connection = self.run.connection(self.hub, self.name, self._hears_hub, weather)
            at = max(self.world.now, self.cut_until, self.run.up_at(self.hub))
            connection.comes_up(at + self.world.dice.expovariate(1 / 0.1))
            links.append(connection)
            self.world.after(connection.is_up_at - self.world.now, partial(self._is_up, connection))
        self.uplinks = tuple(links)

    def _is_up(self, connection: Connection) -> None:
        if not self.is_alive or connection not in self.uplinks:
            return
        self.run.host(self.hub).connects(connection)
        if all(each.is_up_at <= self.world.now for each in self.uplinks):
            self._do(self.core.connected(self.world.now))

    def _hears_hub(self, connection: Connection, message: Any, payload: Any) -> None:
        if self.is_alive and connection in self.uplinks:
            via, inner = _unwrapped(message)
            bulk = connection is self.uplinks[1]
            self._do(self.core.receive_from_hub(via, inner, payload, self.world.now, bulk=bulk))

    def loses_touch(self, connection: Connection | None = None) -> None:
        if self.is_alive and (connection is None or connection in self.uplinks):
            for each in self.uplinks:
                each.hang_up()
            self._do(self.core.disconnected("a connection broke."))
            self._reach()

    # Incarnation.

    def dies(self) -> None:
        """Killed: what it held is lost."""
        self.world.tell(self.name, "is killed")
        self.is_alive = False
        for connection in (*self._routes.values(), *self.uplinks):
            connection.sever()
        for connection in self.uplinks:
            connection.is_found_gone(
                self.world.dice.choice((0.0, 0.1, 3.0)) * self.world.dice.random()
            )

    def _tick(self) -> None:
        if not self.is_alive:
            return
        if self._has_lost:
            self._has_lost = False
            self._do(self.core.probe_all())
        self._do(self.core.tick(self.world.now))
        self.world.after(TICK_S, self._tick)

    def _do(self, commands: core.Commands) -> None:
        for command in commands:
            match command:
                case core.SendUp(message, payload, via, bulk):
                    self.uplinks[bulk].up(_wrapped(via, message), payload)
                case core.SendDown(route, message, payload, via):
                    connection = self._routes.get(route)
                    if connection is None or not connection.down(_wrapped(via, message), payload):
                        self._do(self.core.closed(route))
                case core.Close(route):
                    self._ends(route)
                    self._do(self.core.closed(route))
                case core.Reconnect():
                    self.loses_touch()
                case core.Log(text):
                    self.world.tell(self.name, text)

    def _ends(self, route: bytes) -> None:
        """It closes a connection of the site, which the other side finds out soon."""
        connection = self._routes.pop(route, None)
        if connection is not None:
            connection.sever()
            self.run.finds_out(connection, self.world.dice.uniform(0.0, 0.2))


def _wrapped(via: Via | None, message: Message) -> Any:
    return message if via is None else Wrapped(via, message)


def _unwrapped(message: Message | Wrapped) -> tuple[Via | None, Message]:
    return (message.via, message.message) if isinstance(message, Wrapped) else (None, message)
