"""What synchronising has cost and whether it works, as `sync_metrics` shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class SyncMetrics(Mapping[str, Any]):
    """Counters of one worker. Attributes and items are the same: `dict(metrics)` works.

    Attributes:
        rounds: pseudo-gradients of this worker that are in a version it received.
        bytes_up: bytes sent to the broker, headers included.
        bytes_down: bytes received.
        seconds_waited: time that training stood still for synchronising, joining excluded.
        retries: how often a push was offered again after a connection broke.
        reconnections: how often the worker joined again.
        rejected: pseudo-gradients that were dropped: not finite, or refused by the broker.
        staleness: versions between the last counted push's base and the one it went into; in
            synchronous mode without late work 0.
        late_merges: versions merged after their apply point, because the reply was late.
        merge_delay: optimizer steps from a fragment's slot to the merge of its reply, of the last merge.
        unsynced_steps: optimizer steps past a boundary that could not be synchronised; 0 in health.
        model_change: what has changed in the model since the worker was made and is not kept in step, a
            sentence; None while nothing has.
        last_error: the last thing that went wrong, a sentence; None when nothing has.
    """

    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds_waited: float = 0.0
    retries: int = 0
    reconnections: int = 0
    rejected: int = 0
    staleness: int = 0
    late_merges: int = 0
    merge_delay: int = 0
    unsynced_steps: int = 0
    model_change: str | None = None
    last_error: str | None = None

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    def plain(self) -> dict[str, Any]:
        """A dict, for JSON."""
        return asdict(self)
