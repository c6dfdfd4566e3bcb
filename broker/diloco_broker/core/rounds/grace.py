"""The grace period of `--grace auto`: it takes only time in which no worker would pause.

    grace = gamma (tau xi_step - xi_quorum - xi_sync)       (Decoupled DiLoCo, arXiv 2604.21428)

A worker trains on for tau steps after it has sent a fragment; then it pauses until the reply is there.
A round may use that time to wait for more contributions, except for what it has used already and what
the reply still takes:

- xi_step: seconds per step, from each worker's average over heartbeats. The smallest tau xi_step counts:
  that worker pauses first.
- xi_quorum: from the first push of the round to its quorum, where a deferred push is one of those for
  which a worker waits. The paper averages it over rounds; here the round's own value is known when the
  wait begins.
- xi_sync: from the close to the last chunk of the reply, averaged over rounds. The broker learns from
  returned credit that chunks have arrived.

A broker that was restarted, or a standby that has taken over, measures anew: until then the grace is 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diloco_broker.core.effects import Route

# The share of the slack that is used. Times of steps vary, and up to three chunks of a reply arrive
# unnoticed (`CREDIT_BATCH` of the worker). In simulated runs, where each step takes up to 20% more or
# less, 1 costs 4% of the steps and 0.8 none (tests/simulation/test_stragglers.py).
GAMMA = 0.8
# Half of the default stall timeout. A worker that needs longer is not late but stuck.
LONGEST_S = 300.0
NEWEST = 0.25  # weight of the newest round in the average of xi_sync

NO_OVERLAP = (
    "--grace auto waits only while workers train on, and here they pause for each reply "
    "(--fragment-sync-delay is 0): the grace is 0."
)


@dataclass
class Slack:
    """What the core has measured for the grace period. Times are run time."""

    grace_s: float = 0.0  # of the last round that reached its quorum
    sync_s: float | None = None  # xi_sync; None before the first round
    closed_at: float | None = None  # when the last round closed; None once it is in `sync_s`
    arrived_at: float = 0.0  # when the last part of its version arrived, as far as is known
    readers: set[Route] = field(default_factory=set)  # workers that waited for this version

    def begin(self, now: float, first_at: float, pauses_s: Iterable[float]) -> None:
        """A round has reached its quorum: determine its grace period.

        `first_at` is the time of its first push, `pauses_s` are the tau xi_step of the workers whose
        speed is known.
        """
        if self.closed_at is not None and self.readers:
            took = self.arrived_at - self.closed_at
            before = took if self.sync_s is None else self.sync_s
            self.sync_s = before + NEWEST * (took - before)
            self.closed_at = None
        first_pause_s = min(pauses_s, default=None)
        self.grace_s = 0.0
        if first_pause_s is not None and self.sync_s is not None:
            left = first_pause_s - (now - first_at) - self.sync_s
            self.grace_s = min(max(0.0, GAMMA * left), LONGEST_S)

    def closed(self, now: float, readers: Iterable[Route]) -> None:
        """The round has begun to close, and these workers to download its version."""
        self.closed_at = self.arrived_at = now
        self.readers = set(readers)

    def released(self, now: float) -> None:
        """The version is released: a reply is not complete before."""
        self.arrived_at = now

    def credited(self, route: Route | None, now: float) -> None:
        """The worker with this data connection returned credit: chunks have arrived there."""
        if route in self.readers:
            self.arrived_at = now
