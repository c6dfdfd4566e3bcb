"""Between work queues and the link: requests units, reports what each optimizer step trained on."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from diloco_protocol import UsageError
from diloco_protocol.data.spans import Spans
from diloco_worker.session.events import TakeUnits, UnitsTrained
from diloco_worker.session.units import FIRST_REQUEST
from diloco_worker.transport.link import Link

logger = logging.getLogger("diloco.worker")

# Seconds between two log lines while the broker hands nothing out.
LOG_INTERVAL_S = 30.0
LOOK_S = 1.0


@dataclass(frozen=True)
class HandedOut:
    """The answer to a request."""

    tickets: tuple[int, ...]
    is_over: bool  # all epochs are counted


class UnitLine:
    """Requests units. `take` may be called from any thread, the rest from training.

    Args:
        is_alone: the worker has no server.
        leads: this process speaks to the broker for its worker.
        is_asked: whether this process is asked to end.
    """

    def __init__(
        self, *, is_alone: bool, leads: bool = True, is_asked: Callable[[], bool] = lambda: False
    ) -> None:
        self.is_alone = is_alone
        self._leads = leads
        self._is_asked = is_asked
        self.link: Link | None = None  # None before the worker has started
        # Arguments of `take` of data sets that were opened before the worker started.
        self._unchecked: list[tuple[str, int, int, int | None]] = []
        self._lock = threading.Lock()  # one request at a time
        self._requests = itertools.count(FIRST_REQUEST)
        # By data set, tickets in training, and those that begin or end with the coming step.
        self._open: dict[str, set[int]] = {}
        self._begun: dict[str, list[int]] = {}
        self._ended: dict[str, list[int]] = {}
        self.has_noted = False  # the coming optimizer step has samples of units

    @property
    def is_stopped(self) -> bool:
        """The worker has left, the run is over, or this process is asked to end."""
        link = self.link
        is_over = link is not None and (link.has_ended or link.stopping is not None)
        return is_over or self._is_asked()

    def open(self, name: str, size: int, epochs: int, seed: int | None) -> None:
        """Check with the broker, or in `started`, that it hands out units of this data set. Raises
        UsageError.
        """
        if self.is_alone or not self._leads:
            return
        if self.link is None:
            self._unchecked.append((name, size, epochs, seed))
        else:
            self.take(name, size, epochs, seed, 0)

    def started(self) -> None:
        """Check the data sets that were opened before. Raises UsageError."""
        for each in self._unchecked:
            self.take(*each, 0)
        self._unchecked = []

    def take(self, name: str, size: int, epochs: int, seed: int | None, count: int) -> HandedOut:
        """Request `count` units; waits for the broker without a limit. None are free: an empty answer.

        Raises UsageError where the broker refuses, or the worker has not started.
        """
        link = self.link
        if link is None:
            raise UsageError(
                f"The work queue {name!r} has no run yet; take from it within the `with` of its worker."
            )
        with self._lock:
            request, waited = next(self._requests), 0.0
            link.tell(TakeUnits(request, name, size, epochs, seed, count))
            while not link.wait_for(lambda: request in link.results, LOOK_S):
                if self.is_stopped:
                    return HandedOut((), True)
                waited += LOOK_S
                if waited % LOG_INTERVAL_S == 0:
                    logger.warning(
                        "Waiting for units of %r for %.0f s; %s.", name, waited, link.describe()
                    )
            with link.condition:
                answer = link.results.pop(request)
        if not answer.ok:
            raise UsageError(f"The broker hands out no units of {name!r}: {answer.text}")
        units = Spans.read(answer.data["units"])
        tickets = tuple(ticket for start, stop in units for ticket in range(start, stop))
        return HandedOut(tickets, bool(answer.data["is_over"]))

    def note(self, name: str, ticket: int, *, is_last: bool) -> None:
        """Samples of this unit are in the coming optimizer step; `is_last`: and in none after it."""
        self.has_noted = True
        opened = self._open.setdefault(name, set())
        if ticket not in opened:
            opened.add(ticket)
            self._begun.setdefault(name, []).append(ticket)
        if is_last:
            opened.discard(ticket)
            self._ended.setdefault(name, []).append(ticket)

    def forget(self, name: str, ticket: int) -> None:
        """Forget a unit that training dropped."""
        self._open.get(name, set()).discard(ticket)

    def is_dropped(self, name: str, ticket: int) -> bool:
        """Whether this unit must not be trained on any more."""
        return self.link is not None and ticket in self.link.dropped_units.get(name, Spans())

    def stepped(self) -> None:
        """An optimizer step was made."""
        begun, ended = self._begun, self._ended
        self._begun, self._ended, self.has_noted = {}, {}, False
        for name in begun.keys() | ended.keys():
            event = UnitsTrained(name, tuple(begun.get(name, ())), tuple(ended.get(name, ())))
            if self.link is not None:
                self.link.tell(event)
