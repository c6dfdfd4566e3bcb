"""The training thread of a simulated worker: the boundary of the product, without a tensor.

`sync.boundary` decides; these are its ports. Where it waits, this is a generator that
yields: seconds of training, or None until there may be something new.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from types import coroutine
from typing import TYPE_CHECKING, Any

from diloco_protocol.messages import Heartbeat, Push
from diloco_protocol.version import VersionId
from diloco_worker.session.events import BeatNow, Depart, Event, Offer
from diloco_worker.session.news import LinkState, Poll, Work
from diloco_worker.sync import boundary
from diloco_worker.sync.fragment import Fragment, InFlight, Merge, TrainingBase
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.sync.state import Options, SyncState
from simulation.residuals import Residuals

if TYPE_CHECKING:
    from simulation.worker import Worker

# What a worker reports with each step.
TOKENS_A_STEP, SAMPLES_A_STEP = 32, 2


@dataclass(frozen=True)
class Habits:
    """How a worker trains. What it forces, blunders and repeats are probabilities."""

    speed: float = 4.0  # optimizer steps per second
    first_step: int = 0  # it shifts the schedule, as a restart from a checkpoint does
    wants: dict[str, Any] = field(default_factory=dict)  # what it insists on, as in `RunConfig`
    weights: tuple[float, ...] = (1.0, 1.0, 2.5)  # of its pushes, drawn anew for each
    timeout: float = 600.0  # seconds of silence after which it trains on
    max_sync_retries: int = 3  # broken connections at one boundary after which it trains on
    forces: float = 0.0  # at a step, that it forces a synchronisation
    blunders: float = 0.0  # that a chunk of a push is not finite
    repeats: float = 0.0  # that a chunk is sent twice
    look_s: float = 5.0  # after which it looks around by itself while it waits
    heartbeat_interval: float | None = None  # seconds; None: as the broker has it
    processes: int = 1  # that are this worker together


@coroutine
def _waiting() -> Generator[None, None, None]:
    yield None


class Training:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.state: SyncState | None = None  # what the boundary decides by, once the model is here
        self.endings: dict[int, int] = {}  # how many pushes have ended, by fragment
        self.leaving = False  # it was asked to finish
        self.waiting_since: float | None = None  # when it began to stand still
        self._frozen: dict[int, tuple[int, float]] = {}  # by fragment, step and second of the last
        self.residuals = Residuals(worker.name, worker.worker_id)
        self._thread = self._train()

    def goes_on(self) -> float | None:
        """Let the thread run to its next pause; returns for how many seconds it trains."""
        pause = next(self._thread, self.worker.habits.look_s)
        if pause is not None:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = self.worker.world.now
        return pause

    @property
    def progress(self) -> Heartbeat:
        return Heartbeat(
            b"",
            self.step,
            state="training" if self.waiting_since is None else "waiting",
            steps_per_s=self.worker.habits.speed if self.state is not None else None,
        )

    def wire_dtype(self) -> str:
        config = self.worker.session.config
        assert config is not None
        return str(self.worker.habits.wants.get("wire_dtype") or config.wire_dtype)

    @property
    def step(self) -> int:
        return self.state.step if self.state else self.worker.habits.first_step

    @property
    def fragments(self) -> list[Fragment]:
        return self.state.fragments if self.state else []

    @property
    def oldest_in_flight(self) -> float | None:
        flying = [f.number for f in self.fragments if f.in_flight is not None]
        return min((self._frozen[number][1] for number in flying), default=None)

    @property
    def frozen_steps(self) -> int:
        """Steps up to the last freeze of each fragment, summed up over the fragments."""
        return sum(at - self.worker.habits.first_step for at, _ in self._frozen.values())

    # The thread.

    def _train(self) -> Generator[float | None, None, None]:
        worker, dice = self.worker, self.worker.world.dice
        yield from self._await_model()
        state = self.state = self._begins()
        yield from boundary.poll(state).__await__()
        while not self.leaving:
            yield dice.uniform(0.8, 1.2) / worker.habits.speed
            if worker.units is not None:
                worker.units.step()
            yield from boundary.after_step(state, self.step + 1).__await__()
            if dice.random() < worker.habits.forces:
                yield from boundary.force(state).__await__()
        yield from boundary.leave(state).__await__()
        worker.command(Depart())
        while True:
            yield None

    def _await_model(self) -> Generator[float | None, None, None]:
        worker = self.worker
        while True:
            layout, arrivals = worker.session.layout, worker.inbox.arrivals
            if layout is not None and all(p.fragment in arrivals for p in layout.all if p.chunks):
                return
            if self.leaving:
                worker.command(Depart())
            yield None

    def _begins(self) -> SyncState:
        worker, habits = self.worker, self.worker.habits
        layout = worker.session.layout
        assert layout is not None
        taken = {number: worker.inbox.take(number) for number in list(worker.inbox.arrivals)}
        return SyncState(
            worker_id=worker.worker_id,
            ports=self,
            link=self._link_state(),
            options=Options(
                sync_every=habits.wants.get("sync_every"),
                wire_dtype=habits.wants.get("wire_dtype"),
                heartbeat_interval=habits.heartbeat_interval,
                max_sync_retries=habits.max_sync_retries,
                timeout=habits.timeout,
            ),
            chunks=[part.chunks for part in layout.fragments],
            bases=[
                TrainingBase(each.version, each.released.ledger)
                for part in layout.fragments
                if (each := taken[part.fragment]) is not None
            ],
            totals=self._totals(),
            step=habits.first_step,
            cycle_start=0,
            metrics=SyncMetrics(),
        )

    # The ports.

    def clock(self) -> float:
        return self.worker.now()

    def draw(self) -> int:
        return self.worker.world.dice.getrandbits(64)

    def has_news(self) -> bool:
        return self.worker.has_news

    def poll(self) -> Poll:
        self._check()
        state = self.state
        for each in state.fragments if state else ():
            if not each.is_partial:
                self.residuals.merged(each)
        return Poll(self.worker.inbox.take_news(), self._link_state(), self._totals())

    async def wait(self, seconds: float) -> Poll:
        await _waiting()
        return self.poll()

    def notify(self, event: Event) -> None:
        self._check()
        self.worker.command(event)

    def offer(self, in_flight: InFlight, *, is_new: bool) -> int:
        self.notify(Offer(in_flight.push))
        return self.worker.session.connection.reconnections

    def check_model(self) -> None:
        self._check()

    async def freeze(self, push: Push) -> Push:
        self._check()
        return self._freeze(push)

    def keep_anchor(self, fragment: int) -> None:
        self._check()

    async def merge(self, fragment: int, merge: Merge, step: int) -> None:
        self._check()
        self.residuals.merges(self.fragments[fragment], merge)

    def read_reports(self) -> Work:
        return self._totals()

    def show_waiting(self) -> None:
        self._check()

    def beat(self) -> None:
        self.notify(BeatNow())

    def log(self, text: str, *, is_warning: bool = False) -> None:
        self.worker.world.tell(self.worker.name, text)

    def trouble(self, text: str, cause: BaseException | None = None) -> None:
        self.worker.world.tell(self.worker.name, text)

    def push_ended(
        self, push_id: int, fragment: int, version: VersionId | None = None, why: str = ""
    ) -> None:
        self.endings[fragment] = self.endings.get(fragment, 0) + 1

    def _check(self) -> None:
        assert self.state is not None
        self.state.schedule.check_invariants()

    def _freeze(self, push: Push) -> Push:
        """The push as this worker makes it; the referee knows of it from now on."""
        worker, dice = self.worker, self.worker.world.dice
        self._frozen[push.fragment] = (self.step, worker.world.now)
        push = replace(
            push,
            weight=dice.choice(worker.habits.weights),
            tokens=TOKENS_A_STEP * max(1, push.steps),
            samples=SAMPLES_A_STEP * max(1, push.steps),
        )
        if dice.random() < worker.habits.blunders:
            worker.bad_chunks.add((push.push_id, dice.randrange(push.chunks)))
        what = f"step {self.step}: freezes {push.push_id:#x} of {push.fragment}"
        worker.world.tell(worker.name, what)
        worker.referee.offered(worker.name, worker.worker_id, push)
        self.residuals.frozen(push)
        if worker.units is not None:
            worker.units.frozen(push)
        return push

    def _totals(self) -> Work:
        return Work(0, TOKENS_A_STEP * self.step, SAMPLES_A_STEP * self.step)

    def _link_state(self) -> LinkState:
        inbox = self.worker.inbox
        inbox.is_news = True
        inbox.publish(self.worker.session)
        heard = inbox.last_heard
        return inbox.state(silence=None if heard is None else self.worker.now() - heard)
