"""A worker of a simulated run: the product's session and boundary on threads with simulated costs.

Inner steps between two decisions are one action, since training reacts only at decisions. News from the
session ends it early, after the current step, as in a real run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from types import coroutine
from typing import Any

from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.dtypes import is_quantized, whole_dtype
from diloco_protocol.messages import Heartbeat, Join, Message, Push
from diloco_protocol.version import VersionId
from diloco_tools.plan.simulated.broker import Broker, Connection, Listener
from diloco_tools.plan.simulated.costs import DECODE, ENCODE, GIGA
from diloco_tools.plan.simulated.fair_share import Flow
from diloco_tools.plan.simulated.scene import Code, Payload, Scene
from diloco_worker.pure import (
    Executor,
    Inbox,
    InFlight,
    LinkState,
    Merge,
    Options,
    Poll,
    Session,
    SyncMetrics,
    SyncState,
    TrainingBase,
    Work,
    after_step,
    effects,
    events,
    poll,
)

INSTANT_S = 1e-6  # past a deadline, beyond the rounding error of sums of floats


class TooSlow(Exception):
    """A worker reconnects, because no chunk has moved on its connection for too long."""


@dataclass(frozen=True)
class Steps:
    """Train for `count` steps, or until there is news."""

    count: int


@dataclass(frozen=True)
class Busy:
    """Work of the training thread, in CPU seconds."""

    seconds: float


Pause = Steps | Busy | None  # None: until there is news


@dataclass(frozen=True)
class Mark:
    """The progress of a worker when it merged a version of its first fragment."""

    at: float
    steps: int
    bytes_up: float
    bytes_down: float
    cpu_seconds: float
    broker_cpu_seconds: float


@dataclass
class Record:
    """The measurements of a worker."""

    marks: list[Mark] = field(default_factory=list)
    # For each push, when it was offered and when the version that contains it was complete here.
    exchanges: list[tuple[float, float]] = field(default_factory=list)
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    began_at: float | None = None  # its first step


class Worker:
    """A simulated worker; implements `Network` and `Memory` of `diloco_worker.transport.executor`.

    `connect` opens its control and bulk connections, `marked` is called with each mark. `before_offer`
    delays each push: for a relay, by the time of the exchange within its site.
    """

    address, shortcut = "the simulated broker", ""

    def __init__(
        self,
        scene: Scene,
        number: int,
        broker: Broker,
        *,
        connect: Callable[[Listener], tuple[Connection, Connection]],
        marked: Callable[[Record], None],
        before_offer: float = 0.0,
    ) -> None:
        self._scene, self._world = scene, scene.world
        self.question, self.costs = scene.question, scene.costs
        self._broker, self._connect, self._before_offer = broker, connect, before_offer
        self._marked = marked
        dice = random.Random(number + 1)
        self.draw: Callable[[], int] = lambda: dice.getrandbits(64)
        self.worker_id = f"w{number}"
        self.record = Record()
        join = Join(self.worker_id, scene.pieces.manifest)
        # Without heartbeats: no worker is dropped here.
        self.session = Session(join, self.draw, heartbeat_interval=0)
        self.inbox = Inbox()
        self._executor = Executor(self.session, self.inbox, self, self, self._notice)
        self._payload = scene.pieces.payload(scene.question.wire_dtype)
        self._connections: tuple[Connection, Connection] | None = None
        self._io: Flow = scene.cores.flow(1.0)
        self._thread: Flow = scene.cores.flow(1.0)
        self._state: SyncState | None = None
        self._offered: dict[int, float] = {}
        self._tick_at: float | None = None
        # The training thread: its current action, since when, and the number of its latest plan.
        self._pause: Pause = None
        self._since, self._plan = 0.0, 0
        self._is_nudged = False
        self._training = self._train()
        self.feed(events.Start())
        self._go_on(None)

    @property
    def cpu_seconds(self) -> float:
        return self._io.total + self._thread.total

    # The session.

    def now(self) -> float:
        return self._scene.clock()

    def feed(self, event: events.Event) -> None:
        self._executor.feed(event)
        self._plan_tick()
        if self.inbox.turns or self.inbox.has_news:
            self._nudge()

    def _notice(self, effect: effects.Effect) -> None:
        if isinstance(effect, effects.Deliver) and effect.counted in self._offered:
            self.record.exchanges.append((self._offered.pop(effect.counted), self._world.now))

    def _plan_tick(self) -> None:
        at = self.session.wakes_at()
        if at is None or (self._tick_at is not None and self._tick_at <= at):
            return
        self._tick_at = at = max(at, self.now()) + INSTANT_S

        def tick() -> None:
            if self._tick_at == at:
                self._tick_at = None
                self.feed(events.Tick())

        self._world.at(at * self._scene.pieces.chunks, tick)

    def _hears(self, message: Message, payload: Payload | None) -> None:
        if payload is None:
            self.feed(events.Received(message))
            return
        self.record.bytes_down += payload.size
        reply = self.question.reply_dtype
        dtype = reply if isinstance(payload, Code) else whole_dtype(reply)
        self._io.send(
            self._io_seconds(payload, DECODE[dtype]), lambda: self._takes(message, payload)
        )

    def _takes(self, message: Message, payload: Payload) -> None:
        self._executor.payload = payload
        self.feed(events.Received(message))

    def _io_seconds(self, payload: Payload, codec: float) -> float:
        """CPU seconds for a chunk in or out; `codec` is seconds per billion elements."""
        scene = self._scene
        return scene.wire_seconds(payload.size) + scene.message_seconds + codec * scene.billions

    # The network.

    def connect(self, _: int) -> None:
        self._connections = self._connect(self._hears)
        self._world.after(self._connections[0].delay, lambda: self.feed(events.Connected()))

    def disconnect(self) -> None:
        raise TooSlow

    def send(self, message: Message, payload: Any = None, *, bulk: bool = False) -> None:
        assert self._connections is not None
        connection = self._connections[bulk]
        if not isinstance(payload, Payload):
            connection.send_up(0.0, lambda: self._broker.hears(connection.route, message, None))
            return
        self.record.bytes_up += payload.size
        self._io.send(
            self._io_seconds(payload, ENCODE[self.question.wire_dtype]),
            lambda: connection.send_up(
                payload.size, lambda: self._broker.hears(connection.route, message, payload)
            ),
        )

    @property
    def progress(self) -> Heartbeat:
        return Heartbeat(b"", self._state.step if self._state else 0)

    def welcomed(self, epoch: str, /) -> None:
        pass

    def say(self, text: str, *, trouble: bool = False) -> None:
        pass

    # Its fragments, which are not stored.

    def begin(self, layout: FragmentLayout) -> None:
        pass

    def store(self, fragment: int, index: int, payload: Any, wire_dtype: str) -> None:
        pass

    def follow(
        self, fragment: int, index: int, payload: Any, wire_dtype: str, parts: Sequence[int]
    ) -> int:
        return 0

    def finish(self, fragment: int) -> None:
        return None

    def held(self, fragment: int) -> None:
        return None

    def forget(self) -> None:
        pass

    def prepare(self, push_id: int, layout: FragmentLayout) -> bool:
        return True

    def name(self, layout: FragmentLayout) -> None:
        raise AssertionError("a simulated model has no frozen tensors")

    def chunk(self, push_id: int, fragment: int, index: int) -> Payload:
        return self._payload

    def drop(self, push_id: int) -> None:
        pass

    # The training thread.

    def _nudge(self) -> None:
        """There is news: a waiting thread looks now, a training one after the current step."""
        if isinstance(self._pause, Busy) or self._is_nudged:
            return
        self._is_nudged = True
        if isinstance(self._pause, Steps):
            step_s = self.question.step_s
            made = max(1, math.ceil((self._world.now - self._since) / step_s - 1e-9))
            if made < self._pause.count:
                self._wake(self._since + made * step_s, made)
        else:
            self._wake(self._world.now, None)

    def _wake(self, at: float, answer: int | None) -> None:
        """Resume the thread then. A later plan replaces an earlier one."""
        self._plan += 1
        plan = self._plan
        self._world.at(at, lambda: self._go_on(answer) if plan == self._plan else None)

    def _go_on(self, answer: int | None) -> None:
        self._is_nudged = False
        self._pause = pause = self._training.send(answer)
        self._since = self._world.now
        if isinstance(pause, Steps):
            self._wake(self._since + pause.count * self.question.step_s, pause.count)
        elif isinstance(pause, Busy):
            self._plan += 1
            self._thread.send(pause.seconds, lambda: self._go_on(None))

    def _train(self) -> Generator[Pause, int | None, None]:
        while not self._has_model():
            yield None
        state = self._state = self._begins()
        yield from poll(state).__await__()
        self.record.began_at = self._world.now
        while True:
            made = yield Steps(self._steps_to_go(state))
            assert made is not None
            yield from after_step(state, state.step + made).__await__()

    def _has_model(self) -> bool:
        layout, arrivals = self.session.layout, self.inbox.arrivals
        return layout is not None and all(p.fragment in arrivals for p in layout.fragments)

    def _begins(self) -> SyncState:
        layout = self.session.layout
        assert layout is not None
        taken = [self.inbox.arrivals.pop(part.fragment) for part in layout.fragments]
        return SyncState(
            worker_id=self.worker_id,
            ports=_Training(self),
            link=self.link_state(),
            options=Options(),
            chunks=[part.chunks for part in layout.fragments],
            bases=[TrainingBase(each.version, each.released.ledger) for each in taken],
            totals=Work(),
            step=0,
            cycle_start=0,
            metrics=SyncMetrics(),
        )

    def _steps_to_go(self, state: SyncState) -> int:
        """Steps until the next decision."""
        step = state.step
        least, most = 1, state.schedule.sync_every
        while least < most:  # the next slot
            middle = (least + most) // 2
            if state.schedule.is_due(step + middle):
                most = middle
            else:
                least = middle + 1
        for fragment in state.fragments:
            if fragment.in_flight is not None:
                for at in (fragment.in_flight.apply_at, fragment.in_flight.wait_at):
                    if at > step:
                        least = min(least, at - step)
        return least

    def offers(self, push: Push) -> None:
        self._offered[push.push_id] = self._world.now
        offer = events.Offer(push)
        self._world.after(self._before_offer, lambda: self.feed(offer))

    def mark(self) -> None:
        state, record = self._state, self.record
        assert state is not None
        record.marks.append(
            Mark(
                self._world.now,
                state.step,
                record.bytes_up,
                record.bytes_down,
                self.cpu_seconds,
                self._broker.cpu_seconds,
            )
        )
        self._marked(record)

    def link_state(self) -> LinkState:
        self.inbox.is_news = True
        self.inbox.publish(self.session)
        return self.inbox.state(silence=0.0)  # the broker answers heartbeats


@coroutine
def _paused(pause: Pause) -> Generator[Pause, int | None, None]:
    yield pause


class _Training:
    """`diloco_worker.sync.ports.Ports` for a simulated training thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        question = worker.question
        self._of_fragment = question.parameters / question.fragments / GIGA

    def clock(self) -> float:
        return self._worker.now()

    def draw(self) -> int:
        return self._worker.draw()

    def has_news(self) -> bool:
        return bool(self._worker.inbox.turns) or self._worker.inbox.has_news

    def poll(self) -> Poll:
        return Poll(self._worker.inbox.take_news(), self._worker.link_state(), Work())

    async def wait(self, seconds: float) -> Poll:
        await _paused(None)
        return self.poll()

    def notify(self, event: events.Event) -> None:
        self._worker.feed(event)

    def offer(self, in_flight: InFlight, *, is_new: bool) -> int:
        self._worker.offers(in_flight.push)
        return self._worker.session.connection.reconnections

    async def freeze(self, push: Push) -> Push:
        await _paused(Busy(self._worker.costs.freeze * self._of_fragment))
        return push

    async def merge(self, fragment: int, merge: Merge, step: int) -> None:
        costs = self._worker.costs
        if merge.touches_model:
            wire = self._worker.question.wire_dtype
            few = merge.in_flight is not None and is_quantized(wire)
            await _paused(Busy((costs.land + few * costs.left_out) * self._of_fragment))
        if fragment == 0 and merge.in_flight is not None:
            self._worker.mark()

    def read_reports(self) -> Work:
        return Work()

    def check_model(self) -> None: ...
    def keep_anchor(self, fragment: int) -> None: ...
    def show_waiting(self) -> None: ...
    def beat(self) -> None:
        self.notify(events.BeatNow())

    def log(self, text: str, *, is_warning: bool = False) -> None: ...
    def trouble(self, text: str, cause: BaseException | None = None) -> None: ...
    def push_ended(
        self, push_id: int, fragment: int, version: VersionId | None = None, why: str = ""
    ) -> None: ...
