"""What a session wants done: frozen records, which the I/O thread executes in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol import Bitmap, VersionId
from diloco_protocol.messages import Grant, Lane, Message, Notice, Released, Welcome


class Effect:
    """Something to do."""


@dataclass(frozen=True)
class Open(Effect):
    """Open two new connections, to this one of the addresses."""

    place: int = 0


@dataclass(frozen=True)
class Close(Effect):
    """Close both connections and discard their queues."""


@dataclass(frozen=True)
class Send(Effect):
    """Send a message, on control unless `bulk`."""

    message: Message
    bulk: bool = False


@dataclass(frozen=True)
class SendChunk(Effect):
    """Send one chunk of a push on a lane (0 is bulk); the shell has its bytes."""

    session: bytes
    push_id: int
    fragment: int
    index: int
    lane: int = 0


@dataclass(frozen=True)
class OpenLanes(Effect):
    """The other processes of this worker open data connections, each with its first message."""

    bindings: tuple[Lane, ...]  # from lane 1 on


@dataclass(frozen=True)
class Beat(Effect):
    """Send a heartbeat; the shell fills in the state of training."""

    session: bytes
    uploading: bool


@dataclass(frozen=True)
class BeginVersion(Effect):
    """Chunks of this version begin to arrive: discard an unfinished one."""

    fragment: int
    version: VersionId


@dataclass(frozen=True)
class StoreChunk(Effect):
    """Decode the received chunk into the version that is being assembled.

    With `parts` it is a difference from the held version: codes of these lengths, whose sum must have
    this checksum. The shell answers with `Followed` or `Spoilt`.
    """

    fragment: int
    index: int
    parts: tuple[int, ...] = ()
    checksum: int = 0


@dataclass(frozen=True)
class Deliver(Effect):
    """A version is complete: hand it to training, and keep it, since the broker may ask for it."""

    released: Released  # the version, its ledger and round
    counted: int | None  # the push in flight that it contains completely, if any
    unchanged: bool = False  # it is the held version; nothing was assembled
    # It contains steps that are in the model, from a previous incarnation of this worker. A push in
    # flight ends without being counted.
    superseding: bool = False


@dataclass(frozen=True)
class DropParts(Effect):
    """The delivered part of a first version is of another run than the rest."""


@dataclass(frozen=True)
class ForgetCheckpoint(Effect):
    """The checkpoint does not fit the broker's run: nothing of it is held any more."""

    text: str


@dataclass(frozen=True)
class PrepareSeeding(Effect):
    """Lay out a fragment's fp32 parameters as the chunks of this push; `Prepared` follows, maybe much
    later.
    """

    push_id: int
    fragment: int


@dataclass(frozen=True)
class NameFrozen(Effect):
    """Compute the tag of the model's own frozen parameters; `FrozenNamed` follows, maybe much later."""

    fragment: int


@dataclass(frozen=True)
class JoinRefused(Effect):
    """The broker refuses this worker. `final` before the first welcome; later it is retried."""

    code: str
    text: str
    final: bool


@dataclass(frozen=True)
class Told(Effect):
    """A message of the broker that training must know."""

    message: Welcome | Grant | Notice


@dataclass(frozen=True)
class PushOver(Effect):
    """Discard the chunks of this push. `code` and `text` say why it was rejected, if it was.

    `counted`: chunks of a rejected push that may count nevertheless; None where unknown.
    """

    push_id: int
    code: str | None = None
    text: str = ""
    counted: Bitmap | None = None


@dataclass(frozen=True)
class Answered(Effect):
    """The result of a control action; `ok` None: the connection broke before it arrived."""

    request: int
    ok: bool | None
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Say(Effect):
    """A sentence for the log; `trouble`: also for `last_error`."""

    text: str
    trouble: bool = False
