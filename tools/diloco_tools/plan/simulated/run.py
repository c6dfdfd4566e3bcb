"""One run, simulated: the broker, its workers and their lines, until enough rounds are over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from diloco_broker.pure import BrokerConfig, upload_window
from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_protocol.dtypes import SIZES
from diloco_protocol.errors import UsageError
from diloco_tools.plan.question import USABLE, Question
from diloco_tools.plan.simulated.broker import Broker, Connection, Listener
from diloco_tools.plan.simulated.costs import Costs
from diloco_tools.plan.simulated.fair_share import Hub, World
from diloco_tools.plan.simulated.pieces import SMALL, Pieces, chunks_of
from diloco_tools.plan.simulated.scene import Scene
from diloco_tools.plan.simulated.worker import Record, TooSlow, Worker
from diloco_worker.pure import DOWNLOAD_WINDOW

# Pieces of the model at most, over all fragments, and of one fragment at least and at most.
MOST_PIECES, LEAST_OF_ONE, MOST_OF_ONE = 96, 8, 48
# Pieces that all workers together send in a round at most: a minute of simulation.
MOST_IN_A_ROUND = 8_000
# Cycles of H steps that are looked at behind the first.
CYCLES, CYCLES_ASYNC = 2, 4
# A run that needs more events than this goes round in circles.
MOST_EVENTS = 20_000_000


@dataclass(frozen=True)
class Measured:
    """What a run was seen to do, behind its first round. Seconds and bytes of one cycle of H steps.

    Attributes:
        cycle_s: of each worker.
        trains_s: of each worker, what of it went into inner steps.
        exchange_s: mean over pushes, from the offer to the version that contains it.
        slowest_s: the same of the worker for which it takes longest.
        bytes_up, bytes_down: of one worker.
        worker_cpu_s, broker_cpu_s: of one worker, and of the broker.
        start_s: until every worker had the first parameters.
        events: that were simulated.
        pieces: that stand for the model's chunks.
    """

    cycle_s: tuple[float, ...]
    trains_s: tuple[float, ...]
    exchange_s: float
    slowest_s: float
    bytes_up: float
    bytes_down: float
    worker_cpu_s: float
    broker_cpu_s: float
    start_s: float
    events: int
    pieces: int

    def blend(self, other: Measured, share: float) -> Measured:
        """This and so much of what it is above the other; no negative seconds."""

        def of(mine: float, others: float) -> float:
            return max(0.0, mine + share * (mine - others))

        def each(mine: tuple[float, ...], others: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(of(a, b) for a, b in zip(mine, others, strict=True))

        cycles = each(self.cycle_s, other.cycle_s)
        return replace(
            self,
            cycle_s=tuple(map(max, cycles, self.trains_s)),
            exchange_s=of(self.exchange_s, other.exchange_s),
            slowest_s=of(self.slowest_s, other.slowest_s),
            start_s=of(self.start_s, other.start_s),
            events=self.events + other.events,
        )


def simulate(
    question: Question, costs: Costs, pieces: int | None = None, before_offer: float = 0.0
) -> Measured:
    """Simulate what is asked, in so many pieces of a fragment; by default as `pieces_of` says.

    `before_offer` is what each push takes before it can be offered, in seconds.

    Where pieces stand for several chunks it is done twice, with so many and half as many: what is
    larger in pieces is larger by an amount that grows as they do, so it can be taken off.

    Raises UsageError for lines on which no connection would live.
    """
    chunks = chunks_of(question.parameters, question.fragments)
    count = min(chunks, pieces_of(question) if pieces is None else pieces)
    found = _simulate(question, costs, count, before_offer)
    half = max(1, count // 2)
    if count in {chunks, half}:
        return found
    # a/count + b is found, and a/half + b; a/chunks + b is meant.
    share = (1 / count - 1 / chunks) / (1 / half - 1 / count)
    return found.blend(_simulate(question, costs, half, before_offer), share)


def pieces_of(question: Question) -> int:
    """Pieces of a fragment: few where there are many workers or fragments."""
    of_worker = MOST_IN_A_ROUND // question.workers
    most = min(MOST_PIECES, of_worker) // question.fragments
    return max(LEAST_OF_ONE, min(MOST_OF_ONE, most))


def config_of(question: Question) -> BrokerConfig:
    """The options of the broker. Nobody is dropped: what failures cost is another matter."""
    return BrokerConfig(
        mode=question.mode,
        workers=question.workers,
        sync_every=question.sync_every,
        num_fragments=question.fragments,
        fragment_sync_delay="auto" if question.delay_steps is None else question.delay_steps,
        wire_dtype=question.wire_dtype,
        reply_dtype=question.reply_dtype,
        # A quorum of all is the same as none, but that pushes count whole.
        quorum=question.workers if question.is_whole and question.mode == "sync" else None,
        heartbeat_timeout=0.0,
        stall_timeout=0.0,
        chunk_elements=SMALL,
        bind="tcp://127.0.0.1:*",
        max_parameters=0,
    )


class Simulation:
    """See the head of this module. `count` pieces of each fragment."""

    def __init__(
        self, question: Question, costs: Costs, count: int, before_offer: float = 0.0
    ) -> None:
        self.question, self.costs, self.world = question, costs, World()
        self.pieces = Pieces(question.parameters, question.fragments, count)
        cores = Hub(self.world, math.inf if question.cores is None else question.cores)
        scene = Scene(self.world, question, self.pieces, costs, cores)
        self._up = Hub(self.world, question.broker_link * USABLE / 8)
        self._down = Hub(self.world, question.broker_link * USABLE / 8)
        self.broker = Broker(scene, config_of(question))
        self._routes = 0
        self._unevenness = costs.unevenness if question.workers > 1 else 0.0
        self._cycles, self._done = 0, 0  # that are looked at, and workers that have made them
        self.workers = [
            Worker(
                scene,
                number,
                self.broker,
                connect=self._connector(number),
                marked=self._marked,
                before_offer=before_offer,
            )
            for number in range(question.workers)
        ]

    def _connector(self, number: int) -> Callable[[Listener], tuple[Connection, Connection]]:
        """How a worker connects. Control and bulk share its line; control has nothing to carry."""
        question = self.question
        line = _line(question, number)
        delay = line.delay
        elements = min(CHUNK_ELEMENTS, question.parameters / question.fragments)
        most_up = _windowed(
            upload_window(question.workers), elements * SIZES[question.wire_dtype].element, delay
        )
        most_down = _windowed(
            DOWNLOAD_WINDOW, elements * SIZES[question.reply_dtype].element, delay
        )
        # TCP does not share a line evenly for as long as a round takes: see `Costs`.
        weight = 1.0 + (1 if number % 2 else -1) * self._unevenness
        up = self._up.flow(min(line.up, most_up), line.behind, weight)
        down = self._down.flow(min(line.down, most_down), line.behind)

        def connect(hears: Listener) -> tuple[Connection, Connection]:
            self._routes += 2
            both = tuple(
                Connection(self.world, b"route-%d" % (self._routes - each), delay, up, down, hears)
                for each in (1, 0)
            )
            for connection in both:
                self.broker.connects(connection)
            return both[0], both[1]

        return connect

    def runs(self, cycles: int) -> bool:
        """Until each worker has made so many cycles behind its first. False: it comes to a stop."""
        self._cycles = cycles
        return self.world.run(lambda: self._done == len(self.workers), MOST_EVENTS)

    def _marked(self, record: Record) -> None:
        self._done += len(record.marks) == self._cycles + 1


def _windowed(window: int, nbytes: float, delay: float) -> float:
    """Bytes a second with so many chunks under way."""
    return window * nbytes / delay if delay else math.inf


class _Line(NamedTuple):
    """Of a worker to the broker: seconds there and back, bytes a second, and the line of its site."""

    delay: float
    up: float
    down: float
    behind: tuple[object, float] | None = None


def _line(question: Question, number: int) -> _Line:
    if question.sites > 1 and question.site(number) == 0:
        rate = question.lan_link * USABLE / 8
        return _Line(question.lan_delay, rate, rate)
    shared, behind = question.site_link, None
    if question.sites > 1 and shared is not None:
        behind = (question.site(number), shared * USABLE / 8)
    up, down = question.link(number), question.link_down(number)
    return _Line(question.delay(number), up * USABLE / 8, down * USABLE / 8, behind)


def _simulate(question: Question, costs: Costs, count: int, before_offer: float) -> Measured:
    run = Simulation(question, costs, count, before_offer)
    cycles = CYCLES_ASYNC if question.mode == "async" else CYCLES
    if question.workers * count * question.fragments > MOST_IN_A_ROUND // 2:
        cycles = 1
    try:
        has_ended = run.runs(cycles)
    except TooSlow:
        raise UsageError(
            "These lines are too slow: no chunk comes for so long that a worker takes its connection "
            "for dead and begins again. Take codecs with fewer bytes, faster lines, or fewer workers."
        ) from None
    if not has_ended:
        raise RuntimeError(
            f"The simulation came to a stop at {run.world.now:.0f} s, after {run.world.events} events."
        )
    return _measured(run, cycles)


def _measured(run: Simulation, cycles: int) -> Measured:
    records = [worker.record for worker in run.workers]
    spans = [(record.marks[0], record.marks[cycles]) for record in records]
    exchanges = [_exchange_s(record) for record in records]
    first, last = spans[0]
    awake = run.costs.awake * run.question.fragments * max(exchanges)
    return Measured(
        cycle_s=tuple((b.at - a.at) / cycles for a, b in spans),
        trains_s=tuple((b.steps - a.steps) * run.question.step_s / cycles for a, b in spans),
        exchange_s=sum(exchanges) / len(exchanges),
        slowest_s=max(exchanges),
        bytes_up=sum(b.bytes_up - a.bytes_up for a, b in spans) / cycles / len(spans),
        bytes_down=sum(b.bytes_down - a.bytes_down for a, b in spans) / cycles / len(spans),
        worker_cpu_s=(last.cpu_seconds - first.cpu_seconds) / cycles,
        broker_cpu_s=(last.broker_cpu_seconds - first.broker_cpu_seconds) / cycles + awake,
        start_s=max(record.began_at or 0.0 for record in records),
        events=run.world.events,
        pieces=run.pieces.count * run.question.fragments,
    )


def _exchange_s(record: Record) -> float:
    """Mean seconds of a worker's pushes between its first mark and its last."""
    since = record.marks[0].at
    took = [end - began for began, end in record.exchanges if began >= since]
    return sum(took) / len(took)
