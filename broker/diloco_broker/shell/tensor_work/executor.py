"""Executes the tensor work of the core, one chunk at a time.

With several threads, independent work runs in parallel within one call of the loop, which waits for it.
So only the loop's thread changes state, and the results are bit for bit those of a single thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.core.versions.record import Resumption
from diloco_broker.shell.tensor_work.queue import WorkQueue
from diloco_broker.shell.tensor_work.threads import TensorThreads
from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_broker.storage.resume import load_into, put_back
from diloco_broker.tensors import memory
from diloco_broker.tensors.fingerprint import fingerprint_of
from diloco_broker.tensors.outer.make import Outer, make_outer, share_of
from diloco_broker.tensors.outer.torch_optim import TorchOuter
from diloco_broker.tensors.parameters import Parameters
from diloco_broker.tensors.piece import Piece
from diloco_protocol.chunks import ModelLayout
from diloco_protocol.feed import OuterGroup
from diloco_protocol.version import digest_of

# Work, and a function that makes the events from its result.
Telling = tuple[Piece[Any], Callable[[Any], Iterable[events.Event]]]


class TensorExecutor:
    """Queues and executes tensor work. Belongs to the loop's thread.

    Raises UsageError if the outer optimizer cannot continue from the checkpoint.
    """

    def __init__(
        self,
        config: BrokerConfig,
        outer: Outer,
        initial: Mapping[str, Tensor] | None,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._config = config
        self._outer = outer
        self.initial = initial  # tensors of the model file by name, until the run has its own copy
        self._checkpoint = checkpoint
        self._queue = WorkQueue()
        self._threads = TensorThreads(config.tensor_threads)
        self._lent: deque[tuple[Telling, Any]] = deque()  # run, not finished
        self._done: deque[events.Event] = deque()  # results of finished work, not yet returned
        self._parameters: Parameters | None = None
        self.resumption: Resumption | None = None  # the core's part of the checkpoint
        if checkpoint is not None:
            layout = checkpoint.layout
            self.resumption = load_into(self.of(layout), checkpoint, layout)

    def __bool__(self) -> bool:
        """Whether work is queued."""
        return bool(self._queue)

    def add(self, work: effects.TensorWork | effects.AtOnce) -> None:
        if not isinstance(work, effects.AtOnce):
            self._queue.add(work)
            return
        self._finish_all()
        match work:
            case effects.SetOuterOptimizer(config, own):
                self._tune(config, own)
            case effects.Revert(fragment):
                self._revert(fragment)
            case effects.DropInitial(fragments):
                self._queue.add(work)
                self._drop(fragments)
            case effects.ForgetBuffer(fragment):
                assert self._parameters is not None
                self._parameters.forget_buffer(fragment)

    def _tune(self, config: BrokerConfig, own: Mapping[str, float]) -> None:
        """Change settings of the outer optimizer, which keeps its state."""
        assert not any(
            isinstance(work, effects.Step | effects.AggregateAndStep) for work in self._queue
        )
        self._config = config
        if not isinstance(self._outer, TorchOuter):
            self._outer = make_outer(config)
        if self._parameters is not None:
            self._parameters.tune(self._outer, share_of(config), own, config.outer_schedule)

    def outer_groups(self) -> tuple[OuterGroup, ...]:
        """Current parameter groups of a torch optimizer, over all fragments."""
        return () if self._parameters is None else self._parameters.outer_groups()

    def of(self, layout: ModelLayout | None) -> Parameters:
        """The tensors of this model, which are recreated if the model was replaced before the start."""
        assert layout is not None
        if self._parameters is None or self._parameters.layout is not layout:
            config = self._config
            self._parameters = Parameters(
                layout,
                self._outer,
                wire=config.wire_dtype,
                reply=config.reply_dtype,
                aggregate=config.aggregate,
                trim=config.trim,
                share=share_of(config),
                is_round=mode_of(config).has_rounds,
                initial=self.initial,
                schedule=config.outer_schedule,
            )
        return self._parameters

    def do_some(self, layout: ModelLayout | None) -> Iterator[events.Event]:
        """Do the next work, and yield the results in its order.

        It takes as many pieces as the threads can do at a time. A step of entire tensors yields all its
        results with its last chunk. When an event is yielded, its result is in the parameters; later
        results are not, unless a reader needed them.
        """
        pieces = self._next_pieces(self.of(layout))
        found = self._threads.run([piece.run for piece, _ in pieces])
        self._lent.extend(zip(pieces, found, strict=True))
        while self._lent or self._done:
            if not self._done:
                self._finish_one()
            while self._done:
                yield self._done.popleft()

    def _next_pieces(self, tensors: Parameters) -> list[Telling]:
        """Take work that can run in parallel because it is independent; at least one piece."""
        pieces: list[Telling] = []
        touched: set[tuple[int, int]] = set()  # fragment, index
        for fragment, index, adding_up in tensors.overdue():
            touched.add((fragment, index))
            pieces.append((adding_up, lambda _: ()))
        for _ in range(self._threads.at_a_time):
            if pieces and (not self._queue or _must_wait(self._queue.peek(), touched)):
                break
            work = self._queue.take()
            touched.add((work.fragment, work.index))
            pieces.append(_piece_of(work, tensors))
            if isinstance(work, effects.StoreInitial):
                break
        return pieces

    def _finish_one(self) -> None:
        (piece, tell), found = self._lent.popleft()
        self._done += tell(piece.finish(found))

    def _finish_all(self) -> None:
        """Apply the results of work that has run."""
        while self._lent:
            self._finish_one()

    def close(self) -> None:
        self._threads.close()
        memory.release()

    def _drop(self, fragments: Sequence[int]) -> None:
        """Free the memory of stored initial chunks; `_revert` restores those of a checkpoint later."""
        if self._parameters is not None and not self._parameters.drop(fragments):
            self._parameters = None

    def _revert(self, fragment: int) -> None:
        """Restore a fragment from the checkpoint, if any."""
        if self._checkpoint is not None:
            assert self.resumption is not None
            tensors = self.of(self.resumption.layout)
            put_back(tensors, fragment, self._checkpoint)

    def forget_sources(self) -> None:
        """Release the tensors of the model file and the checkpoint: the run has its own copy."""
        self._checkpoint = None
        self.resumption = None
        if self.initial is not None and self._parameters is not None:
            self.initial = None
            self._parameters.forget_initial()


def _must_wait(work: effects.TensorWork, touched: Container[tuple[int, int]]) -> bool:
    """Whether work must wait for other work on these chunks."""
    if isinstance(work, effects.Step | effects.AggregateAndStep):
        return (work.fragment, work.index) in touched
    return isinstance(work, effects.StoreInitial)


def _piece_of(work: effects.TensorWork, tensors: Parameters) -> Telling:
    match work:
        case effects.Fold(fragment, index, _, _, weight, dtype, payload):
            folding = tensors.fold(fragment, index, payload, weight, dtype)
            return folding, lambda squares: (looked_at(work, squares),)
        case effects.Inspect(fragment, index, _, _, dtype, payload):
            inspecting = tensors.inspect(fragment, index, payload, dtype)
            return inspecting, lambda squares: (looked_at(work, squares),)
        case effects.Step(fragment, index, weight, count):
            return tensors.step(fragment, index, weight, count), tuple
        case effects.AggregateAndStep(fragment, index, groups, count):
            return tensors.merge(fragment, index, groups, count, work.wholes), tuple
        case effects.StoreInitial():
            placing = Piece(lambda: None, lambda _: _stored(work, tensors))
            return placing, lambda event: (event,)


def _stored(work: effects.StoreInitial, tensors: Parameters) -> events.Event:
    wire = tensors.place(work.fragment, work.index, work.payload)
    if wire is None:
        return events.InitialRefused(work)
    is_frozen = work.fragment == tensors.layout.frozen.fragment
    return events.InitialStored(work, wire, digest_of([wire]) if is_frozen else b"")


def looked_at(
    work: effects.Fold | effects.Inspect, squares: float | None
) -> events.WorkDone | events.WorkRefused:
    """The event for an inspected chunk; `squares` is None if a value is not finite."""
    if squares is None:
        return events.WorkRefused(work)
    # Zeros and buffers do not depend on a worker's data, so they have no fingerprint.
    return events.WorkDone(
        work, squares, fingerprint_of(work.index, work.payload) if squares else 0
    )
