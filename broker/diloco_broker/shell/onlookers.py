"""What is done for those who look on (feed, history, audit): no failure of it ends a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("diloco.broker")

# A failure that comes again with each snapshot would fill the log.
SAID_AGAIN_AFTER_S = 60.0


class Onlookers:
    """Runs what is done for them; an exception is logged, each kind at most once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_at: dict[str, float] = {}

    @contextmanager
    def spared(self, what: str) -> Iterator[None]:
        """In here any exception ends only what is done in here, which is `what`."""
        try:
            yield
        except Exception:
            now = self._clock()
            if now - self._said_at.get(what, -SAID_AGAIN_AFTER_S) >= SAID_AGAIN_AFTER_S:
                self._said_at[what] = now
                logger.exception("The %s failed; training goes on without it.", what)
