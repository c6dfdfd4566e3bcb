"""The broker of a simulated run: the product's core on threads with simulated costs.

Two threads, as in the real one: the loop, which owns all state and does the tensor work, and ZeroMQ's,
which moves every byte. Tensor work runs in the order of the real queue.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diloco_broker.pure import BrokerConfig, Core, Executor, InitialModel, effects, events
from diloco_protocol.dtypes import is_quantized, whole_dtype
from diloco_protocol.messages import Message
from diloco_tools.plan.simulated.costs import DECODE, ENCODE
from diloco_tools.plan.simulated.fair_share import Flow, World
from diloco_tools.plan.simulated.scene import CodedChunk, Payload, Scene

# Seconds, by the clock that the core is shown, between two ticks.
TICK_S = 1.0

Listener = Callable[[Message, Any], None]


@dataclass(frozen=True, eq=False)
class Connection:
    """One of a worker's two connections. Messages take the delay, chunks also the link.

    `delay` is the round trip in seconds; `hears` receives messages at the worker.
    """

    world: World
    route: bytes
    delay: float
    up: Flow
    down: Flow
    hears: Listener

    def send_up(self, size: float, arrived: Callable[[], None]) -> None:
        """Send from the worker; a message of size 0 overtakes chunks."""
        self._send(self.up, size, arrived)

    def send_down(self, message: Message, payload: Any, size: float) -> None:
        self._send(self.down, size, lambda: self.hears(message, payload))

    def _send(self, flow: Flow, size: float, arrived: Callable[[], None]) -> None:
        one_way = self.delay / 2
        if not size:
            self.world.after(one_way, arrived)
        else:
            flow.send(size, lambda: self.world.after(one_way, arrived))


class Broker:
    """A simulated broker; implements `diloco_broker.shell.effects.Ports`."""

    def __init__(self, scene: Scene, config: BrokerConfig) -> None:
        self._scene, self._config = scene, config
        self._world, pieces = scene.world, scene.pieces
        self.loop, self.wire = scene.cores.flow(1.0), scene.cores.flow(1.0)
        shapes = {entry.name: entry.shape for entry in pieces.manifest.entries}
        dice = random.Random(0)  # for the tags of versions
        self.core = Core(config, lambda: dice.getrandbits(64), scene.clock(), InitialModel(shapes))
        self._executor = Executor(self.core, lambda: events.Now.both(scene.clock()), self)
        self._queue: list[tuple[int, int, int, effects.TensorWork]] = []
        self._order = itertools.count()
        self._is_working = False
        self._connections: dict[bytes, Connection] = {}
        self._few = is_quantized(config.reply_dtype)
        whole = whole_dtype(config.reply_dtype)
        self._whole = pieces.payload(whole)
        self._next = (
            CodedChunk(self._whole, pieces.code(config.reply_dtype), 0)
            if self._few
            else self._whole
        )
        self._first = CodedChunk(self._whole, None, 0) if self._few else self._whole
        self._tick()

    @property
    def tensors(self) -> Broker:
        return self

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of both threads until now."""
        return self.loop.total + self.wire.total

    def connects(self, connection: Connection) -> None:
        self._connections[connection.route] = connection

    def hears(self, route: bytes, message: Message, payload: Payload | None) -> None:
        """Receive a message; a payload passes through ZeroMQ's thread first."""
        if payload is None:
            self._feed(events.Received(route, message))
            return
        self.wire.send(
            self._scene.wire_seconds(payload.size),
            lambda: self._feed(events.Received(route, message, payload)),
        )

    def _tick(self) -> None:
        self._feed(events.Tick())
        self._world.after(TICK_S * self._scene.pieces.chunks, self._tick)

    def _feed(self, event: events.Event) -> None:
        self._executor.feed(event)
        while self._executor.acknowledge():
            pass
        self._work()

    # Tensor work.

    def add(self, work: effects.TensorWork | effects.AtOnce) -> None:
        """Steps first, then folds in the order of chunks, then the rest."""
        match work:
            case effects.Step() | effects.AggregateAndStep():
                place = (0, 0)
            case effects.Fold(index=index):
                place = (1, index)
            case effects.Inspect() | effects.StoreInitial():
                place = (2, 0)
            case _:
                return  # nothing is stored
        heapq.heappush(self._queue, (*place, next(self._order), work))

    def _work(self) -> None:
        if self._queue and not self._is_working:
            self._is_working = True
            work = heapq.heappop(self._queue)[-1]
            self.loop.send(self._seconds(work), lambda: self._done(work))

    def _done(self, work: effects.TensorWork) -> None:
        self._is_working = False
        match work:
            case effects.Fold() | effects.Inspect():
                self._feed(events.WorkDone(work, 1.0))
            case effects.Step(fragment, index) | effects.AggregateAndStep(fragment, index):
                self._feed(events.Stepped(fragment, index, self._next))
            case effects.StoreInitial():
                self._feed(events.InitialStored(work, self._first))

    def _seconds(self, work: effects.TensorWork) -> float:
        """CPU seconds of a piece of work."""
        costs, billions = self._scene.costs, self._scene.billions
        message = self._scene.message_seconds
        match work:
            case effects.Fold(wire_dtype=dtype):
                return message + billions * (DECODE[dtype] + costs.fold)
            case effects.Inspect(wire_dtype=dtype):
                return message + billions * DECODE[dtype]
            case effects.AggregateAndStep(groups=groups):
                parts = [part for group in groups for part in group]
                decode = sum(DECODE[part.wire_dtype] for part in parts)
                return billions * (self._step_seconds + decode + costs.fold * len(parts))
            case effects.Step():
                return billions * self._step_seconds
            case _:
                return 0.0  # before the first round

    @property
    def _step_seconds(self) -> float:
        """Per billion elements; quantized replies are decoded again for the copy of the replicas."""
        reply, costs = self._config.reply_dtype, self._scene.costs
        replica = DECODE[reply] if self._few else 0.0
        return costs.step + ENCODE[reply] + replica

    # Other effects of the core.

    def send(self, send: effects.Send) -> bool:
        connection, payload = self._connections[send.route], send.payload
        if payload is None:
            connection.send_down(send.message, None, 0.0)
            return True
        seconds = self._scene.wire_seconds(payload.size) + self._scene.message_seconds
        self.wire.send(seconds, lambda: connection.send_down(send.message, payload, payload.size))
        return True

    def handled(self, event: events.Event) -> None:
        pass

    def write(self, record: effects.Record) -> None:
        pass

    def disconnect(self, route: bytes) -> None:
        raise AssertionError(f"the broker disconnects a worker at {self._world.now:.0f} s")

    def save(self, save: effects.Save) -> None:
        raise AssertionError("a simulated broker saves nothing")

    def read(self, _: effects.ReadCheckpoint) -> None:
        raise AssertionError("a simulated broker has no checkpoints")

    def end(self, end: effects.End) -> None:
        raise AssertionError("a simulated broker has no operator")

    def finish(self, save: effects.Save | None) -> None:
        raise AssertionError("a simulated broker does not stop")
