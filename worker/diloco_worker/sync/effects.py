"""What the boundary wants done, and what it is answered.

It is a generator: it yields one effect at a time and goes on with the answer. Whoever carries effects
out may stop in the middle of one (Ctrl-C, an exception) and drop the generator; the next one finds what
the last one had decided.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from diloco_protocol import VersionId
from diloco_protocol.messages import Push
from diloco_worker.session.events import Event
from diloco_worker.session.news import Sight, Work
from diloco_worker.sync.fragment import Flight, Landing


class Effect:
    """Something is to be done."""


# To look, and to wait.


@dataclass(frozen=True)
class Look(Effect):
    """Tell what has come since the last look. Answered with a `Sight`."""


@dataclass(frozen=True)
class Wait(Effect):
    """Wait until something has come or the link stands otherwise. Answered with a `Sight`."""

    seconds: float  # not longer than this


@dataclass(frozen=True)
class StandStill(Effect):
    """The next heartbeat says that training waits."""


@dataclass(frozen=True)
class ReadReports(Effect):
    """Read what the script has reported, also what lies on a device. Answered with `Work`."""


# To the link, besides `RequestVersion`, `VerifyPushes` and `BeatNow` for its session (`session.events`).


@dataclass(frozen=True)
class Offer(Effect):
    """Hand a frozen delta to the link. `is_new`: no earlier life has offered it."""

    flight: Flight
    is_new: bool = True


# To the model.


@dataclass(frozen=True)
class CheckModel(Effect):
    """Warn if the model's tensors are not what they were."""


@dataclass(frozen=True)
class Freeze(Effect):
    """Freeze global minus local. Answered with `Frozen`, or with `NonFinite` where it cannot be sent."""

    push: Push  # the offer, without what only the values tell


@dataclass(frozen=True)
class KeepAnchor(Effect):
    """Training goes on with the delta in flight: remember where the model ceased to wait for it."""

    fragment: int


@dataclass(frozen=True)
class Land(Effect):
    """Bring the model in line. Answered with None, or `Failed`: then the same landing comes again."""

    fragment: int
    landing: Landing
    step: int  # the optimizer step that has just been taken


# To the log.


@dataclass(frozen=True)
class Say(Effect):
    """A line for the log; of level warning where `is_warning`."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class Trouble(Effect):
    """Something went wrong: for the log, and for `last_error`."""

    text: str
    cause: Exception | None = None


@dataclass(frozen=True)
class PushEnded(Effect):
    """For the worker's own record: a push is in this version, or was dropped for a reason."""

    push_id: int
    fragment: int
    version: VersionId | None = None
    why: str = ""


# The answers.


@dataclass(frozen=True)
class Frozen:
    """The delta is frozen."""

    push: Push  # the offer, whole
    reconnections: int  # of the link, by now


@dataclass(frozen=True)
class NonFinite:
    """The delta cannot be sent: this tensor, a parameter or a buffer, has NaN or infinity in it."""

    name: str
    is_buffer: bool = False


@dataclass(frozen=True)
class Failed:
    """The model could not be changed. `is_torn`: a part of it may have been."""

    error: Exception
    is_torn: bool


Answer = Sight | Work | Frozen | NonFinite | Failed | None
T = TypeVar("T")
Steps = Generator[Effect | Event, Answer, T]
