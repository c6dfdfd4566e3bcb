"""What a session wants done: frozen records, which the I/O thread carries out in order.

First those about its sockets, then about parameters, then notices to the training thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol import Bitmap, VersionId
from diloco_protocol.messages import Grant, Lane, Message, Notice, Released, Welcome


class Effect:
    """Something is to be done."""


@dataclass(frozen=True)
class Open(Effect):
    """Open two new connections, to this one of the addresses that were given."""

    place: int = 0


@dataclass(frozen=True)
class Close(Effect):
    """Close both connections; what was queued on them is void."""


@dataclass(frozen=True)
class Send(Effect):
    """Send a message, on control unless `bulk`."""

    message: Message
    bulk: bool = False


@dataclass(frozen=True)
class SendChunk(Effect):
    """Send one chunk of a push on a lane, of which 0 is bulk; the shell has its bytes."""

    session: bytes
    push_id: int
    fragment: int
    index: int
    lane: int = 0


@dataclass(frozen=True)
class OpenLanes(Effect):
    """The other processes of this worker open connections for chunks, each with its first word."""

    bindings: tuple[Lane, ...]  # from lane 1 on


@dataclass(frozen=True)
class Beat(Effect):
    """Send a heartbeat; the shell fills in how training stands."""

    session: bytes
    uploading: bool


@dataclass(frozen=True)
class BeginVersion(Effect):
    """Chunks of this version begin to arrive: forget what was assembled of another one."""

    fragment: int
    version: VersionId


@dataclass(frozen=True)
class StoreChunk(Effect):
    """Decode the chunk at hand into the version that is being assembled.

    Where it has `parts` it is what the chunk has more than that of the version held: codes of these
    lengths, whose sum must come to this checksum. The shell answers whether it does: `Followed` or
    `Spoilt`.
    """

    fragment: int
    index: int
    parts: tuple[int, ...] = ()
    checksum: int = 0


@dataclass(frozen=True)
class Deliver(Effect):
    """A version is whole: hand it to the training side, and keep it, since the broker may ask for it."""

    released: Released  # the version, its ledger and round
    counted: int | None  # the push in flight that it contains whole, if any
    unchanged: bool = False  # it is the version held already; nothing was assembled
    # A previous incarnation of this worker has sent what is in the model, and it is in this version. A
    # push that was in flight is over without being counted.
    superseding: bool = False


@dataclass(frozen=True)
class DropParts(Effect):
    """What has been delivered of a first version is of another run than the rest would be."""


@dataclass(frozen=True)
class ForgetCheckpoint(Effect):
    """The checkpoint does not fit the broker's run: nothing of it is held any more."""

    text: str


@dataclass(frozen=True)
class PrepareDonation(Effect):
    """Lay out the parameters of a fragment, fp32, as the chunks of this push.

    The shell answers with `Prepared`, which may take as long as copying a large model.
    """

    push_id: int
    fragment: int


@dataclass(frozen=True)
class NameFrozen(Effect):
    """Work out what a version of the model's own frozen parameters is called.

    The shell answers with `FrozenNamed`, which may take as long as reading a large model.
    """

    fragment: int


@dataclass(frozen=True)
class Joined(Effect):
    """The broker has welcomed this worker (again)."""

    welcome: Welcome
    again: bool


@dataclass(frozen=True)
class JoinRefused(Effect):
    """The broker refuses this worker. `final` before the first welcome; later it is tried again."""

    code: str
    text: str
    final: bool


@dataclass(frozen=True)
class Told(Effect):
    """The broker says how a pseudo-gradient stands, or something that the training thread must know."""

    message: Grant | Notice


@dataclass(frozen=True)
class PushOver(Effect):
    """Forget the chunks of this push. `code` and `text` say why it was rejected, if it was.

    `counted` are the chunks of a rejected push that may count all the same; None where the broker does
    not say.
    """

    push_id: int
    code: str | None = None
    text: str = ""
    counted: Bitmap | None = None


@dataclass(frozen=True)
class Answered(Effect):
    """The result of a control action; `ok` None means that the connection broke before it came."""

    request: int
    ok: bool | None
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Say(Effect):
    """A sentence for the log; `trouble` when it belongs into `last_error`."""

    text: str
    trouble: bool = False
