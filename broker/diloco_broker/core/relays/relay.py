"""A connected relay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Route = bytes


@dataclass(eq=False)
class Relay:
    """A connected relay."""

    name: str
    incarnation: int  # random, of its process
    control: Route
    token: bytes  # identifies its data connection
    heard_at: float  # when the last message from it, or through it, arrived
    combines: bool  # it holds chunks of pseudo-gradients and sends means of them
    bulk: Route | None = None  # its data connection; None until that is attached
    # Chunks that were not collected, by number: `RemoteChunk`, which refers to this class.
    held: dict[int, Any] = field(default_factory=dict)
    unused: list[int] = field(default_factory=list)  # numbers of chunks that were not accepted

    @property
    def held_bytes(self) -> int:
        return sum(each.nbytes for each in self.held.values())
