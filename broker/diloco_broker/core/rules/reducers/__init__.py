"""Reducers: the ways to make updates of pushes, which differ in what counts and when it is time.

Each is a module with the functions of `Reducer`; a new one is such a module, named in `REDUCERS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from diloco_broker.core.effects import Effects, Fold, Inspect
from diloco_broker.core.events import Folded, FoldRefused, Inspected, InspectRefused
from diloco_broker.core.rules.reducers import asynchronous, staged, streaming
from diloco_broker.core.state.members import Member
from diloco_broker.core.state.run import RunState
from diloco_broker.core.state.update import CountedPush, Update
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Commit, Push


class PushInProgress(Protocol):
    """What a reducer has of a push that is not over.

    Attributes:
        before: chunks that need not come.
        arrived: chunks that have come.
    """

    before: Bitmap
    arrived: Bitmap

    def work(self, index: int, payload: Any) -> Fold | Inspect:
        """The tensor work on a chunk that has just come."""


class Reducer(Protocol):
    """What the rules ask of a reducer. Only `open_round` is called while there is no `state.round`."""

    def open_round(self, state: RunState, number: int) -> Effects:
        """Begin the next update and take in what came too early for it."""

    def offer(self, state: RunState, member: Member, push: Push) -> Effects:
        """A worker offers a push: take it in, or let it wait. Raises ProtocolError to refuse it."""

    def find(self, state: RunState, worker_id: str, push: Push) -> PushInProgress | None:
        """What is here of a push; None when nothing more of it is taken."""

    def done(self, state: RunState, event: Folded | Inspected) -> Effects:
        """The tensor work on a chunk is done."""

    def refused(self, state: RunState, event: FoldRefused | InspectRefused) -> Effects:
        """A chunk was not finite."""

    def commit(self, state: RunState, member: Member, commit: Commit) -> None:
        """A worker has sent every chunk of a push."""

    def close_if_due(self, state: RunState) -> Effects:
        """Begin the outer step if it is time to."""

    def leave(self, state: RunState, worker_id: str) -> Effects:
        """A worker is gone."""

    def tick(self, state: RunState, /) -> Effects:
        """Time has passed."""

    def tell(self, state: RunState, ended: Update, pushes: Sequence[CountedPush]) -> Effects:
        """The log's line on an update that has ended."""

    def released(self, state: RunState, /) -> Effects:
        """A version is out, and the next update is open."""


REDUCERS: dict[str, Reducer] = {
    "streaming": streaming,
    "staged": staged,
    "async": asynchronous,
}


def reducer_of(state: RunState) -> Reducer:
    """The run's reducer; it is the same for as long as the broker lives."""
    return REDUCERS[state.config.reducer]
