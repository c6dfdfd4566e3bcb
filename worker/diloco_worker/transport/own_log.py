"""What a worker prints where the application has configured no logging: joining, rounds, warnings.

`logging` itself would print warnings only. A handler of ours prints the lines at level info too, on
stderr, until the application has a handler of its own; from then on ours prints nothing. DILOCO_LOG is
the level of the worker's logger in either case.
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
    """The level that DILOCO_LOG names; None where it is not set. Raises UsageError."""
    text = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    if not text:
        return None
    if text.lower() not in LEVELS:
        raise UsageError(f"{VARIABLE} is {text!r:.80}; it must be one of {', '.join(LEVELS)}.")
    return LEVELS[text.lower()]


class _OwnHandler(logging.Handler):
    """Prints on stderr as it is now, which may be another than at first."""

    def __init__(self) -> None:
        super().__init__()
        self.level_after = logging.NOTSET  # of the logger, once the application handles its records
        self.setFormatter(logging.Formatter("%(asctime)s diloco: %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001  as every handler of `logging` does
            self.handleError(record)


_handler = _OwnHandler()


def _stands_back(record: logging.LogRecord) -> bool:
    """A filter of the logger: once the application handles its records, the level is its own again."""
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
    """Let this worker's log be seen.

    Args:
        leads: False for the other processes of a worker: they only print warnings.
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
