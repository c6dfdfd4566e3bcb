"""How flights end: the model is brought in line, and what has come of them is written down.

Belongs to the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from diloco_protocol import Code
from diloco_worker.core.sync.metrics import SyncMetrics
from diloco_worker.core.sync.news import Arrival
from diloco_worker.shell.link import Link
from diloco_worker.training.fragment_sync import Flight, FragmentExchange, Landing, Outcome
from diloco_worker.training.push_log import Audit
from diloco_worker.training.sync_lines import SyncLines
from diloco_worker.training.tally import Tally

logger = logging.getLogger("diloco.worker")


class Landings:
    """See the head of this module.

    Args:
        counters: rounds, rejections and late merges are counted in them.
        audit: is told of each push that ends.
        tally: what was done since the last freeze begins anew where steps are given up.
        lines: is told of each push that counts.
        trouble: says that something went wrong.
    """

    def __init__(
        self,
        worker_id: str,
        link: Link,
        counters: SyncMetrics,
        audit: Audit,
        tally: Tally,
        lines: SyncLines,
        trouble: Callable[[str], None],
    ) -> None:
        self._worker_id = worker_id
        self._link = link
        self._counters = counters
        self._audit = audit
        self._tally = tally
        self._lines = lines
        self._trouble = trouble
        self._failures: dict[int, str] = {}  # by fragment, what was said of it

    def settle(
        self,
        exchange: FragmentExchange,
        step: int,
        *,
        now: bool = False,
        touch_model: bool = True,
    ) -> Outcome:
        """Bring the model in line with what has come for a fragment. Never waits.

        Memory that runs out in it must not end the training: the outcome is FAILED, and the next look
        goes on where this one was broken off.

        Args:
            step, now, touch_model: as of `FragmentExchange.settle`.
        """
        try:
            landing = exchange.settle(step, now=now, touch_model=touch_model)
        except Exception as error:
            text = (
                f"The model could not take in what came for fragment {exchange.fragment}: {error!r}. "
                "It is tried again after each step, and what is in flight counts once."
            )
            if self._failures.get(exchange.fragment) != text:
                self._failures[exchange.fragment] = text
                logger.debug("The merge that failed:", exc_info=True)
                self._trouble(text)
            return Outcome.FAILED
        self._failures.pop(exchange.fragment, None)
        self._write_down(exchange, landing, step)
        return landing.outcome

    def _write_down(self, exchange: FragmentExchange, landing: Landing, step: int) -> None:
        flight, arrival, rejection = landing.flight, landing.arrival, landing.rejection
        match landing.outcome:
            case Outcome.COUNTED:
                assert flight is not None and arrival is not None
                if landing.change is not None and not landing.is_load:
                    self._counters.late_merges += exchange.is_late(flight, step)
                self._has_counted(exchange, flight, arrival, step)
            case Outcome.SUPERSEDED:
                assert arrival is not None
                self._is_superseded(exchange, flight, arrival, step)
            case Outcome.REJECTED:
                assert flight is not None and rejection is not None
                self._counters.rejected += 1
                self._audit.dropped(flight.push_id, exchange.fragment, rejection.code)
                if rejection.code in (Code.LATE, Code.STALE):
                    # Newer parameters are there: local moves onto them as soon as they have come.
                    self._link.request_version(exchange.fragment)
                    self._trouble(
                        f"The pseudo-gradient of {flight.steps} steps was dropped: "
                        f"{rejection.text} The model moves on to the newest global parameters."
                    )
                else:
                    self._trouble(
                        "The broker dropped the last pseudo-gradient; the model is back at the "
                        "global parameters it started from, and takes part again at the next "
                        "boundary."
                    )

    def _has_counted(
        self, exchange: FragmentExchange, flight: Flight, arrival: Arrival, step: int
    ) -> None:
        self._counters.rounds += 1
        self._counters.staleness = exchange.staleness
        self._counters.merge_delay = step - flight.began
        self._audit.counted(flight.push_id, exchange.fragment, arrival.version)
        self._lines.counted(flight, arrival, exchange.staleness, step)

    def _is_superseded(
        self, exchange: FragmentExchange, flight: Flight | None, arrival: Arrival, step: int
    ) -> None:
        """The model has given up what was made since the fragment's base."""
        steps = self._tally.since(exchange.fragment, step).steps
        self._tally.restart(exchange.fragment, step)
        if flight is not None:
            ledger = arrival.released.ledger
            if ledger.names_whole(self._worker_id, flight.push_id):
                self._has_counted(exchange, flight, arrival, step)
            else:
                steps += flight.steps
                self._audit.dropped(flight.push_id, exchange.fragment, "superseded")
        self._trouble(
            f"{steps} steps of fragment {exchange.fragment} are left out, so that nothing counts "
            f"twice: {arrival.superseding}. The model goes on from version {arrival.version}."
        )
