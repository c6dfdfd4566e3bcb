"""Every error of the project, in one tree.

    DilocoError
    |-- UsageError        ours: a wrong option, an unreadable file, a model that cannot be exchanged
    |-- ProtocolError     the peer's: a message that breaks the wire protocol
    |-- Refused           the broker said no; nothing was lost, `retry` says whether waiting can help
    `-- Unreachable       no sign of life from the broker within the time allowed

Each carries one sentence that says what happened, with which values, and what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from enum import Enum

LONGEST = 1000  # characters of a sentence that is sent back


class Code(str, Enum):
    """What went wrong, for programs; the sentence beside it is for people."""

    BAD_FRAMES = "bad_frames"  # wrong number or size of frames
    BAD_HEADER = "bad_header"  # not msgpack, not a map, missing or mistyped fields
    PROTOCOL_VERSION = "protocol_version"  # the peer speaks another version
    ID_TAKEN = "id_taken"  # another live worker has this id
    MODEL_DIFFERS = "model_differs"  # names, shapes, dtypes or order differ
    CONFIG_DIFFERS = "config_differs"  # the worker asks for what the broker does not run
    RUN_DIFFERS = "run_differs"  # the worker belongs to another run
    BAD_PUSH = "bad_push"  # a push that cannot belong to this run
    BAD_CHUNK = "bad_chunk"  # wrong index, length, fragment or push
    NON_FINITE = "non_finite"  # NaN or infinity in a pseudo-gradient
    TOO_LARGE = "too_large"  # a pseudo-gradient that is longer than the run takes
    LATE = "late"  # the round closed without this push, and late work is dropped
    STALE = "stale"  # the push started from parameters that are too old
    NO_MODEL = "no_model"  # no worker has provided parameters yet
    UNKNOWN_ACTION = "unknown_action"  # a control action this broker does not know
    NOT_ALLOWED = "not_allowed"  # this connection may not do that
    STOPPING = "stopping"  # the broker is shutting down
    STANDBY = "standby"  # this is a standby, and another broker lets workers in


class DilocoError(Exception):
    """Base of all errors raised on purpose by this project."""


class UsageError(DilocoError):
    """Something on our side is wrong: an option, a file, a model. Says how to mend it."""


class ProtocolError(DilocoError):
    """The peer sent something that breaks the protocol; the sentence is sent back to it."""

    def __init__(self, code: Code, sentence: str) -> None:
        # Sentences quote what the peer sent, which may be megabytes of it.
        super().__init__(sentence if len(sentence) <= LONGEST else sentence[:LONGEST] + " ... .")
        self.code = code


class Refused(DilocoError):
    """The broker answered with an error. `retry` is True where waiting and asking again can help."""

    def __init__(self, code: str, sentence: str, *, retry: bool = False) -> None:
        super().__init__(sentence)
        self.code = code
        self.retry = retry


class Unreachable(DilocoError):
    """No sign of life from the broker within the time allowed."""


def check_names(owner: str, what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise UsageError for a name that is not known, with the nearest that is.

    Args:
        owner: what it is given to, such as the name of a class.
        what: what it should be there, such as "option".
    """
    for name in given:
        if name not in known:
            raise UsageError(f"{owner} has no {what} {name!r:.80}{did_you_mean(name, known)}")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """How a sentence about an unknown name ends: with the nearest known one, if there is one."""
    near = get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else "."
