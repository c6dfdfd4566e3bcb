"""What synchronising has cost and whether it works, as `sync_metrics` shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class SyncMetrics(Mapping[str, Any]):
    """Counters of one worker. Attributes and items are the same: `dict(metrics)` works."""

    rounds: int = 0  # pseudo-gradients of this worker that are in a version it received
    bytes_up: int = 0  # sent to the broker, headers included
    bytes_down: int = 0
    seconds_waited: float = 0.0  # training stood still to synchronise; joining is not in it
    retries: int = 0  # offers of a push again after a connection broke
    reconnections: int = 0  # how often the worker joined again
    rejected: int = 0  # pseudo-gradients that were dropped: not finite, or refused by the broker
    # Versions between the last counted push's base and the one it went into; in synchronous mode without
    # late work 0.
    staleness: int = 0
    late_merges: int = 0  # versions merged after their apply point, because the reply was late
    merge_delay: int = 0  # optimizer steps from a fragment's slot to the merge of its last reply
    unsynced_steps: int = 0  # steps past a boundary that could not be synchronised; 0 in health
    # What has changed in the model since the worker was made and is not kept in step, a sentence.
    model_change: str | None = None
    last_error: str | None = None  # the last thing that went wrong, a sentence

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))
