"""A worker that has joined: what its hook does after each step and what its script asks for.

The boundary (`sync.boundary`) decides, and acts through the ports of this process (`ports`):
those of a process by itself, of one of several ranks (`group.ports`), or of one of several workers that
the same thread steps (`in_turn`). Belongs to the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, TypeVar

from diloco_protocol import UsageError
from diloco_protocol.chunks import FragmentLayout
from diloco_worker.in_turn import Turns
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.spread.ranks import FORCE, LOAD, SAVE, STEP
from diloco_worker.ports import LocalPorts
from diloco_worker.saved_state import Plain, Resumption, SavedFragment, to_plain
from diloco_worker.session.downloads import Held
from diloco_worker.settings import Settings
from diloco_worker.sync import boundary
from diloco_worker.sync.fragment import TrainingBase
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.sync.patience import Options
from diloco_worker.sync.ports import finish
from diloco_worker.sync.resumption import resume
from diloco_worker.sync.state import SyncState

logger = logging.getLogger("diloco.worker")

T = TypeVar("T")


@dataclass(eq=False, repr=False, kw_only=True)
class Driver:
    """What the hook drives, once it has joined and the run's parameters are here."""

    worker_id: str
    ports: LocalPorts
    settings: Settings
    metrics: SyncMetrics  # what happens is counted in them
    step: InitVar[int]  # optimizer steps so far
    cycle_start: InitVar[int]  # those when the cycle of slots began
    resumption: InitVar[Resumption | None]  # what to go on from; the model is as it was then
    turns: Turns | None = None  # the workers of this process that are stepped in turn
    state: SyncState = field(init=False)  # what the boundary decides by
    has_left: bool = False

    def __post_init__(self, step: int, cycle_start: int, resumption: Resumption | None) -> None:
        ports, terms = self.ports, self.ports.link.terms
        assert terms is not None
        layout = terms.layout
        self._frozen = self._take_frozen(layout.frozen)
        arrivals = ports.take([part.fragment for part in layout.fragments])
        if resumption is not None:
            saved = resumption.fragments
        else:
            values = [ports.values_of(each) for each in arrivals]
            bases = [TrainingBase(each.version, each.released.ledger) for each in arrivals]
            saved = tuple(
                SavedFragment(base, each)
                for base, each in zip(bases, values, strict=True)
                if each is not None
            )
            for each in saved:
                ports.tensors.put(each.values)
        ports.stand_on(saved, layout, terms.config)
        self.state = SyncState(
            worker_id=self.worker_id,
            ports=ports,
            link=ports.link_state(),
            options=Options(
                **{each.name: getattr(self.settings, each.name) for each in fields(Options)}
            ),
            chunks=[part.chunks for part in layout.fragments],
            bases=[each.base for each in saved],
            totals=ports.read_reports(),
            step=step,
            cycle_start=cycle_start,
            metrics=self.metrics,
        )
        if resumption is None:
            finish(boundary.poll(self.state))
        else:
            finish(resume(self.state, resumption.place, cycle_start, arrivals))
        if self.turns is not None:
            self.turns.join(self.worker_id, self.state)

    def _take_frozen(self, part: FragmentLayout) -> Held | None:
        """Put the frozen parameters into the model, which keeps the only copy; returns their version."""
        if not part.chunks:
            return None
        (arrival,) = self.ports.take([part.fragment])
        values = self.ports.values_of(arrival)
        if values is not None:  # else the script has loaded them
            self.ports.tensors.put(values)
        self.ports.set_base(part.fragment, None)
        return Held(arrival.version, arrival.released.ledger)

    def saved(self) -> Plain | None:
        """Parameters and deltas for the checkpoint of a script.

        None, with a warning, while a merge is broken off, or once the model has changed so much that the
        run's tensors are not in it.
        """
        state, ports, terms = self.state, self.ports, self.ports.link.terms
        assert terms is not None
        ports.meet(SAVE)
        try:
            problem = "A merge was interrupted; save again after the next step."
            sums = None if state.is_partial else ports.checksums()
        except UsageError as error:  # a script that saves must not end by it
            problem, sums = str(error), None
        if sums is None:
            logger.warning(
                "%s Until then the worker's state does not contain the parameters: a worker that "
                "resumes from it begins with the run's.",
                problem,
            )
            return None
        fragments = tuple(
            SavedFragment(
                base,
                each.base,
                None if base.in_flight is None else each.delta,
                each.saved_feedback,
            )
            for base, each in zip(
                state.training_bases(ports.read_reports()), ports.fragments, strict=True
            )
        )
        place = state.schedule.place
        resumption = Resumption(state.worker_id, terms, place, self._frozen, fragments, sums)
        return ports.to_save(to_plain(resumption, ports.tensors.manifest))

    @property
    def bases(self) -> list[FlatState]:
        """Of each fragment, the values of the version that training stands on."""
        return [each.base for each in self.ports.fragments]

    # What the hook calls.

    def after_step(self, step: int) -> None:
        """An optimizer step has been taken. Returns when training may go on."""
        self.ports.meet(STEP)
        self.ports.reports.read(self.ports.clock())
        self._run(lambda: boundary.after_step(self.state, step))

    def force(self) -> bool:
        """Make the boundary now. Returns whether the delta is in a version."""
        if self.has_left:
            return False
        self.ports.meet(FORCE)
        return bool(self._run(lambda: boundary.force(self.state)))

    def load(self) -> bool:
        """Put the newest version into the model; False where it does not arrive."""
        if self.has_left:
            return False
        self.ports.meet(LOAD)
        if self.turns is not None:
            self.turns.steps_here(self.state)
        return finish(boundary.load(self.state))

    def leave(self, *, hasty: bool) -> None:
        """Wait for what is in flight."""
        self.has_left = True
        if self.turns is not None:
            hasty = self.turns.leave(self.state) or hasty
        self.ports.leave(lambda: finish(boundary.leave(self.state, hasty=hasty)), hasty=hasty)

    def _run(self, steps: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Run a boundary; None where its end is put off until other workers of this thread pushed."""
        return finish(steps()) if self.turns is None else self.turns.run(self.state, steps)
