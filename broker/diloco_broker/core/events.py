"""What can happen to the core: `machine.Core.handle` takes one of these.

Payloads are opaque here: whatever bytes-like object the loop received, or the finished reply buffer of a
chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diloco_broker.core import effects
from diloco_broker.core.effects import Route
from diloco_protocol.feed import OuterGroup
from diloco_protocol.messages import Message
from diloco_protocol.roles import Peer

# How long a closing round may take to be finished once the broker is to stop.
FINISH_WITHIN_S = 5.0


@dataclass(slots=True)  # not frozen, which takes twice as long: each event has one
class Now:
    """What the clocks say as an event comes in, in seconds."""

    core: float  # leaves out time in which the broker did not run: all deadlines run on it
    machine: float  # goes on meanwhile, for the lease of a hub that has a standby

    @classmethod
    def both(cls, seconds: float) -> Now:
        """For a core without a standby, and for clocks that never stand still."""
        return cls(seconds, seconds)


@dataclass(frozen=True)
class Surroundings:
    """What the core has to know of the process that it runs in."""

    feed_address: str | None = None
    own_address: str | None = None  # a socket file for workers of this machine
    bound: str | None = None  # what is bound for those who come over TCP
    memory_bytes: int | None = None  # that the broker may use; None where nobody knows
    has_own_optimizer: bool = False  # the outer optimizer is one of torch's, made by a factory
    has_own_split: bool = False  # the user's function splits the model, instead of a pattern


@dataclass(frozen=True)
class OuterGroups:
    """What the groups of the user's outer optimizer have, over all fragments."""

    groups: tuple[OuterGroup, ...]


@dataclass(frozen=True)
class Split:
    """The user's function has split the model of a worker that joins; see `effects.SplitModel`."""

    asked: effects.SplitModel
    plan: tuple[int, ...] = ()  # the fragment of each tensor
    error: str = ""  # what is wrong with the split, as a sentence; empty: nothing


@dataclass(frozen=True)
class Received:
    """A well-formed message came in.

    `payload` is the buffer of a chunk (it has `nbytes`), `peer` whose key it came under, if keys are
    asked for.
    """

    route: Route
    message: Message
    payload: Any = None
    peer: Peer | None = None


@dataclass(frozen=True)
class Malformed:
    """Something came in that is no message; `sentence` says what is wrong with it."""

    route: Route
    code: str
    sentence: str


@dataclass(frozen=True)
class KeysRevoked:
    """These keys are good for nothing any more, and their connections have been ended."""

    peers: frozenset[Peer]


@dataclass(frozen=True)
class ConnectionEnded:
    """The shell has ended the connection of a peer that cost too much; `why` is what it had cost."""

    why: str


@dataclass(frozen=True)
class PeerGone:
    """A message could not be delivered: this connection does not exist any more."""

    route: Route


@dataclass(frozen=True)
class WorkDone:
    """A `Fold` or an `Inspect` was carried out: the chunk is finite."""

    work: effects.Fold | effects.Inspect
    squares: float = 0.0  # the sum of its squared values; 0 unless they are parameters
    fingerprint: int = 0  # of its bytes, as `tensors.fingerprint` has it; 0 where `squares` is


@dataclass(frozen=True)
class WorkRefused:
    """A `Fold` or an `Inspect` found NaN or infinity; nothing was added."""

    work: effects.Fold | effects.Inspect


@dataclass(frozen=True)
class Stepped:
    """The outer step of one chunk was taken."""

    fragment: int
    index: int
    wire: Any  # the chunk as it is sent to workers
    # A gradient, or a buffer of them, was left out because what it led to was not finite.
    overflow: bool = False


@dataclass(frozen=True)
class InitialStored:
    """A `StoreInitial` was carried out. `wire` is the chunk as it is sent to workers."""

    work: effects.StoreInitial
    wire: Any
    digest: bytes = b""  # of a frozen one: see `diloco_protocol.version`


@dataclass(frozen=True)
class InitialRefused:
    """A `StoreInitial` found NaN or infinity; nothing was stored."""

    work: effects.StoreInitial


@dataclass(frozen=True)
class Saved:
    """A checkpoint is on the disk; `number` is that of the round that came next."""

    number: int
    path: str


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint could not be written; those that were there are untouched."""

    number: int
    error: str


@dataclass(frozen=True)
class Tick:
    """Time has passed. `lost`: a connection was closed since the last one, nobody knows whose."""

    lost: bool = False


@dataclass(frozen=True)
class StoodStill:
    """The broker itself did not run for so many seconds. The core's clock leaves them out."""

    seconds: float


@dataclass(frozen=True)
class Stop:
    """End in an orderly way: a closing round is finished, an open one abandoned."""

    reason: str
    # The broker is expected back, so workers train on; otherwise the run is over.
    restarting: bool = False


Event = (
    Surroundings
    | OuterGroups
    | Split
    | Received
    | Malformed
    | KeysRevoked
    | ConnectionEnded
    | PeerGone
    | WorkDone
    | WorkRefused
    | Stepped
    | InitialStored
    | InitialRefused
    | Saved
    | SaveFailed
    | Tick
    | StoodStill
    | Stop
)
