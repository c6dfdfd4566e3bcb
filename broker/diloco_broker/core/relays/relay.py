"""A relay that is connected, and a chunk that it holds."""

from __future__ import annotations

from dataclasses import dataclass

Route = bytes


@dataclass(eq=False)
class Relay:
    """A relay that is connected."""

    name: str
    life: int  # random, of its process
    control: Route
    token: bytes  # by which its connection for chunks is known
    heard_at: float  # when anything came from it, or through it
    combines: bool  # it holds chunks of pseudo-gradients, and sends means of them
    bulk: Route | None = None  # None until that is here
    next_number: int = 0  # above those of all chunks that it has told of
    forgets_below: int = 0  # what it was told last


@dataclass(frozen=True, eq=False)
class Kept:
    """A chunk that a relay holds."""

    relay: Relay
    number: int
    nbytes: int
    squares: float
    fingerprint: int
