"""The cost and health of synchronising: for `sync_metrics`, and lines in the log."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diloco_protocol.messages import Push
from diloco_worker.session.news import Arrival

# Least seconds between two lines.
LINE_S = 1.0


@dataclass
class SyncMetrics(Mapping[str, Any]):
    """Counters of one worker. Attributes and items are the same: `dict(metrics)` works."""

    pushes: int = 0  # pseudo-gradients of this worker that are in a version it received
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

    def plain(self) -> dict[str, Any]:
        """A copy, by name."""
        return dict(self)

    @property
    def rounds(self) -> int:
        """The old name of `pushes`, until release 1.0. (`round` of a worker is that of the run.)"""
        warnings.warn("rounds is called pushes now.", DeprecationWarning, stacklevel=2)
        return self.pushes

    def __getitem__(self, name: str) -> Any:
        return self.rounds if name == "rounds" else vars(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


@dataclass
class SyncLines:
    """The log line for each counted push; at a fast pace, for several at once."""

    clock: Callable[[], float]  # seconds, monotonic
    waited: float = 0.0  # seconds that training had stood still up to the last line
    has_rounds: bool = True  # common to all workers
    has_fragments: bool = False  # more than one
    _said_at: float | None = None
    _newest: str = ""
    unsaid: int = 0  # pushes that have counted since the last line

    def counted(self, push: Push, arrival: Arrival, staleness: int, delay: int) -> None:
        """A push is in a version, and that in the model, `delay` optimizer steps after its slot."""
        made = [f"round {arrival.released.round}"] if self.has_rounds else []
        made += [f"fragment {push.fragment}"] if self.has_fragments else []
        where = f" ({', '.join(made)})" if made else ""
        norm = "" if push.norm is None else f", norm {push.norm:.4g}"
        after = f"{_steps(delay)} after the slot"
        merged = f", merged {after}" if self.has_fragments or delay else ""
        self.unsaid += 1
        self._newest = (
            f"version {arrival.version.counter}{where} has {_steps(push.steps)} of this worker{norm}, "
            f"staleness {staleness}{merged}"
        )

    @property
    def due_in(self) -> float:
        """Seconds until `line` returns one; infinite without a counted push."""
        if not self.unsaid:
            return math.inf
        return 0.0 if self._said_at is None else max(0.0, self._said_at + LINE_S - self.clock())

    def line(self, waited: float, *, at_once: bool = False) -> str | None:
        """The line, if there is a counted push and the last one was long enough ago (or `at_once`)."""
        if not self.unsaid or (self.due_in > 0 and not at_once):
            return None
        waited_now, others = waited - self.waited, self.unsaid - 1
        more = f"; and {others} more since the last line" if others else ""
        self._said_at, self.unsaid, self.waited = self.clock(), 0, waited
        return f"Synchronised: {self._newest}; waited {waited_now:.1f} s{more}."


def _steps(number: int) -> str:
    return f"{number} step{'s'[: number != 1]}"
