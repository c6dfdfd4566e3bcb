"""What can happen to a worker's session: frozen records in the words of docs/specification.md.

The I/O thread makes them of what its sockets and the training thread tell it.
"""

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
    """Begin: open the connections. There may be several addresses to try."""

    places: int = 1


@dataclass(frozen=True)
class Connected(Event):
    """The control connection is up."""


@dataclass(frozen=True)
class Disconnected(Event):
    """One of the two connections broke; the other is worth nothing now."""

    reason: str


@dataclass(frozen=True)
class Unreached(Event):
    """An attempt to connect has failed. The shell goes on trying at the same address by itself."""


@dataclass(frozen=True)
class LockedOut(Event):
    """The broker has no connection with this worker's key, or with a worker that has none."""

    reason: str


@dataclass(frozen=True)
class Received(Event):
    """A message from the broker. Of a chunk, the shell keeps the buffer (already of the right size)."""

    message: Message


@dataclass(frozen=True)
class ArrivedElsewhere(Event):
    """Another process of this worker has a chunk of a version, which it keeps."""

    chunk: Chunk


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed."""


# From the training thread.


@dataclass(frozen=True)
class Offer(Event):
    """A frozen pseudo-gradient is to be pushed, and the version that contains it is wanted.

    `push.session` is filled in by the session. An unfinished push of the fragment is abandoned.
    """

    push: Push


@dataclass(frozen=True)
class RequestVersion(Event):
    """The newest version of a fragment is wanted, whatever it contains.

    With `after` set only one whose counter is above it; the answer may then take a round.
    """

    fragment: int
    after: int | None = None


@dataclass(frozen=True)
class Observe(Event):
    """An observer has learnt the model and the configuration, and can pull."""

    terms: Terms


@dataclass(frozen=True)
class Resume(Event):
    """Go on from a checkpoint; before the first welcome.

    Its versions are compared with the broker's: each fragment is delivered once, `unchanged` where the
    broker's is the same or older. Or all of it is forgotten (`ForgetCheckpoint`), and it joins as a new
    worker.
    """

    terms: Terms  # how the run was trained and the model cut
    held: Mapping[int, Held]  # by fragment; of each that has chunks, the frozen one included


@dataclass(frozen=True)
class ShareOut(Event):
    """The chunks of the model are shared out among the processes of this worker."""

    owners: Owners


@dataclass(frozen=True)
class Prepared(Event):
    """The chunks of a donation are laid out and can be sent."""

    push_id: int


@dataclass(frozen=True)
class Followed(Event):
    """A chunk that came as a difference comes to what it must."""

    fragment: int


@dataclass(frozen=True)
class Spoilt(Event):
    """A chunk that came as a difference does not come to what it must: the copy held here is another."""

    fragment: int


@dataclass(frozen=True)
class FrozenNamed(Event):
    """The tag that a version of the model's own frozen parameters has; see `NameFrozen`.

    None where it cannot be worked out: then they are fetched as by who has none.
    """

    tag: int | None


@dataclass(frozen=True)
class VerifyPushes(Event):
    """A previous incarnation of this worker may have sent what is in the model of this fragment.

    `known` are the pushes of this worker that have been taken into account; see `previous_life`.
    """

    fragment: int
    known: frozenset[int]


@dataclass(frozen=True)
class Ask(Event):
    """Send a control action; the result comes back as `Answered`."""

    control: Control


@dataclass(frozen=True)
class Withdraw(Event):
    """Nobody waits for this answer any more; do not send the action if it has not been."""

    request: int


@dataclass(frozen=True)
class TakeUnits(Event):
    """Units of a data set are wanted; the fields are those of `Take`, the answer is an `Answered`."""

    request: int
    name: str
    size: int
    epochs: int
    seed: int | None
    count: int


@dataclass(frozen=True)
class UnitsTrained(Event):
    """The optimizer step that was just taken has trained on these units of a data set."""

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
    """Tell the broker that this worker leaves. The end of the session."""

    reason: str = ""
