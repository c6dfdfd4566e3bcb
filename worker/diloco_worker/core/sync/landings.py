"""How flights end: the model is brought in line, and what has come of them is written down."""

from __future__ import annotations

from diloco_protocol import Code
from diloco_worker.core.sync.effects import (
    Failed,
    Land,
    PushEnded,
    RequestVersion,
    Steps,
    Trouble,
)
from diloco_worker.core.sync.flights import Flight, Landing, MergeRule, Outcome
from diloco_worker.core.sync.fragment import Fragment
from diloco_worker.core.sync.lines import SyncLines
from diloco_worker.core.sync.metrics import SyncMetrics
from diloco_worker.core.sync.news import Arrival
from diloco_worker.core.sync.work import WorkCounter


class Landings:
    """See the head of this module.

    Args:
        merge: when a merge comes late.
        metrics: rounds, rejections and late merges are counted in them.
        work: what was done since the last freeze begins anew where steps are given up.
        lines: is told of each push that counts.
    """

    def __init__(
        self,
        worker_id: str,
        *,
        merge: MergeRule,
        metrics: SyncMetrics,
        work: WorkCounter,
        lines: SyncLines,
    ) -> None:
        self._worker_id = worker_id
        self._merge = merge
        self._metrics = metrics
        self._work = work
        self._lines = lines
        self._failures: dict[int, str] = {}  # by fragment, what was said of it

    def settle(
        self, fragment: Fragment, step: int, *, now: bool = False, touch_model: bool = True
    ) -> Steps[Outcome]:
        """Bring the model in line with what has come for a fragment. Never waits.

        Memory that runs out in it must not end the training: the outcome is FAILED, and the next look
        goes on where this one was broken off.

        Args:
            step, now, touch_model: as of `Fragment.next_landing`.
        """
        landing = fragment.next_landing(step, now=now, touch_model=touch_model)
        if landing is not None and landing.touches_model:
            failed = yield Land(fragment.number, landing, step)
            if isinstance(failed, Failed):
                yield from self._has_failed(fragment, failed)
                return Outcome.FAILED
        self._failures.pop(fragment.number, None)
        if landing is None:
            return Outcome.NOTHING
        fragment.landed(landing)
        yield from self._write_down(fragment, landing, step)
        return landing.outcome

    def _has_failed(self, fragment: Fragment, failed: Failed) -> Steps[None]:
        if not failed.is_torn:
            fragment.landing = None
        text = (
            f"The model could not take in what came for fragment {fragment.number}: {failed.error!r}. "
            "It is tried again after each step, and what is in flight counts once."
        )
        if self._failures.get(fragment.number) != text:
            self._failures[fragment.number] = text
            yield Trouble(text, failed.error)

    def _write_down(self, fragment: Fragment, landing: Landing, step: int) -> Steps[None]:
        flight, arrival, rejection = landing.flight, landing.arrival, landing.rejection
        match landing.outcome:
            case Outcome.COUNTED:
                assert flight is not None and arrival is not None
                if landing.touches_model and not landing.is_load:
                    late_after = flight.wait_at if self._merge.is_auto else flight.apply_at
                    self._metrics.late_merges += step > late_after
                yield from self._has_counted(fragment, flight, arrival, step)
            case Outcome.SUPERSEDED:
                assert arrival is not None
                yield from self._is_superseded(fragment, flight, arrival, step)
            case Outcome.REJECTED:
                assert flight is not None and rejection is not None
                self._metrics.rejected += 1
                yield PushEnded(flight.push_id, fragment.number, why=rejection.code)
                if rejection.code in (Code.LATE, Code.STALE):
                    # Newer parameters are there: local moves onto them as soon as they have come.
                    yield RequestVersion(fragment.number)
                    yield Trouble(
                        f"The pseudo-gradient of {flight.steps} steps was dropped: "
                        f"{rejection.text} The model moves on to the newest global parameters."
                    )
                else:
                    yield Trouble(
                        "The broker dropped the last pseudo-gradient; the model is back at the "
                        "global parameters it started from, and takes part again at the next "
                        "boundary."
                    )

    def _has_counted(
        self, fragment: Fragment, flight: Flight, arrival: Arrival, step: int
    ) -> Steps[None]:
        self._metrics.rounds += 1
        self._metrics.staleness = fragment.staleness
        self._metrics.merge_delay = step - flight.began
        yield PushEnded(flight.push_id, fragment.number, arrival.version)
        self._lines.counted(flight, arrival, fragment.staleness, step)

    def _is_superseded(
        self, fragment: Fragment, flight: Flight | None, arrival: Arrival, step: int
    ) -> Steps[None]:
        """The model has given up what was made since the fragment's base."""
        steps = self._work.since(fragment.number, step).steps
        self._work.restart(fragment.number, step)
        if flight is not None:
            ledger = arrival.released.ledger
            if ledger.names_whole(self._worker_id, flight.push_id):
                yield from self._has_counted(fragment, flight, arrival, step)
            else:
                steps += flight.steps
                yield PushEnded(flight.push_id, fragment.number, why="superseded")
        yield Trouble(
            f"{steps} steps of fragment {fragment.number} are left out, so that nothing counts "
            f"twice: {arrival.superseding}. The model goes on from version {arrival.version}."
        )
