"""Tensor work that is only noted: for every chunk, which pushes are in it, instead of numbers."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.core.versions.record import Resumption
from diloco_broker.tensors.parameters import FragmentTensors
from diloco_protocol.chunks import ModelLayout

CHUNK_ELEMENTS = 4


@dataclass(eq=False)
class Payload:
    """A buffer of which only the length and a mark matter; a seeded one says what it contains."""

    nbytes: int
    is_finite: bool = True
    squares: float = 1.0
    fingerprint: int = 0
    contents: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Wire:
    """A finished chunk: the (worker, push id) pairs that it has ever averaged, with multiplicity."""

    contents: tuple[tuple[str, int], ...]
    nbytes: int = 4 * CHUNK_ELEMENTS


class NotedTensors:
    """The tensors of one incarnation of a broker.

    Attributes:
        queue: work that is not done yet.
        chunks: by fragment and index.
        steps, merges, tunes, reverted: the requests, in order.
    """

    def __init__(self, layout: Callable[[], ModelLayout], resumption: Resumption | None) -> None:
        self._layout = layout
        self._resumption = resumption
        self.queue: deque[effects.TensorWork] = deque()
        self.chunks: dict[tuple[int, int], Wire] = {}
        self._sums: dict[tuple[int, int], list[tuple[str, int, float]]] = {}
        self.steps: list[effects.Step] = []
        self.merges: list[effects.AggregateAndStep] = []
        self.tunes: list[BrokerConfig] = []
        self.reverted: list[effects.Revert | effects.ForgetBuffer] = []
        for fragment in resumption.wires if resumption else ():
            self._put_back(fragment)

    # What the core asks for.

    def add(self, work: effects.TensorWork | effects.AtOnce) -> None:
        match work:
            case effects.DropInitial(fragments):
                self.queue = deque(w for w in self.queue if not isinstance(w, effects.StoreInitial))
                self.chunks = {
                    at: each for at, each in self.chunks.items() if at[0] not in fragments
                }
            case effects.SetOuterOptimizer(config):
                steps = effects.Step | effects.AggregateAndStep
                assert not any(isinstance(each, steps) for each in self.queue)
                self.tunes.append(config)
            case effects.Revert(fragment):
                self.reverted.append(work)
                self._put_back(fragment)
            case effects.ForgetBuffer():
                self.reverted.append(work)
            case _:
                self.queue.append(work)

    def _put_back(self, fragment: int) -> None:
        if self._resumption is not None:
            for index, wire in enumerate(self._resumption.wires[fragment]):
                self.chunks[fragment, index] = wire

    # Work.

    def do_one(self) -> events.Event:
        work = self.queue.popleft()
        match work:
            case effects.StoreInitial(fragment, index, payload):
                if payload is not None and not payload.is_finite:
                    return events.InitialRefused(work)
                contents = () if payload is None else payload.contents
                self.chunks[fragment, index] = Wire(contents)
                return events.InitialStored(work, self.chunks[fragment, index])
            case effects.Fold() | effects.Inspect():
                if not work.payload.is_finite:
                    return events.WorkRefused(work)
                if isinstance(work, effects.Fold):
                    part = (work.worker_id, work.push_id, work.weight)
                    self._sums.setdefault((work.fragment, work.index), []).append(part)
                return events.WorkDone(work, work.payload.squares, work.payload.fingerprint)
            case effects.Step(fragment, index, weight):
                self.steps.append(work)
                parts = self._sums.pop((fragment, index), [])
                total = sum(part[2] for part in parts)
                assert abs(total - weight) <= 1e-9 * max(1.0, weight), (
                    "the mean is divided by weights that were not added"
                )
                added = tuple((worker, push_id) for worker, push_id, _ in parts)
                return self._added(fragment, index, added)
            case effects.AggregateAndStep(fragment, index, groups):
                self.merges.append(work)
                assert all(p.payloads[index] is not None for group in groups for p in group)
                added = tuple((p.worker_id, p.push_id) for group in groups for p in group)
                return self._added(fragment, index, added)

    def _added(
        self, fragment: int, index: int, added: tuple[tuple[str, int], ...]
    ) -> events.Stepped:
        self.chunks[fragment, index] = Wire(self.chunks[fragment, index].contents + added)
        return events.Stepped(fragment, index, self.chunks[fragment, index])

    # What a checkpoint takes.

    def wires(self, fragment: int) -> list[Any]:
        chunks = self._layout().all[fragment].chunks
        return [self.chunks[fragment, index] for index in range(chunks)]

    def fragment_tensors(self, fragment: int) -> FragmentTensors:
        return FragmentTensors(self.wires(fragment))

    def put_back(self, fragment: int, kept: FragmentTensors) -> None:
        wires: Sequence[Any] = kept.chunks
        for index, wire in enumerate(wires):
            self.chunks[fragment, index] = wire
