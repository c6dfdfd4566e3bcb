"""A simulated worker: real session and schedule, training that takes time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.dtypes import span_bytes
from diloco_protocol.messages import BUFFERS, Grant, Heartbeat, Join, Notice, Push
from diloco_protocol.version import VersionId
from diloco_worker.session import effects as asked
from diloco_worker.session import events as said
from diloco_worker.session.session import Session
from diloco_worker.sync.schedule import RoundSchedule, TurnState
from simulation.hosts import CHUNKS, Caller, Up
from simulation.tensors import demand

if TYPE_CHECKING:
    from simulation.takeover import Takeover

STEPS = 10  # to each push
CYCLE_S = (0.5, 3.0)  # least and most that they take,
SLOWER = (0.3, 1.0, 2.0)  # times one of these for each process
HEARTBEAT_S = 10.0
LOOK_S = 0.25  # between two looks of a worker at its session


class Trainer(Caller):
    """One process of a worker: trains a while, pushes the fragment whose turn it is, and so on.

    Behind a push it waits for the version that has it, as far as the schedule allows, or trains on until
    the fragment has its turn again; which of the two is drawn for each process.
    """

    places = 1  # addresses that it knows

    def __init__(
        self, run: Takeover, worker_id: str, process: int, server: Callable[[], str]
    ) -> None:
        super().__init__(run, f"{worker_id}/{process}", server)
        self.worker_id, self.step = worker_id, 0
        self.counted = 0
        config = run.config
        self._schedule = RoundSchedule(
            STEPS, config.num_fragments, common=not config.is_async, step=0, cycle_start=0
        )
        self._flights: dict[int, Push] = {}
        self._versions: dict[int, VersionId] = {}
        self._trains_on = config.num_fragments > 1 and run.world.dice.random() < 0.5
        self._is_training = False
        self._waits_for: int | None = None  # a fragment in flight
        self._pace = run.world.dice.choice(SLOWER)

    def begins(self) -> None:
        self.world.tell(self.caller, "begins")
        draw = partial(self.world.dice.getrandbits, 64)
        self.speak(Session(Join(self.worker_id, self.run.manifest), draw, HEARTBEAT_S))
        self.tell(said.Start(self.places))
        self._tick()

    def _tick(self) -> None:
        if not self.is_gone:
            self.tell(said.Tick())
            self.world.after(LOOK_S, self._tick)

    def dies(self) -> None:
        self.world.tell(self.caller, "is killed")
        self.breaks()
        self.is_gone = True

    def prepare(self, push_id: int, layout: FragmentLayout) -> bool:
        """What is held, or the model as the script has made it, which has no pushes in it."""
        if not super().prepare(push_id, layout):
            sizes = [span_bytes(span, "fp32") for span in layout.spans]
            self.outgoing[push_id] = tuple(Up((), size) for size in sizes)
        return True

    @property
    def progress(self) -> Heartbeat:
        return Heartbeat(b"", self.step, steps_per_s=1 / self._pace)

    def learns(self, effect: asked.Effect, values: Any) -> None:
        schedule = self._schedule
        match effect:
            case asked.Joined(welcome):
                schedule.welcomed(welcome.first_round)
            case asked.Told(Grant(push_id, fragment, standing, round=round_)):
                flight = self._flights.get(fragment)
                if flight is not None and flight.push_id == push_id:
                    schedule.granted(fragment, standing, round_)
            case asked.Told(Notice("carried", fragment=fragment, round=int() as round_)):
                schedule.carried(fragment, round_)
            case asked.Deliver():
                self._has(effect, values)
            case asked.PushOver(push_id, str() as code, text):
                self.world.tell(self.caller, f"{push_id:#x} is over: {code}: {text}")
                self.run.refused.append((self.worker_id, code))
                fragment = next(f for f, each in self._flights.items() if each.push_id == push_id)
                del self._flights[fragment]
                schedule.dropped(fragment, too_late=code == "late")
                self.tell(said.RequestVersion(fragment))
            case asked.JoinRefused(code, text, True):
                demand(code == "id_taken", "{} is refused: {}", self.caller, text)
                self.is_gone = True
        schedule.check_invariants()
        self._go_on()

    def _has(self, effect: asked.Deliver, values: Any) -> None:
        released, fragment = effect.released, effect.released.fragment
        self._versions[fragment] = released.version
        if released.averaged:
            self._schedule.made(released.round)
        if effect.counted is None:
            return
        key = (self.worker_id, effect.counted)
        is_in = all(key in each.contents for each in values)
        demand(is_in, "{} is said to be in {}", key, released.version)
        self.world.tell(self.caller, f"{effect.counted:#x} is in {released.version} of {fragment}")
        self.counted += 1
        if self._flights.pop(fragment, None) is not None:
            self._schedule.merged(fragment)

    def _go_on(self) -> None:
        """Train, push, or stand still; as `sync.boundary` has it."""
        schedule = self._schedule
        if self.is_gone or self._is_training or len(self._versions) < schedule.num_fragments:
            return
        if self._waits_for is not None:
            if self._waits_for in self._flights and schedule.may_wait(self._waits_for):
                return
            self._waits_for = None
            self._train()
            return
        fragment = schedule.fragment
        match schedule.turn() if self.step else None:
            case None:
                self._train()
            case TurnState.BUSY:
                pass
            case TurnState.FREE:
                schedule.push()
                self._push(fragment)
                self._goes_on_behind(fragment)
            case TurnState.TAKEN | TurnState.PAST as turn:
                schedule.skip()
                self._goes_on_behind(fragment if turn is TurnState.TAKEN else None)

    def _goes_on_behind(self, fragment: int | None) -> None:
        if fragment is None or self._trains_on:
            self._train()
        else:
            self._waits_for = fragment

    def _train(self) -> None:
        self._is_training = True

        def is_done() -> None:
            if not self.is_gone:
                self.step += STEPS
                self._is_training = False
                self._go_on()

        pieces = self._schedule.num_fragments
        self.world.after(self._pace * self.world.dice.uniform(*CYCLE_S) / pieces, is_done)

    def _push(self, fragment: int) -> None:
        push_id, base = self.world.dice.getrandbits(64), self._versions[fragment]
        flight = self._flights[fragment] = Push(
            b"", push_id, fragment, CHUNKS, "fp32", base=base, steps=STEPS, buffers=BUFFERS
        )
        self.outgoing[push_id] = (Up(((self.worker_id, push_id),), 16),) * CHUNKS
        self.world.tell(self.caller, f"pushes {push_id:#x} of fragment {fragment}")
        self.tell(said.Offer(flight))
