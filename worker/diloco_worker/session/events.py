"""What can happen to a worker's session: frozen records in the terms of docs/specification.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diloco_protocol.messages import Chunk, Control, Message, Push
from diloco_worker.session.compatibility import Terms
from diloco_worker.session.connection import Owners
from diloco_worker.session.downloads import Held


class Event:
    """Something happened."""


# From the sockets.


@dataclass(frozen=True)
class Start(Event):
    """Open the connections. There may be several addresses to try."""

    places: int = 1


@dataclass(frozen=True)
class Connected(Event):
    """The control connection is up."""


@dataclass(frozen=True)
class Disconnected(Event):
    """One of the two connections broke, which voids the other."""

    reason: str


@dataclass(frozen=True)
class Unreached(Event):
    """An attempt to connect failed. The shell retries the same address by itself."""


@dataclass(frozen=True)
class LockedOut(Event):
    """The broker rejected this worker's key, or its lack of one."""

    reason: str


@dataclass(frozen=True)
class Received(Event):
    """A message from the broker. The shell keeps the buffer of a chunk, which has the right size."""

    message: Message


@dataclass(frozen=True)
class ArrivedElsewhere(Event):
    """Another process of this worker received a chunk of a version, and keeps it."""

    chunk: Chunk


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed."""


# From the training thread.


@dataclass(frozen=True)
class Offer(Event):
    """Push a frozen pseudo-gradient, and request the version that contains it.

    The session fills in `push.session`. An unfinished push of the fragment is abandoned.
    """

    push: Push


@dataclass(frozen=True)
class RequestVersion(Event):
    """Request the newest version of a fragment, or with `after` one whose counter is above it."""

    fragment: int
    after: int | None = None


@dataclass(frozen=True)
class Observe(Event):
    """An observer knows the model and the configuration, and can pull."""

    terms: Terms


@dataclass(frozen=True)
class Resume(Event):
    """Resume from a checkpoint; before the first welcome.

    Its versions are compared with the broker's: each fragment is delivered once, `unchanged` where the
    broker's is the same or older. Or all of it is discarded (`ForgetCheckpoint`), and the worker joins
    as a new one.
    """

    terms: Terms
    held: Mapping[int, Held]  # by fragment with chunks, including the frozen one


@dataclass(frozen=True)
class ShareOut(Event):
    """The chunks of the model are shared out among the processes of this worker.

    `terms`: those that the leader has joined on, for the other processes.
    """

    owners: Owners
    terms: Terms | None = None


@dataclass(frozen=True)
class Prepared(Event):
    """The chunks of a seeding push are laid out."""

    push_id: int


@dataclass(frozen=True)
class Followed(Event):
    """A chunk that came as a difference has the right checksum."""

    fragment: int


@dataclass(frozen=True)
class Spoilt(Event):
    """A chunk that came as a difference has the wrong checksum: the held copy differs."""

    fragment: int


@dataclass(frozen=True)
class FrozenNamed(Event):
    """The tag of the model's own frozen parameters; None where it is unknown, so they are fetched."""

    tag: int | None


@dataclass(frozen=True)
class VerifyPushes(Event):
    """A previous incarnation may have pushed what is in the model of this fragment.

    `known`: the pushes of this worker that were taken into account; see `previous_incarnation`.
    """

    fragment: int
    known: frozenset[int]


@dataclass(frozen=True)
class Ask(Event):
    """Send a control action; the result is an `Answered`."""

    control: Control


@dataclass(frozen=True)
class Withdraw(Event):
    """Ignore the answer; do not send the action if it is not sent yet."""

    request: int


@dataclass(frozen=True)
class TakeUnits(Event):
    """Request units of a data set; the fields are those of `Take`, the answer is an `Answered`."""

    request: int
    name: str
    size: int
    epochs: int
    seed: int | None
    count: int


@dataclass(frozen=True)
class UnitsTrained(Event):
    """The last optimizer step trained on these units of a data set."""

    name: str
    begun: tuple[int, ...]  # tickets; those that also ended included
    ended: tuple[int, ...]  # of which it was the last step


@dataclass(frozen=True)
class StepsLost(Event):
    """The steps since each fragment's last freeze are out of the model, in no push."""


@dataclass(frozen=True)
class BeatNow(Event):
    """Send a heartbeat now."""


@dataclass(frozen=True)
class Depart(Event):
    """Leave the run, and end the session."""

    reason: str = ""
