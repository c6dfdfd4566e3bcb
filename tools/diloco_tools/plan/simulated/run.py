"""One simulated run: the broker, its workers and their links, for a few rounds."""

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
from diloco_tools.plan.simulated.scene import SMALL, Pieces, Scene, chunks_of
from diloco_tools.plan.simulated.worker import Record, TooSlow, Worker
from diloco_worker.pure import DOWNLOAD_WINDOW

# Most pieces of the model, over all fragments, and least and most of one fragment.
MOST_PIECES, LEAST_OF_ONE, MOST_OF_ONE = 96, 8, 48
# Most pieces that all workers together send in a round: a minute of simulation.
MOST_IN_A_ROUND = 8_000
# Measured cycles of H steps after the first.
CYCLES, CYCLES_ASYNC = 2, 4
# Events per piece, worker and cycle: about twenty are usual; with this many the run is in a loop.
MOST_EVENTS = 500


@dataclass(frozen=True)
class Measured:
    """Measurements of a run after its first round. Seconds and bytes per cycle of H steps.

    Attributes:
        cycle_s: of each worker.
        trains_s: of each worker, in inner steps.
        exchange_s: mean over pushes, from the offer to the version that contains it.
        slowest_s: the same for the slowest worker.
        bytes_up, bytes_down: of one worker.
        worker_cpu_s, broker_cpu_s: of one worker, and of the broker.
        start_s: until every worker had the first parameters.
        events: simulated events.
        pieces: pieces of the model.
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
        """Extrapolate: this plus `share` times its difference to `other`, but no negative seconds."""

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
    """Simulate the question, with `pieces` per fragment (default: `pieces_of`).

    `before_offer` is a delay in seconds before each push is offered.

    If a piece represents several chunks, it runs twice, with this number and half of it: the error grows
    with the size of a piece, so it can be extrapolated away.

    Raises UsageError for links that are too slow for any connection.
    """
    chunks = chunks_of(question.parameters, question.fragments)
    count = min(chunks, pieces_of(question) if pieces is None else pieces)
    found = _simulate(question, costs, count, before_offer)
    half = max(1, count // 2)
    if count in {chunks, half}:
        return found
    # a/count + b and a/half + b were measured; the result is a/chunks + b.
    share = (1 / count - 1 / chunks) / (1 / half - 1 / count)
    return found.blend(_simulate(question, costs, half, before_offer), share)


def pieces_of(question: Question) -> int:
    """Pieces of a fragment: fewer with more workers or fragments."""
    of_worker = MOST_IN_A_ROUND // question.workers
    most = min(MOST_PIECES, of_worker) // question.fragments
    return max(LEAST_OF_ONE, min(MOST_OF_ONE, most))


def config_of(question: Question) -> BrokerConfig:
    """The options of the broker. No worker is dropped: failures are computed separately."""
    return BrokerConfig(
        mode=question.mode,
        workers=question.workers,
        sync_every=question.sync_every,
        num_fragments=question.fragments,
        fragment_sync_delay="auto" if question.delay_steps is None else question.delay_steps,
        wire_dtype=question.wire_dtype,
        reply_dtype=question.reply_dtype,
        # A quorum of all workers only makes pushes count as complete ones.
        quorum=question.workers if question.is_whole and question.mode == "sync" else None,
        heartbeat_timeout=0.0,
        stall_timeout=0.0,
        chunk_elements=SMALL,
        bind="tcp://127.0.0.1:*",
        max_parameters=0,
    )


class Simulation:
    """A simulated run with `count` pieces per fragment."""

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
        self._cycles, self._done = 0, 0  # cycles to measure, and workers that have made them
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
        """How a worker connects. Control and bulk share its link; control messages have no size."""
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
        # TCP is unfair within the time of a round: see `Costs.unevenness`.
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
        """Run until each worker has made this many cycles after its first; False if it stalls."""
        self._cycles = cycles
        each_cycle = len(self.workers) * self.pieces.count * self.pieces.fragments
        most = MOST_EVENTS * each_cycle * (cycles + 2) + 100_000
        return self.world.run(lambda: self._done == len(self.workers), most)

    def _marked(self, record: Record) -> None:
        self._done += len(record.marks) == self._cycles + 1


def _windowed(window: int, nbytes: float, delay: float) -> float:
    """Bytes a second with `window` chunks in flight."""
    return window * nbytes / delay if delay else math.inf


class _Line(NamedTuple):
    """A worker's link to the broker: round trip in seconds, bytes a second, and its site's link."""

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
            "These links are too slow: a chunk takes so long that a worker considers its connection "
            "dead and reconnects. Use smaller codecs, faster links, or fewer workers."
        ) from None
    if not has_ended:
        raise RuntimeError(
            f"The simulation stalled at {run.world.now:.0f} s, after {run.world.events} events."
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
