"""The training thread of a simulated worker: when it freezes, waits and merges, without a tensor.

It does after each step what `training.boundary` does, with the real `RoundSchedule`. Where that waits,
this is a generator that yields: seconds of training, or None until there may be something new.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diloco_protocol.errors import Code
from diloco_protocol.fragments import longest_delay
from diloco_protocol.messages import BUFFERS, Heartbeat, Push, Released, RunConfig
from diloco_protocol.version import VersionId
from diloco_worker.core.connection import Phase
from diloco_worker.core.effects import Carried, Granted, Joined
from diloco_worker.core.events import BeatNow, Depart, Offer, RequestVersion
from diloco_worker.core.sync.news import Arrival
from diloco_worker.core.sync.schedule import RoundSchedule, TurnState

if TYPE_CHECKING:
    from simulation.worker import Worker

# What a worker reports with each step.
TOKENS_A_STEP, SAMPLES_A_STEP = 32, 2


@dataclass(frozen=True)
class Habits:
    """How a worker trains.

    Attributes:
        speed: optimizer steps per second.
        first_step: where its count begins: it shifts the schedule, as a restart from a checkpoint does.
        wants: what it insists on, by the names of `RunConfig`.
        weights: of its pushes, drawn anew for each.
        timeout: seconds of silence after which it trains on.
        max_sync_retries: broken connections at one boundary after which it trains on.
        forces: probability, at a step, that it forces a synchronisation.
        blunders: probability that a chunk of a push is not finite.
        repeats: probability that a chunk is sent twice.
        look_s: seconds after which it looks around by itself while it waits.
        heartbeat_interval: seconds; None: as the broker has it.
    """

    speed: float = 4.0
    first_step: int = 0
    wants: dict[str, Any] = field(default_factory=dict)
    weights: tuple[float, ...] = (1.0,)
    timeout: float = 600.0
    max_sync_retries: int = 3
    forces: float = 0.0
    blunders: float = 0.0
    repeats: float = 0.0
    look_s: float = 5.0
    heartbeat_interval: float | None = None


@dataclass
class Flight:
    """A frozen delta under way; see `training.fragment_sync.Flight`. `offered_at` is in seconds."""

    push_id: int
    began: int
    apply_at: int
    wait_at: int
    offered_at: float
    reconnections: int
    let_go: bool = False
    reply: Arrival | None = None
    rejection: str | None = None


class Training:
    """See the head of this module.

    Attributes:
        step: optimizer steps so far.
        flights: by fragment.
        versions: the bases, by fragment.
        endings: how many pushes have ended, by fragment.
        rounds: how many pushes have counted.
        leaving: it was asked to finish.
        waiting_since: when it began to stand still; None while it trains.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.step = worker.habits.first_step
        self.flights: dict[int, Flight] = {}
        self.versions: dict[int, VersionId] = {}
        self.endings: dict[int, int] = {}
        self.rounds = 0
        self.leaving = False
        self.waiting_since: float | None = None
        self.turns: RoundSchedule | None = None
        self._frozen_at: dict[int, int] = {}
        self._thread = self._train()

    def goes_on(self) -> float | None:
        """Let the thread run to its next pause; returns for how many seconds it trains."""
        pause = next(self._thread, self.worker.habits.look_s)
        if pause is not None:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = self.worker.world.now
        return pause

    def heartbeat(self, session: bytes, *, uploading: bool) -> Heartbeat:
        """What the link says of it."""
        state = "training" if self.waiting_since is None else "waiting"
        return Heartbeat(
            session,
            self.step,
            state="pushing" if uploading else state,
            steps_per_s=self.worker.habits.speed if self.turns is not None else None,
        )

    def wire_dtype(self) -> str:
        """What its pseudo-gradients travel in."""
        return str(self.worker.habits.wants.get("wire_dtype") or self._config.wire_dtype)

    @property
    def _config(self) -> RunConfig:
        config = self.worker.session.config
        assert config is not None
        return config

    @property
    def frozen_steps(self) -> int:
        """Steps up to the last freeze of each fragment, summed up over the fragments."""
        return sum(at - self.worker.habits.first_step for at in self._frozen_at.values())

    # The thread.

    def _train(self) -> Generator[float | None, None, None]:
        habits, world = self.worker.habits, self.worker.world
        yield from self._await_model()
        turns = self.turns = RoundSchedule(
            self._sync_every(),
            self._config.num_fragments,
            common=self._config.mode == "sync",
            step=self.step,
        )
        self._look(turns)
        while not self.leaving:
            yield world.dice.uniform(0.8, 1.2) / habits.speed
            self.step += 1
            yield from self._after_step(turns)
            if world.dice.random() < habits.forces:
                yield from self._force(turns)
        until = world.now + habits.timeout
        for fragment in self._by_age():
            yield from self._wait_for(turns, fragment, until)
        self.worker.command(Depart())
        while True:
            yield None

    def _await_model(self) -> Generator[float | None, None, None]:
        worker = self.worker
        while True:
            layout, arrivals = worker.session.layout, worker.inbox.arrivals
            if layout is not None and all(p.fragment in arrivals for p in layout.all if p.chunks):
                break
            if self.leaving:
                worker.command(Depart())
            yield None
        for fragment in list(arrivals):
            self._stand_on(arrivals.pop(fragment))

    def _after_step(self, turns: RoundSchedule) -> Generator[float | None, None, None]:
        merged = self.rounds
        self._look(turns)
        for fragment in self._by_age():
            flight = self.flights.get(fragment)
            if flight is not None and self.step >= flight.wait_at and not flight.let_go:
                yield from self._wait_for(turns, fragment)
        turns.pace(self._sync_every(), self.step)
        if turns.is_due(self.step):
            yield from self._slot(turns)
        if self.rounds != merged:
            self._pulse()

    def _slot(self, turns: RoundSchedule) -> Generator[float | None, None, None]:
        turn = yield from self._take_turn(turns)
        if turn is None:
            return  # it stays due
        turns.use_slot(self.step)
        for fragment in turn:
            if fragment in self.flights and self.step >= self.flights[fragment].wait_at:
                yield from self._wait_for(turns, fragment)
        turns.pace(self._sync_every(), self.step)

    def _force(self, turns: RoundSchedule) -> Generator[float | None, None, None]:
        """The next P turns now, each waited for."""
        taken = False
        for _ in range(turns.num_fragments):
            self._look(turns)
            turn = yield from self._take_turn(turns)
            if turn is None:
                break
            taken = True
            for fragment in turn:
                yield from self._wait_for(turns, fragment)
        if taken:
            turns.restart(self.step)

    def _take_turn(self, turns: RoundSchedule) -> Generator[float | None, None, list[int] | None]:
        """Push the fragment whose turn it is.

        Returns the fragment, if it is in flight for this turn now; None when the turn cannot be taken.
        """
        while turns.turn() is TurnState.BUSY:
            fragment = turns.fragment
            if self._why_not_wait(fragment) or not (yield from self._wait_for(turns, fragment)):
                return None
        fragment = turns.fragment
        match turns.turn():
            case TurnState.PAST:
                turns.skip()
                return []
            case TurnState.TAKEN:
                flight = self.flights[fragment]
                flight.let_go = False
                flight.wait_at = self.step + self._delays()[1]
                flight.reconnections = self.worker.session.connection.reconnections
                turns.skip()
                return [fragment]
            case _:
                self._settle(fragment, now=True)
                self._freeze(fragment)
                turns.push()
                return [fragment]

    def _freeze(self, fragment: int) -> None:
        worker, session, dice = self.worker, self.worker.session, self.worker.world.dice
        assert session.layout is not None
        assert fragment not in self.flights, "no second delta grows over a first"
        steps = self.step - self._frozen_at.get(fragment, worker.habits.first_step)
        self._frozen_at[fragment] = self.step
        self._pulse()
        push = Push(
            session=b"",
            push_id=dice.getrandbits(64),
            fragment=fragment,
            chunks=session.layout.all[fragment].chunks,
            wire_dtype=self.wire_dtype(),
            base=self.versions[fragment],
            weight=dice.choice(worker.habits.weights),
            steps=steps,
            tokens=TOKENS_A_STEP * max(1, steps),
            samples=SAMPLES_A_STEP * max(1, steps),
            buffers=BUFFERS,
        )
        if dice.random() < worker.habits.blunders:
            worker.bad_chunks.add((push.push_id, dice.randrange(push.chunks)))
        tau, latest = self._delays()
        self.flights[fragment] = Flight(
            push.push_id,
            self.step,
            self.step + tau,
            self.step + latest,
            worker.world.now,
            session.connection.reconnections,
        )
        worker.world.tell(worker.name, f"step {self.step}: freezes {push.push_id:#x} of {fragment}")
        worker.referee.offered(worker.name, worker.worker_id, push)
        worker.command(Offer(push))

    def _pulse(self) -> None:
        """Say at once how training stands."""
        if self.worker.habits.heartbeat_interval != 0:
            self.worker.command(BeatNow())

    def _delays(self) -> tuple[int, int]:
        """Steps from the freeze to the apply point, and to where the reply is waited for."""
        tau, latest = self._config.fragment_sync_delay, self._config.fragment_max_delay
        if latest is None and self._config.fragment_delay_auto:
            assert self.turns is not None
            latest = longest_delay(self.turns.sync_every, self.turns.num_fragments)
        return tau, tau if latest is None else max(tau, latest)

    def _sync_every(self) -> int:
        """H: the worker's own, what the broker has worked out for it, or the run's."""
        own, worked_out = self.worker.habits.wants.get("sync_every"), self.worker.inbox.sync_every
        if own is not None:
            barrier = self._config.mode == "sync"
            return min(int(own), self._config.sync_every) if barrier else int(own)
        if self._config.dylu and worked_out is not None:
            return worked_out
        return self._config.sync_every

    # News and waiting.

    def _by_age(self) -> list[int]:
        """The fragments in flight, the oldest flight first."""
        return sorted(self.flights, key=lambda fragment: (self.flights[fragment].began, fragment))

    def _look(self, turns: RoundSchedule) -> None:
        """Take in what has come, and merge what is due."""
        self._absorb(turns)
        for fragment in list(self.flights):
            self._settle(fragment)

    def _absorb(self, turns: RoundSchedule) -> None:
        if not self.worker.has_news:
            return
        news = self.worker.inbox.take_news()
        for fragment, arrival in news.arrivals.items():
            flight = self.flights.get(fragment)
            if flight is None:
                if arrival.released.version != self.versions.get(fragment):
                    self._stand_on(arrival)
            elif flight.push_id in arrival.counted or flight.reply is not None:
                flight.reply = arrival
        over = set()
        for fragment, flight in self.flights.items():
            if flight.push_id in news.rejections:
                flight.rejection = news.rejections[flight.push_id].code
            has_ended = flight.reply is not None or flight.rejection is not None
            if has_ended and fragment in turns.rounds:
                over.add(fragment)
        for event in news.turns:
            match event:
                case Joined(welcome):
                    turns.welcomed(welcome.first_round, over)
                case Granted(push_id, fragment, standing, round_):
                    its = self.flights.get(fragment)
                    if its is not None and its.push_id == push_id:
                        turns.granted(fragment, standing, round_)
                case Carried(fragment, round_):
                    turns.carried(fragment, round_)
                case Released(averaged=averaged, round=round_):
                    if averaged:
                        turns.made(round_)
        for fragment in sorted(over):
            flight = self.flights[fragment]
            if flight.reply is not None:
                turns.landed(fragment)
            else:
                turns.dropped(fragment, too_late=flight.rejection == Code.LATE)
        turns.check_invariants()

    def _settle(self, fragment: int, *, now: bool = False) -> bool:
        """Merge the reply of a fragment if it is its time. Returns whether its flight has counted."""
        flight = self.flights.get(fragment)
        if flight is None:
            return False
        if flight.reply is not None and (now or self.step >= flight.apply_at):
            self._end(fragment)
            self.rounds += 1
            self._stand_on(flight.reply)
            return True
        if flight.reply is None and flight.rejection is not None:
            self._end(fragment)
            if flight.rejection in (Code.LATE, Code.STALE):
                self.worker.command(RequestVersion(fragment))
        return False

    def _end(self, fragment: int) -> None:
        del self.flights[fragment]
        self.endings[fragment] = self.endings.get(fragment, 0) + 1

    def _stand_on(self, arrival: Arrival) -> None:
        """This version is the base of its fragment now."""
        self.versions[arrival.released.fragment] = arrival.released.version

    def _wait_for(
        self, turns: RoundSchedule, fragment: int, until: float | None = None
    ) -> Generator[float | None, None, bool]:
        """Wait until the flight of a fragment has counted; returns whether it has."""
        flight = self.flights.get(fragment)
        if flight is None:
            return False
        while True:
            self._absorb(turns)
            counted = self._settle(fragment, now=True)
            if fragment not in self.flights:
                return counted
            late = until is not None and self.worker.world.now >= until
            is_leaving = until is not None
            leads_on = turns.may_wait(fragment) or (is_leaving and self._is_going_up(fragment))
            if late or self._why_not_wait(fragment, is_leaving=is_leaving) or not leads_on:
                flight.let_go = flight.let_go or not is_leaving
                return False
            yield None

    def _is_going_up(self, fragment: int) -> bool:
        """May the broker lack chunks of this flight that it takes? Who leaves waits for that."""
        upload = self.worker.session.uploads.by_id.get(self.flights[fragment].push_id)
        is_up = upload is not None and (upload.is_in or upload.is_put_off)
        return self.worker.broker_restarts or not is_up

    def _why_not_wait(self, fragment: int, *, is_leaving: bool = False) -> bool:
        """Is there a reason, other than whose turn it is, to train on?"""
        session, habits = self.worker.session, self.worker.habits
        heard = session.connection.last_heard
        if session.phase is Phase.REFUSED or self.worker.broker_stops:
            return True
        if self.worker.broker_restarts and not is_leaving:
            return True
        if heard is not None and self.worker.world.now - heard >= habits.timeout:
            return True
        flight = self.flights.get(fragment)
        if flight is None or flight.let_go:
            return False
        return session.connection.reconnections - flight.reconnections > habits.max_sync_retries
