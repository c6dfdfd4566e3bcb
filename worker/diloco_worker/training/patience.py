"""How long we wait, and when to say again that we do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger("diloco.worker")

# Seconds between two words about the same wait.
WORD_S = 30.0
# Seconds that a process which has been told to end gives its pushes to get out.
HASTY_S = 4.0


class Patience:
    """One wait. The first word comes after `first` seconds, the others every `WORD_S`."""

    def __init__(self, clock: Callable[[], float], first: float = WORD_S) -> None:
        self._clock = clock
        self._say_at = clock() + first

    def pause(self, at_most: float = WORD_S) -> float:
        """Seconds to sleep until the next word is due."""
        return max(0.0, min(at_most, self._say_at - self._clock()))

    def say(self, text: str) -> None:
        """Log the sentence if it is time to."""
        if self._clock() >= self._say_at:
            self._say_at = self._clock() + WORD_S
            # A warning, since most training scripts configure no logging and nobody should wonder.
            logger.warning("%s", text)


@dataclass(frozen=True)
class Leaving:
    """How long to wait for what is in flight: until then, which is so many seconds in all.

    `hasty`: only for the chunks to be in.
    """

    until: float
    limit: float
    hasty: bool
