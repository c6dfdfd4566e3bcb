"""What the core asks for: the shell carries these out, in order.

Routes are the names that the ROUTER gives to connections. Payloads are opaque here: whatever bytes-like
object the loop received, or the finished reply buffer of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.core.versions.record import RunRecord
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.feed import LastRound
from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import Join, Message, Push
from diloco_protocol.version import VersionId

Route = bytes


@dataclass(frozen=True)
class Send:
    """Send a message; when the connection is gone, come back with `PeerGone`."""

    route: Route
    message: Message
    payload: Any = None


@dataclass(frozen=True)
class Disconnect:
    """End this connection; nothing that is on its way matters."""

    route: Route


@dataclass(frozen=True)
class Fold:
    """Add one chunk of a push, times its weight, to what the fragment's open round has of it."""

    fragment: int
    index: int
    worker_id: str
    push_id: int
    weight: float
    wire_dtype: str  # what the push's parameters are in: each push may have its own
    payload: Any


@dataclass(frozen=True)
class Step:
    """Divide what was added of a chunk by its weight, apply the outer optimizer, begin anew."""

    fragment: int
    index: int
    weight: float  # 0: nobody delivered this chunk, which keeps its value and its momentum
    count: int  # gradients that the outer optimizer has had of this fragment before this one


@dataclass(frozen=True)
class WholePush:
    """A whole submission as it is merged."""

    worker_id: str
    push_id: int
    weight: float  # its share in a mean is this over the sum of all weights
    scale: float  # factor of its values, where old work counts less
    norm: float  # Euclidean length of its parameters, all chunks together
    wire_dtype: str  # what the parameters in its payloads are in
    # Of each chunk by index; None for one that an earlier version contains, a relay's sum has one alone.
    payloads: Sequence[Any] | Mapping[int, Any]


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
    """Make a gradient of each group of pushes and apply the outer optimizer to one after the other.

    A group that lacks this chunk is left out. The chunks of a version share `wholes`; what has a chunk
    is looked up when it is needed: many workers times many chunks take longer than a turn of the loop.
    """

    __match_args__ = ("fragment", "index", "groups", "count")

    fragment: int
    index: int
    wholes: tuple[tuple[WholePush, ...], ...]
    count: int  # as in `Step`, before the first

    @property
    def groups(self) -> tuple[tuple[WholePush, ...], ...]:
        return tuple(
            tuple(each for each in group if each.payloads[self.index] is not None)
            for group in self.wholes
        )


@dataclass(frozen=True)
class StoreInitial:
    """Store one chunk of initial parameters: of a seed worker, or the model file (payload None)."""

    fragment: int
    index: int
    payload: Any = None
    worker_id: str = ""
    push_id: int = 0


@dataclass(frozen=True)
class DropInitial:
    """Forget what was placed of these fragments, and every `StoreInitial` that has not been carried out:
    the upload was abandoned."""

    fragments: tuple[int, ...]


@dataclass(frozen=True)
class CountedPush:
    """What a version counts of one push."""

    worker_id: str
    push: Push
    chunks: Bitmap  # those that the ledger names from now on
    added: Bitmap  # those of which its values are in this version, and in no version before it
    weight: float  # their share
    staleness: int  # versions between the push's base and the one that it goes into
    # Euclidean length of its parameters, as they came; None where some were counted before.
    norm: float | None = None
    # Equal updates have the same; 0 where some of it was counted before, or all of it is zeros.
    fingerprint: int = 0


@dataclass(frozen=True)
class RecordVersion:
    """Write down what a version contains, before anybody is told of it."""

    version: VersionId
    after: VersionId | None  # the version that it was made from, None for the first
    fragment: int
    round: int
    pushes: tuple[CountedPush, ...] = ()  # each of them added something


@dataclass(frozen=True)
class RoundReport(LastRound):
    """Write down, for the history, a round that has ended and made `version` (a counter)."""

    workers: tuple[str, ...] = ()  # those whose contributions are in it


@dataclass(frozen=True)
class RecordAction:
    """Write down what an operator did; `before` and `after` are a setting's, else None."""

    who: str  # whom their key proves; without keys as they call themselves
    what: str  # the action, for `set` with the name of the setting
    before: Any
    after: Any
    text: str  # the sentence that states the effect
    is_proven: bool = False  # `who` is

    @property
    def by(self) -> str:
        """Who it was, for people."""
        return self.who if self.is_proven else f"{self.who} (unproven)"


@dataclass(frozen=True)
class SetOuterOptimizer:
    """Go on with these settings of the outer optimizer: no step is queued now."""

    config: BrokerConfig
    # "lr" and "momentum" that all groups of a torch optimizer get.
    own: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """End the broker in an orderly way: an operator asked for it. `restarting` is as in `Stop`.

    `is_complete`: nobody asked, the run has come to the end that its options set.
    """

    reason: str
    restarting: bool = False
    is_complete: bool = False


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
class ReadCheckpoint:
    """Answer this request with the files of the newest checkpoint, or with a piece of a file.

    What was asked for is not known to exist, nor to be the name of a file.
    """

    route: Route
    request: int
    checkpoint: str | None = None  # None: which files does the newest have?
    file: str = ""
    offset: int = 0  # bytes


@dataclass(frozen=True)
class SplitModel:
    """Ask the user's function for a split of this model, and come back with `Split`: a worker wants to
    join with it."""

    route: Route
    join: Join
    manifest: Manifest


@dataclass(frozen=True)
class Finish:
    """The last effect after `Stop`: save this, which the last checkpoint lacks, and end."""

    save: Save | None


@dataclass(frozen=True)
class Log:
    """Tell people."""

    level: str  # info, warning or error
    text: str
    is_listed: bool = True  # among the events of the feed, not only in the log


def info(text: str, *, is_listed: bool = True) -> Log:
    return Log("info", text, is_listed)


def warning(text: str, *, is_listed: bool = True) -> Log:
    return Log("warning", text, is_listed)


TensorWork = Fold | Step | Inspect | AggregateAndStep | StoreInitial  # queued
AtOnce = DropInitial | Revert | ForgetBuffer | SetOuterOptimizer  # asked of the tensors besides
Record = Log | RecordAction | RoundReport | RecordVersion  # written down, for people
Asked = Save | ReadCheckpoint | SplitModel  # answered later
Effect = Send | Disconnect | TensorWork | AtOnce | Record | Asked | End | Finish
Effects = Iterator[Effect]  # what a rule asks for, in order


def nothing(_: object) -> Effects:
    """What a rule asks for where there is nothing to do."""
    return iter(())
