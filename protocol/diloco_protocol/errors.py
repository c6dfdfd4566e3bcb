"""The exception hierarchy of the project.

    DilocoError
    |-- UsageError        our fault: a wrong option, an unreadable file, a model that cannot be exchanged
    |-- ProtocolError     the peer's fault: a message that breaks the wire protocol
    |-- Refused           the broker refused; nothing is lost, and `retry` says whether to try again
    `-- Unreachable       no reply from the broker within the timeout

Each has a message of one sentence: what happened, the values, and what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from enum import Enum

LONGEST = 1000  # characters of a message that is sent to a peer


class Code(str, Enum):
    """Error codes for programs; the message of the error is for people."""

    BAD_FRAMES = "bad_frames"  # wrong number or size of frames
    BAD_HEADER = "bad_header"  # not msgpack, not a map, missing or mistyped fields
    PROTOCOL_VERSION = "protocol_version"  # the peer speaks another version
    ID_TAKEN = "id_taken"  # another connected worker has this id
    MODEL_DIFFERS = "model_differs"  # names, shapes, dtypes or order differ
    CONFIG_DIFFERS = "config_differs"  # the worker requires options that the run does not have
    RUN_DIFFERS = "run_differs"  # the worker belongs to another run
    BAD_PUSH = "bad_push"  # a push that cannot belong to this run
    BAD_CHUNK = "bad_chunk"  # wrong index, length, fragment or push
    NON_FINITE = "non_finite"  # NaN or infinity in a pseudo-gradient
    TOO_LARGE = "too_large"  # the norm of a pseudo-gradient exceeds the limit of the run
    LATE = "late"  # the round closed without this push, and late work is dropped
    STALE = "stale"  # the push started from parameters that are too old
    NO_MODEL = "no_model"  # the broker has no parameters yet
    UNKNOWN_ACTION = "unknown_action"  # a control action this broker does not know
    NOT_ALLOWED = "not_allowed"  # this connection may not do that
    STOPPING = "stopping"  # the broker is shutting down
    STANDBY = "standby"  # this is a standby; another broker admits workers


class DilocoError(Exception):
    """Base of all errors raised on purpose by this project."""


class UsageError(DilocoError):
    """Something on our side is wrong: an option, a file, a model. The message says how to fix it."""


class ProtocolError(DilocoError):
    """The peer broke the protocol; the message is sent back to it."""

    def __init__(self, code: Code, sentence: str) -> None:
        # Messages quote values of the peer, which may have megabytes.
        super().__init__(sentence if len(sentence) <= LONGEST else sentence[:LONGEST] + " ... .")
        self.code = code


class Refused(DilocoError):
    """The broker replied with an error. `retry` is True if a later retry may succeed."""

    def __init__(self, code: str, sentence: str, *, retry: bool = False) -> None:
        super().__init__(sentence)
        self.code = code
        self.retry = retry


class Unreachable(DilocoError):
    """No reply from the broker within the timeout."""


def check_names(owner: str, what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise UsageError for an unknown name, and suggest the closest known one.

    Args:
        owner: the object that the name was given to, such as a class.
        what: the kind of name, such as "option".
    """
    for name in given:
        if name not in known:
            raise UsageError(f"{owner} has no {what} {name!r:.80}{did_you_mean(name, known)}")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a sentence about an unknown name: the closest known name, if any."""
    near = get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else "."
