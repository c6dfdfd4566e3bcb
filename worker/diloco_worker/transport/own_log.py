"""Prints the worker's log lines where the application has configured no logging.

`logging` itself would print warnings only. Our handler prints lines from level info on stderr, until
the application has its own handler. DILOCO_LOG sets the level of the worker's logger in both
cases.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from diloco_protocol import UsageError

logger = logging.getLogger("diloco.worker")

VARIABLE = "DILOCO_LOG"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 10,
}


def asked_level(environ: Mapping[str, str] | None = None) -> int | None:
    """The level in DILOCO_LOG; None where it is not set. Raises UsageError."""
    text = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    if not text:
        return None
    if text.lower() not in LEVELS:
        raise UsageError(f"{VARIABLE} is {text!r:.80}; it must be one of {', '.join(LEVELS)}.")
    return LEVELS[text.lower()]


class _OwnHandler(logging.Handler):
    """Prints to the current stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.level_after = logging.NOTSET  # of the logger, once the application has handlers
        self.setFormatter(logging.Formatter("%(asctime)s diloco: %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # In one write, so that no other process's output comes between a line and its end.
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001  as handlers of `logging` do
            self.handleError(record)


_handler = _OwnHandler()


def _stands_back(record: logging.LogRecord) -> bool:
    """A filter of the logger: removes our handler and its level once the application has handlers."""
    if _has_other_handlers():
        logger.removeHandler(_handler)
        logger.removeFilter(_stands_back)
        logger.setLevel(_handler.level_after)
    return record.levelno >= logger.getEffectiveLevel()


def _has_other_handlers() -> bool:
    """Whether the application handles the logger's records."""
    place: logging.Logger | None = logger
    while place is not None:
        if any(each is not _handler for each in place.handlers):
            return True
        place = place.parent if place.propagate else None
    return False


def speak(*, leads: bool = True) -> None:
    """Print this worker's log. `leads`: False for the other processes of a worker, which print only
    warnings.
    """
    asked = asked_level()
    level = logging.INFO if asked is None else asked
    if not leads:
        level = max(level, logging.WARNING)
    if _handler in logger.handlers or (
        logger.level == logging.NOTSET and not _has_other_handlers()
    ):
        if _handler not in logger.handlers:
            logger.addHandler(_handler)
            logger.addFilter(_stands_back)
        _handler.level_after = logging.NOTSET if asked is None else level
        logger.setLevel(level)
    elif asked is not None:
        logger.setLevel(level)
