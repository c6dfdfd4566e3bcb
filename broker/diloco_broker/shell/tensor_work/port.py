"""What the loop asks of whoever has the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from diloco_broker.core import effects, events
from diloco_broker.core.versions.record import Resumption
from diloco_broker.tensors.parameters import Parameters
from diloco_protocol.chunks import ModelLayout
from diloco_protocol.feed import OuterGroup


class Tensors(Protocol):
    """The tensors of a run, and the work on them that is queued."""

    @property
    def resumption(self) -> Resumption | None:
        """What the core has to know of the checkpoint that the run goes on from."""

    def __bool__(self) -> bool:
        """Is there work?"""

    def add(self, work: effects.TensorWork | effects.AtOnce) -> None:
        """Queue a piece of work, or do at once what is asked."""

    def do_some(self, layout: ModelLayout | None) -> Iterator[events.Event]:
        """Do the next piece, or a few, and tell what came of it."""

    def outer_groups(self) -> tuple[OuterGroup, ...]:
        """What the groups of a torch optimizer say now."""

    def of(self, layout: ModelLayout | None) -> Parameters:
        """The tensors of this model, to be saved."""

    def forget_sources(self) -> None:
        """The run has its own copy of what it began with."""

    def close(self) -> None:
        """Give back what is held."""
