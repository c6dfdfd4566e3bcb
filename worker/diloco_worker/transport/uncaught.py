"""Prints our uncaught errors without the frames of libraries.

The exception is changed only when Python is about to print it, so notebooks, debuggers and test runners
see it whole; so does everyone with DILOCO_LOG=debug. A `UsageError` ends the script with exit code 2,
so that a launcher does not restart it in vain.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

import diloco_protocol
from diloco_protocol import UsageError
from diloco_protocol.errors import DilocoError
from diloco_worker.launching import WRONG_USAGE
from diloco_worker.transport.own_log import asked_level

# Names, and folders: a module that `python -m` runs is named `__main__`.
_OURS = ("diloco_worker", "diloco_protocol")
_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]),
    str(Path(diloco_protocol.__file__).parent),
)

P = ParamSpec("P")
T = TypeVar("T")


def shortens_uncaught(function: Callable[P, T]) -> Callable[P, T]:
    """Call `install` before this function."""

    @wraps(function)
    def installing(*arguments: P.args, **keywords: P.kwargs) -> T:
        install()
        return function(*arguments, **keywords)

    return installing


def install() -> None:
    """Print our own uncaught errors without library frames, through the previous hook."""
    previous = sys.excepthook
    if getattr(previous, "is_of_diloco", False):
        return

    def print_shortened(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, DilocoError) and not _wants_all():
            trace = of_the_script(trace)
            error.__suppress_context__, error.__cause__ = True, None
            error.__traceback__ = trace
        previous(kind, error, trace)
        # Not where it was caught and is only printed.
        if isinstance(error, UsageError) and sys.exc_info()[0] is None:
            raise SystemExit(WRONG_USAGE)

    setattr(print_shortened, "is_of_diloco", True)  # noqa: B010  an attribute, to mypy
    sys.excepthook = print_shortened


def _wants_all() -> bool:
    try:
        return asked_level() == logging.DEBUG
    except UsageError:
        return False


def of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback that belong neither to us nor to another library."""
    kept: list[TracebackType] = []
    while trace is not None:
        if not _is_of_library(trace):
            kept.append(trace)
        trace = trace.tb_next
    shortened: TracebackType | None = None
    for each in reversed(kept):
        shortened = TracebackType(shortened, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shortened


def _is_of_library(trace: TracebackType) -> bool:
    frame = trace.tb_frame
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    file = frame.f_code.co_filename
    is_frozen = file.startswith("<frozen")
    return package in _OURS or is_frozen or any(Path(file).is_relative_to(p) for p in _LIBRARIES)
