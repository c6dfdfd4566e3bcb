"""A connected relay, and a chunk that it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco_broker.core.rounds.round import PushInProgress

Route = bytes


@dataclass(eq=False)
class Relay:
    """A connected relay."""

    name: str
    life: int  # random, of its process
    control: Route
    token: bytes  # identifies its data connection
    heard_at: float  # when the last message from it, or through it, arrived
    combines: bool  # it holds chunks of pseudo-gradients and sends means of them
    bulk: Route | None = None  # its data connection; None until that is attached
    held: dict[int, RemoteChunk] = field(default_factory=dict)  # not yet collected, by number
    unused: list[int] = field(default_factory=list)  # numbers of chunks that were not accepted

    @property
    def held_bytes(self) -> int:
        return sum(each.nbytes for each in self.held.values())


@dataclass(frozen=True, eq=False)
class RemoteChunk:
    """A chunk of a push that a relay holds."""

    push: PushInProgress
    index: int
    relay: Relay
    number: int  # by which the relay knows it
    nbytes: int
    squares: float
    fingerprint: int
