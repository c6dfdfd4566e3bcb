"""Workers of a simulated run train on units of a data set, one with each step, as long as they get some.

At the end each unit that the broker considers counted must be in the versions once, according to the
steps that were trained for their pushes; and no other unit may be.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from diloco_protocol.data.spans import Spans
from diloco_protocol.messages import Push
from diloco_worker.session.events import TakeUnits, UnitsTrained
from kit.unit_workers import Trained
from simulation.tensors import Violation

if TYPE_CHECKING:
    from simulation.simulator import Simulation
    from simulation.worker import Worker

NAME, SIZE, PREFETCH = "text", 50, 3


class UnitsAtWork:
    """The units of one worker's process."""

    def __init__(self, worker: Worker) -> None:
        self.trained: list[Trained] = []
        self._worker = worker
        self._stock: list[int] = []
        self._request = 0

    def step(self) -> None:
        """An optimizer step has been made: with the next unit that is here, if there is one."""
        answer = self._worker.inbox.results.pop(self._request, None)
        if answer is not None:
            if not answer.ok:
                raise Violation(f"{self._worker.name} gets no units: {answer.text}")
            for start, stop in Spans.read(answer.data["units"]):
                self._stock += range(start, stop)
        if self._stock:
            ticket = self._stock.pop(0)
            self.trained.append(Trained(ticket))
            self._worker.command(UnitsTrained(NAME, (ticket,), (ticket,)))
        elif answer is not None or not self._request:
            self._request += 1
            self._worker.command(TakeUnits(self._request, NAME, SIZE, 0, None, PREFETCH))

    def frozen(self, push: Push) -> None:
        for each in self.trained:
            each.pushes.setdefault(push.fragment, push.push_id)


def times_contained(run: Simulation) -> Counter[int]:
    """How often the versions at the end contain each ticket whole."""
    versions = run.broker.core.state.versions
    pieces = range(run.scenario.config.num_fragments)
    times: Counter[int] = Counter()
    for process in run.processes:
        for each in process.units.trained if process.units else ():
            keys = [(process.worker_id, each.pushes.get(f)) for f in pieces]
            times[each.ticket] += all(
                push_id is not None
                and run.referee.records[worker_id, push_id].is_whole_in(
                    (worker_id, push_id), versions[fragment].wires
                )
                for fragment, (worker_id, push_id) in enumerate(keys)
            )
    return +times


def counted(run: Simulation) -> set[int]:
    """The tickets that the broker considers counted."""
    data = run.broker.core.state.data.sets[NAME]
    open_ = data.uncounted
    return {ticket for ticket in range(data.next) if ticket not in open_}
