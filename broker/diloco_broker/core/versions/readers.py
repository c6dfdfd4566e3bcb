"""Those who read versions: how many chunks they take, on which connections, and where they are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from diloco_broker.core import effects
from diloco_broker.core.rounds.uploads import Account
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.version import VersionId

# More credit than this is not believed, of a worker and of a reader that has not joined: chunks that
# were sent and not read are memory, also when newer versions have taken their place. Ours use 16,
# enough for 1 Gb/s with a round trip of 100 ms. (ZeroMQ's high-water mark is 1000 messages.)
MAX_READER_CREDIT = 64
MAX_OBSERVER_CREDIT = 16
# Seconds after which a reader in the middle of a version is given up, if it has used up its credit and
# asks for nothing: one that has not joined, and a worker. Ours give credit after four chunks of 2 MiB:
# 0.6 Mb/s.
OBSERVER_GOES_ON_WITHIN_S = 120.0
WORKER_GOES_ON_WITHIN_S = 300.0
# Readers that have not joined; more are refused.
MAX_OBSERVERS = 256


# The lane of chunks that belong to none which is bound.
NO_LANE = -1


def lane_credit(lanes: int) -> int:
    """Chunks that a worker may have on their way on each of so many connections."""
    return max(4, MAX_READER_CREDIT // lanes)


@dataclass
class Download:
    """One reader at one version of one fragment."""

    version: VersionId
    left: int  # chunks not sent yet, ready or not
    held: VersionId | None = None  # what the reader holds whole, and takes deltas from
    # By lane, the chunks that can be sent now.
    ready: dict[int, deque[int]] = field(default_factory=dict)

    def is_ready(self, lane: int, index: int) -> None:
        """This chunk can be sent on this lane."""
        self.ready.setdefault(lane, deque()).append(index)


@dataclass
class Outlet:
    """One connection of a reader: how many chunks it takes now."""

    route: effects.Route
    credit: int = 0


@dataclass
class Reader:
    """Somebody who takes chunks. `announce` is where its `released` goes.

    A worker of several processes takes them on several connections, its *lanes*, each of which has a
    share of the chunks. All others have lane 0 alone, which has all of them.
    """

    route: effects.Route  # of lane 0
    announce: effects.Route
    account: Account
    joined: bool
    heard_at: float  # when it last asked for something
    stands_since: float | None = None  # since when it has no credit for what it could be sent
    lanes: dict[int, Outlet] = field(default_factory=dict)
    lane_map: list[list[int]] | None = (
        None  # by fragment, the lane of each chunk; None: it is lane 0
    )
    probed_at: float = 0.0
    downloads: dict[int, Download] = field(default_factory=dict)  # by fragment
    waiting: dict[int, int] = field(default_factory=dict)  # fragment -> counter that it has
    # By fragment, the version that it holds whole and takes deltas from.
    holds: dict[int, VersionId] = field(default_factory=dict)

    def has_stopped(self, now: float) -> bool:
        """It does not go on with a version that it has begun. To be asked now and then.

        It may have waited for the version for hours before, and used up its credit a moment ago.
        """
        lacks_credit = any(
            each.ready.get(lane)
            for lane, outlet in self.lanes.items()
            if not outlet.credit
            for each in self.downloads.values()
        )
        if not lacks_credit:
            self.stands_since = None
            return False
        if self.stands_since is None or self.heard_at > self.stands_since:
            self.stands_since = now
        within = WORKER_GOES_ON_WITHIN_S if self.joined else OBSERVER_GOES_ON_WITHIN_S
        return now - self.stands_since > within

    @property
    def credit(self) -> int:
        """Chunks that it takes now, on all its connections."""
        return sum(outlet.credit for outlet in self.lanes.values())

    def lane_of(self, fragment: int, index: int) -> int:
        """The lane of a chunk; `NO_LANE` while it is not bound."""
        return 0 if self.lane_map is None else self.lane_map[fragment][index]

    def give(self, fragment: int, lane: int, share: Bitmap) -> None:
        """These chunks come on this lane, but for those that another has already."""
        assert self.lane_map is not None
        owners = self.lane_map[fragment]
        for index in share:
            if owners[index] == NO_LANE:
                owners[index] = lane
        download = self.downloads.get(fragment)
        waiting = download.ready.pop(NO_LANE, ()) if download is not None else ()
        for index in waiting:
            assert download is not None
            download.is_ready(owners[index], index)
