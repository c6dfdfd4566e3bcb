"""Effects: requests of the core, which the shell executes in order.

Routes are the ROUTER's names of connections. Payloads are opaque to the core: the bytes-like object that
the loop received, or the reply buffer of a chunk.
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
    """Send a message; if the connection is gone, answer with `PeerGone`."""

    route: Route
    message: Message
    payload: Any = None


@dataclass(frozen=True)
class Disconnect:
    """Close this connection, and drop what is in flight on it."""

    route: Route


@dataclass(frozen=True)
class Fold:
    """Add one chunk of a push, times its weight, to the sum of the fragment's open round."""

    fragment: int
    index: int
    worker_id: str
    push_id: int
    weight: float
    wire_dtype: str  # of the push's parameters: each push may have its own
    payload: Any


@dataclass(frozen=True)
class Step:
    """Divide the sum of a chunk by its weight, apply the outer optimizer, and reset the sum."""

    fragment: int
    index: int
    weight: float  # 0: no worker delivered this chunk, which keeps its value and its momentum
    count: int  # gradients of this fragment that the outer optimizer received before this one


@dataclass(frozen=True)
class WholePush:
    """A complete submission, to be merged."""

    worker_id: str
    push_id: int
    weight: float  # its share in a mean is this divided by the sum of all weights
    scale: float  # factor of its values, below 1 for stale work
    norm: float  # Euclidean length of its parameters, over all chunks
    wire_dtype: str  # of the parameters in its payloads
    # Of each chunk by index; None for one that an earlier version contains. A relay's sum has only one.
    payloads: Sequence[Any] | Mapping[int, Any]


@dataclass(frozen=True)
class Inspect:
    """Check that one chunk of a staged submission is finite, and measure its length."""

    fragment: int
    index: int
    worker_id: str
    push_id: int
    wire_dtype: str
    payload: Any


@dataclass(frozen=True)
class AggregateAndStep:
    """Make a gradient of each group of pushes, and apply the outer optimizer to each in turn.

    A group without this chunk is skipped. All chunks of a version share `wholes`; `groups` selects the
    pushes that have a chunk only when it is needed: to do so for all workers and chunks at once would
    block the loop.
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
    """Store one chunk of initial parameters: of a seed worker, or of the model file (payload None)."""

    fragment: int
    index: int
    payload: Any = None
    worker_id: str = ""
    push_id: int = 0


@dataclass(frozen=True)
class DropInitial:
    """Drop stored chunks of these fragments, and pending `StoreInitial`: the upload was abandoned."""

    fragments: tuple[int, ...]


@dataclass(frozen=True)
class CountedPush:
    """The chunks of a push that a version counts."""

    worker_id: str
    push: Push
    chunks: Bitmap  # chunks in the ledger from this version on
    added: Bitmap  # chunks whose values are in this version and in no earlier one
    weight: float  # their share
    staleness: int  # versions between the push's base and this one
    # Euclidean length of its parameters as received; None if some chunks were counted before.
    norm: float | None = None
    # Equal for equal updates; 0 if some chunks were counted before, or all are zeros.
    fingerprint: int = 0


@dataclass(frozen=True)
class RecordVersion:
    """Log the contents of a version to the audit log, before the version is released."""

    version: VersionId
    after: VersionId | None  # the version before it, None for the first
    fragment: int
    round: int
    pushes: tuple[CountedPush, ...] = ()  # those with added chunks


@dataclass(frozen=True)
class RoundReport(LastRound):
    """Write a closed round, which made `version` (a counter), to the history."""

    workers: tuple[str, ...] = ()  # whose contributions are in it


@dataclass(frozen=True)
class RecordAction:
    """Log an action of an operator; `before` and `after` are those of a setting, else None."""

    who: str  # the name that their key proves; without keys, the name that they gave
    what: str  # the action, for `set` with the name of the setting
    before: Any
    after: Any
    text: str  # states the effect, without a final period
    is_proven: bool = False  # `who` is proven by a key

    @property
    def by(self) -> str:
        """The operator's name, for messages."""
        return self.who if self.is_proven else f"{self.who} (unproven)"


@dataclass(frozen=True)
class SetOuterOptimizer:
    """Apply these settings to the outer optimizer; no step is queued."""

    config: BrokerConfig
    # "lr" and "momentum" to set in all groups of a torch optimizer.
    own: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """Stop the broker gracefully, at the request of an operator. `restarting` is as in `Stop`.

    `is_complete`: there was no request; the run reached the limit in its options.
    """

    reason: str
    restarting: bool = False
    is_complete: bool = False


@dataclass(frozen=True)
class ForgetBuffer:
    """Discard the gradients of a fragment in the outer optimizer's buffer."""

    fragment: int


@dataclass(frozen=True)
class Revert:
    """Restore a fragment from the checkpoint: the upload that replaced it was abandoned."""

    fragment: int


@dataclass(frozen=True)
class Save:
    """Write a checkpoint of the current state; `number` is that of the next round."""

    number: int
    record: RunRecord


@dataclass(frozen=True)
class ReadCheckpoint:
    """Answer this request with the list of files of the newest checkpoint, or with a part of a file.

    The names come from a peer: they may not exist, and may not even be valid file names.
    """

    route: Route
    request: int
    checkpoint: str | None = None  # None: list the files of the newest one
    file: str = ""
    offset: int = 0  # bytes


@dataclass(frozen=True)
class SplitModel:
    """Call the user's function to split the model of a joining worker; answer with `Split`."""

    route: Route
    join: Join
    manifest: Manifest


@dataclass(frozen=True)
class Finish:
    """Save the state if the last checkpoint lacks it, and exit: the last effect after `Stop`."""

    save: Save | None


@dataclass(frozen=True)
class Log:
    """Write a line to the log."""

    level: str  # info, warning or error
    text: str
    is_listed: bool = True  # also among the events of the feed


def info(text: str, *, is_listed: bool = True) -> Log:
    return Log("info", text, is_listed)


def warning(text: str, *, is_listed: bool = True) -> Log:
    return Log("warning", text, is_listed)


TensorWork = Fold | Step | Inspect | AggregateAndStep | StoreInitial  # queued
AtOnce = DropInitial | Revert | ForgetBuffer | SetOuterOptimizer  # on tensors, not queued
Record = Log | RecordAction | RoundReport | RecordVersion  # written to logs
Asked = Save | ReadCheckpoint | SplitModel  # answered later
Effect = Send | Disconnect | TensorWork | AtOnce | Record | Asked | End | Finish
Effects = Iterator[Effect]  # requested by a handler, in order


def nothing(_: object) -> Effects:
    """The effects of a handler that does nothing."""
    return iter(())
