"""Events: the inputs of the core, handled by `machine.Core.handle`.

Payloads are opaque to the core: the bytes-like object that the loop received, or the reply buffer of a
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

# Seconds that a closing round has to finish when the broker stops.
FINISH_WITHIN_S = 5.0


@dataclass(slots=True)  # not frozen, which takes twice as long, since each event has one
class Now:
    """The clocks at the time of an event, in seconds."""

    core: float  # stops while the broker is suspended; all deadlines use it
    machine: float  # never stops; for the lease of a hub with a standby

    @classmethod
    def both(cls, seconds: float) -> Now:
        """Both clocks at the same time: for tests, and for brokers that are never suspended."""
        return cls(seconds, seconds)


@dataclass(frozen=True)
class Surroundings:
    """Facts about the process that the core runs in."""

    feed_address: str | None = None
    own_address: str | None = None  # a socket file for workers on this machine
    bound: str | None = None  # the bound TCP address
    memory_bytes: int | None = None  # available to the broker; None if unknown
    has_own_optimizer: bool = False  # the outer optimizer is one of torch's, made by a factory
    has_own_split: bool = False  # the user's function splits the model, instead of a pattern


@dataclass(frozen=True)
class OuterGroups:
    """The parameter groups of the user's outer optimizer, over all fragments."""

    groups: tuple[OuterGroup, ...]


@dataclass(frozen=True)
class Split:
    """The user's function has split the model of a joining worker; answers `effects.SplitModel`."""

    asked: effects.SplitModel
    plan: tuple[int, ...] = ()  # the fragment of each tensor
    error: str = ""  # why the split is invalid, as a sentence; empty if it is valid


@dataclass(frozen=True)
class Received:
    """A well-formed message was received.

    `payload` is the buffer of a chunk, which has `nbytes`; `peer` is the owner of the connection's key,
    if the broker requires keys.
    """

    route: Route
    message: Message
    payload: Any = None
    peer: Peer | None = None


@dataclass(frozen=True)
class Malformed:
    """A malformed message was received; `sentence` describes the error."""

    route: Route
    code: str
    sentence: str


@dataclass(frozen=True)
class KeysRevoked:
    """These keys were revoked, and their connections closed."""

    peers: frozenset[Peer]


@dataclass(frozen=True)
class ConnectionEnded:
    """The shell closed the connection of a peer that cost too much; `why` has the figures."""

    why: str


@dataclass(frozen=True)
class PeerGone:
    """A message could not be delivered: this connection no longer exists."""

    route: Route


@dataclass(frozen=True)
class WorkDone:
    """A `Fold` or an `Inspect` was executed: the chunk is finite."""

    work: effects.Fold | effects.Inspect
    squares: float = 0.0  # the sum of its squared values; 0 unless they are parameters
    fingerprint: int = 0  # of its bytes, by `tensors.fingerprint`; 0 if `squares` is 0


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
    # A gradient, or a buffer of gradients, was skipped because its result was not finite.
    overflow: bool = False


@dataclass(frozen=True)
class InitialStored:
    """A `StoreInitial` was executed. `wire` is the chunk as it is sent to workers."""

    work: effects.StoreInitial
    wire: Any
    digest: bytes = b""  # of a frozen chunk: see `diloco_protocol.version`


@dataclass(frozen=True)
class InitialRefused:
    """A `StoreInitial` found NaN or infinity; nothing was stored."""

    work: effects.StoreInitial


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written; `number` is that of the next round, as of the checkpoint."""

    number: int
    path: str


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint could not be written; earlier ones are unchanged."""

    number: int
    error: str


@dataclass(frozen=True)
class Tick:
    """Time has passed. `lost`: some connection, it is unknown which, was closed since the last tick."""

    lost: bool = False


@dataclass(frozen=True)
class StoodStill:
    """The broker was suspended for this number of seconds, during which the core's clock stopped."""

    seconds: float


@dataclass(frozen=True)
class Stop:
    """Stop gracefully: finish a closing round, or abandon an open one."""

    reason: str
    # The broker will be restarted, and workers continue to train; otherwise the run is over.
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
