"""What the core asks for: the shell carries these out, in order.

Routes are the names that the ROUTER gives to connections. Payloads are opaque here: whatever bytes-like
object the loop received, or the finished reply buffer of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.core.state.run_record import RunRecord
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Message, Push
from diloco_protocol.version import VersionId

Route = bytes


@dataclass(frozen=True)
class Send:
    """Send a message; when the connection is gone, come back with `PeerGone`."""

    route: Route
    message: Message
    payload: Any = None


@dataclass(frozen=True)
class Fold:
    """Add one chunk of a push, times its weight, to what the fragment's open round has of it.

    `wire_dtype` is what the push's parameters are in: each push may have its own.
    """

    fragment: int
    index: int
    worker_id: str
    push_id: int
    weight: float
    wire_dtype: str
    payload: Any


@dataclass(frozen=True)
class Step:
    """Divide what was added of a chunk by `weight`, apply the outer optimizer, begin anew.

    With weight 0 nobody delivered this chunk: it keeps its value and its momentum. `count` is the
    number of gradients that the outer optimizer has had of this fragment before this one.
    """

    fragment: int
    index: int
    weight: float
    count: int


@dataclass(frozen=True)
class PushPart:
    """One chunk of a whole submission, and what concerns all of that submission.

    Attributes:
        weight: its share in a mean is this over the sum of all weights.
        scale: factor of its values, where old work counts less.
        norm: Euclidean length of its parameters, all chunks together.
        wire_dtype: what the payload's parameters are in.
    """

    worker_id: str
    push_id: int
    weight: float
    scale: float
    norm: float
    wire_dtype: str
    payload: Any


@dataclass(frozen=True)
class WholePush:
    """A whole submission as it is merged: what `PushPart` says of one chunk, for all of them.

    `payloads` has None for a chunk that an earlier version contains.
    """

    worker_id: str
    push_id: int
    weight: float
    scale: float
    norm: float
    wire_dtype: str
    payloads: Sequence[Any]

    def part(self, index: int) -> PushPart:
        return PushPart(
            worker_id=self.worker_id,
            push_id=self.push_id,
            weight=self.weight,
            scale=self.scale,
            norm=self.norm,
            wire_dtype=self.wire_dtype,
            payload=self.payloads[index],
        )


@dataclass(frozen=True)
class Inspect:
    """Look at one chunk of a staged submission: is it finite, and how long is it?"""

    fragment: int
    index: int
    worker_id: str
    push_id: int
    wire_dtype: str
    payload: Any


@dataclass(frozen=True)
class AggregateAndStep:
    """Make a gradient of each group of parts and apply the outer optimizer to one after the other.

    A group without parts lacks this chunk: it is left out. `count` is as in `Step`, before the first.
    The chunks of a version share `wholes`; parts are made when they are needed, since many workers
    times many chunks are more than one turn of the loop has time for.
    """

    __match_args__ = ("fragment", "index", "groups", "count")

    fragment: int
    index: int
    wholes: tuple[tuple[WholePush, ...], ...]
    count: int

    @property
    def groups(self) -> tuple[tuple[PushPart, ...], ...]:
        """The parts of each group."""
        return tuple(
            tuple(
                whole.part(self.index) for whole in group if whole.payloads[self.index] is not None
            )
            for group in self.wholes
        )


@dataclass(frozen=True)
class StoreInitial:
    """Store one chunk of initial parameters: from a donation, or the model file (payload None)."""

    fragment: int
    index: int
    payload: Any = None
    worker_id: str = ""
    push_id: int = 0


@dataclass(frozen=True)
class DropInitial:
    """Forget every `StoreInitial` that has not been carried out: its donation was abandoned."""


@dataclass(frozen=True)
class CountedPush:
    """What a version counts of one push.

    Attributes:
        chunks: those that the ledger names from now on.
        added: those of which its values are in this version, and in no version before it.
        weight: their share.
        staleness: versions between the push's base and the one that it goes into.
    """

    worker_id: str
    push: Push
    chunks: Bitmap
    added: Bitmap
    weight: float
    staleness: int


@dataclass(frozen=True)
class RecordVersion:
    """Write down what a version contains, before anybody is told of it.

    `after` is the version that it was made from, None for the first. Each of `pushes` added something.
    """

    version: VersionId
    after: VersionId | None
    fragment: int
    round: int
    pushes: tuple[CountedPush, ...] = ()


@dataclass(frozen=True)
class RoundReport:
    """What is known of a round that has ended.

    Attributes:
        fragment, version: what it made: the version of this fragment with this counter.
        seconds: from its opening to its release.
        averaged: contributions counted whole.
        weight: sum of their weights.
        loss: mean of the losses they reported, None without any.
        delta_norm: mean Euclidean norm of their pseudo-gradients, None without any.
        staleness: largest number of versions between a base and the version it went into.
        workers: those whose contributions are in it.
    """

    number: int
    fragment: int
    version: int
    seconds: float
    averaged: int
    weight: float
    loss: float | None
    delta_norm: float | None
    staleness: int
    workers: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordRound:
    """Write down, for the history, that a round has ended."""

    report: RoundReport


@dataclass(frozen=True)
class RecordAction:
    """Write down what an operator did.

    Attributes:
        who: as the operator calls itself.
        what: the action, for `set` with the name of the setting.
        before, after: of the setting; None where there is none.
        text: the sentence that states the effect.
    """

    who: str
    what: str
    before: Any
    after: Any
    text: str


@dataclass(frozen=True)
class SetOuterOptimizer:
    """Go on with these settings of the outer optimizer: no step is queued now.

    `own` has what all groups of a torch optimizer get: "lr", "momentum".
    """

    config: BrokerConfig
    own: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """End the broker in an orderly way: an operator asked for it. `restarting` is as in `Stop`."""

    reason: str
    restarting: bool = False


@dataclass(frozen=True)
class ForgetBuffer:
    """Throw away the gradients that the outer optimizer has collected of a fragment."""

    fragment: int


@dataclass(frozen=True)
class Revert:
    """Put a fragment back to what the checkpoint has: what was placed over it was abandoned."""

    fragment: int


@dataclass(frozen=True)
class Save:
    """Write a checkpoint of how things stand now; `number` is the coming round's."""

    number: int
    record: RunRecord


@dataclass(frozen=True)
class Finish:
    """The last effect after `Stop`: save this, which the last checkpoint lacks, and end."""

    save: Save | None


@dataclass(frozen=True)
class Log:
    """Tell people: the log, and the event list of the feed if it `is_listed`.

    Level: info, warning or error.
    """

    level: str
    text: str
    is_listed: bool = True


TensorWork = Fold | Step | Inspect | AggregateAndStep | StoreInitial
Effect = (
    Send
    | TensorWork
    | DropInitial
    | Revert
    | ForgetBuffer
    | Save
    | SetOuterOptimizer
    | End
    | Finish
    | RecordVersion
    | RecordRound
    | RecordAction
    | Log
)
Effects = Iterator[Effect]  # what a rule asks for, in order


def nothing(_: object) -> Effects:
    """What a rule asks for where there is nothing to do."""
    return iter(())
