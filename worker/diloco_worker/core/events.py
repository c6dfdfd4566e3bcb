"""What can happen to a worker's session, and what it wants done about it.

Events go in, effects come out; both are frozen records in the words of protocol/README.md. The shell
(`link`) turns sockets and commands into events and carries out effects in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol import Ledger, Manifest, Message, ModelLayout, RunConfig, VersionId
from diloco_protocol.messages import Push, Released, Standing, Welcome
from diloco_worker.core.transfers import Held


class Event:
    """Something happened."""


class Effect:
    """Something is to be done."""


# From the sockets.


@dataclass(frozen=True)
class Start(Event):
    """Begin: open the connections."""


@dataclass(frozen=True)
class Connected(Event):
    """The control connection is up."""


@dataclass(frozen=True)
class Disconnected(Event):
    """One of the two connections broke; the other is worth nothing now."""

    reason: str


@dataclass(frozen=True)
class Received(Event):
    """A message from the broker. Of a chunk, the shell keeps the buffer (already of the right size)."""

    message: Message


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
class Want(Event):
    """The newest version of a fragment is wanted, whatever it contains.

    With `after` set only one whose counter is above it; the answer may then take a round.
    """

    fragment: int
    after: int | None = None


@dataclass(frozen=True)
class Hold(Event):
    """This version is here whole from now on, merged or not, and can be donated."""

    fragment: int
    version: VersionId
    ledger: Ledger


@dataclass(frozen=True)
class Observe(Event):
    """An observer has learnt the model and the configuration, and can pull.

    `plan` is the fragment of each manifest entry, in order; empty where P is 1.
    """

    manifest: Manifest
    config: RunConfig
    plan: tuple[int, ...] = ()


@dataclass(frozen=True)
class Resume(Event):
    """Go on from a checkpoint; before the first welcome.

    Its versions are compared with the broker's: each fragment is delivered once, `unchanged` where the
    broker's is the same or older. Or all of it is forgotten (`Forget`), and joined as a new worker.

    Attributes:
        config, plan: how the run was trained and the model cut.
        held: by fragment, the version held; of each that has chunks, the frozen one included.
    """

    config: RunConfig
    plan: tuple[int, ...]
    held: Mapping[int, Held]


@dataclass(frozen=True)
class Prepared(Event):
    """The chunks of a donation are laid out and can be sent."""

    push_id: int


@dataclass(frozen=True)
class Doubt(Event):
    """An earlier life of this worker may have sent what is in the model of this fragment.

    `known` are the pushes of this worker that have been taken into account; see `former`.
    """

    fragment: int
    known: frozenset[int]


@dataclass(frozen=True)
class Ask(Event):
    """Send a control action; the result comes back as `Answered`."""

    request: int
    action: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Withdraw(Event):
    """Nobody waits for this answer any more; do not send the action if it has not been."""

    request: int


@dataclass(frozen=True)
class Pulse(Event):
    """Send a heartbeat now."""


@dataclass(frozen=True)
class Depart(Event):
    """Tell the broker that this worker leaves. The end of the session."""

    reason: str = ""


# What the shell is to do with its sockets.


@dataclass(frozen=True)
class Open(Effect):
    """Open two new connections."""


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
    """Send one chunk of a push on bulk; the shell has its bytes."""

    session: bytes
    push_id: int
    fragment: int
    index: int


@dataclass(frozen=True)
class Beat(Effect):
    """Send a heartbeat; the shell fills in how training stands."""

    session: bytes
    uploading: bool


# What the shell is to do with parameters.


@dataclass(frozen=True)
class Begin(Effect):
    """Chunks of this version begin to arrive: forget what was assembled of another one."""

    fragment: int
    version: VersionId


@dataclass(frozen=True)
class Store(Effect):
    """Decode the chunk at hand into the assembly of its fragment."""

    fragment: int
    index: int


@dataclass(frozen=True)
class Discard(Effect):
    """The assembled version is of no use: it does not contain the push in flight."""

    fragment: int


@dataclass(frozen=True)
class Deliver(Effect):
    """A version is whole: hand it to the training side. The shell answers with `Hold`.

    Attributes:
        released: the version, its ledger and round.
        counted: the push in flight that it contains whole, if any.
        unchanged: it is the version held already; nothing was assembled.
        superseding: an earlier life of this worker has sent what is in the model, and it is in this
            version. A push that was in flight is over without being counted.
    """

    released: Released
    counted: int | None
    unchanged: bool = False
    superseding: bool = False


@dataclass(frozen=True)
class Forget(Effect):
    """The checkpoint does not fit the broker's run: nothing of it is held any more."""

    text: str


@dataclass(frozen=True)
class PrepareDonation(Effect):
    """Lay out the parameters of a fragment, fp32, as the chunks of this push.

    The shell answers with `Prepared`, which may take as long as copying a large model.
    """

    push_id: int
    fragment: int


# What the shell is to tell the training side.


@dataclass(frozen=True)
class Joined(Effect):
    """The broker has welcomed this worker (again)."""

    welcome: Welcome
    layout: ModelLayout
    again: bool


@dataclass(frozen=True)
class JoinRefused(Effect):
    """The broker refuses this worker. `final` before the first welcome; later it is tried again."""

    code: str
    text: str
    final: bool


@dataclass(frozen=True)
class Granted(Effect):
    """The broker says how a pseudo-gradient stands, and the round that it is part of."""

    push_id: int
    fragment: int
    standing: Standing
    round: int | None


@dataclass(frozen=True)
class DropParts(Effect):
    """What has been delivered of a first version is of another run than the rest would be."""


@dataclass(frozen=True)
class Carried(Effect):
    """The round closed without this fragment's pseudo-gradient, which is in a later one now."""

    fragment: int
    round: int


@dataclass(frozen=True)
class Paced(Effect):
    """The broker has worked out another H for this worker (Dynamic Local Updates)."""

    sync_every: int


@dataclass(frozen=True)
class PushOver(Effect):
    """Forget the chunks of this push. `code` and `text` say why it was rejected, if it was."""

    push_id: int
    code: str | None = None
    text: str = ""


@dataclass(frozen=True)
class Answered(Effect):
    """The result of a control action; `ok` None means that the connection broke before it came."""

    request: int
    ok: bool | None
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stopping(Effect):
    """The run is over, or over for this worker."""

    text: str


@dataclass(frozen=True)
class Restarting(Effect):
    """The broker goes away, and will be back."""

    text: str


@dataclass(frozen=True)
class Say(Effect):
    """A sentence for the log; `trouble` when it belongs into `last_error`."""

    text: str
    trouble: bool = False
