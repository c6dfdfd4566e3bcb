"""Saying what a process of a worker waits for, where the others may never come."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("diloco.worker")

# Seconds that it waits for the others before it says so.
SAYS_AFTER_S = 30.0


@contextmanager
def said_when_long(deed: str) -> Iterator[None]:
    """The others may wait for this one elsewhere, in a collective of the script, unseen from here."""
    text = f"{deed} waits for the other processes of this worker. Call it in all, at the same step."
    timer = threading.Timer(SAYS_AFTER_S, logger.warning, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
