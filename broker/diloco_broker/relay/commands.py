"""What a relay's core tells its shell to do, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diloco_broker.core import events
from diloco_broker.core.effects import Route
from diloco_broker.core.machine import Core
from diloco_protocol import messages
from diloco_protocol.chunks import ModelLayout
from diloco_protocol.messages import Released
from diloco_worker.session import events as of_parent
from diloco_worker.session.session import Session


@dataclass(frozen=True)
class Connect:
    """Begin with a session to the parent; an earlier one is over."""

    session: Session


@dataclass(frozen=True)
class Tell:
    """An event for the session."""

    event: of_parent.Event


@dataclass(frozen=True)
class Offer:
    """Push what was averaged last."""

    push: messages.Push


@dataclass(frozen=True)
class Feed:
    """An event for the site's core."""

    event: events.Event


@dataclass(frozen=True)
class Begin:
    """The site begins anew with this core; what is queued of the one before is worth nothing."""

    core: Core
    layout: ModelLayout
    wire_dtype: str  # that its means go up in


@dataclass(frozen=True)
class Settle:
    """A version of the parent's has these chunks of the site's pushes, by push id."""

    released: Released
    counted: Mapping[int, frozenset[int]]


@dataclass(frozen=True)
class Abandon:
    """Nobody waits for this push any more, which may be in a later version."""

    push_id: int


@dataclass(frozen=True)
class Forget:
    """This push of the site is in no version."""

    push_id: int


@dataclass(frozen=True)
class HandUp:
    """What a worker of the site has given goes up: by fragment, the push that it goes in.

    Of fragments that are `held` it is the version that the relay holds.
    """

    pushes: Mapping[int, int]
    held: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Send a message to somebody of the site."""

    route: Route
    message: messages.Message


@dataclass(frozen=True)
class Disconnect:
    """End this connection of the site."""

    route: Route


@dataclass(frozen=True)
class Say:
    """A sentence for people."""

    text: str
    is_trouble: bool = False


@dataclass(frozen=True)
class End:
    """The relay cannot go on, or need not: `is_over` where the run is."""

    reason: str
    is_over: bool = False


Command = (
    Connect
    | Tell
    | Offer
    | Feed
    | Begin
    | Answer
    | Disconnect
    | Say
    | End
    | Settle
    | Abandon
    | Forget
    | HandUp
)
Commands = Iterator[Command]
