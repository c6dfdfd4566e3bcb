"""Readers of versions: their connections, credit, and downloads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from diloco_broker.core import effects
from diloco_broker.core.rounds.uploads import Account
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.version import VersionId

# Chunks: upper bounds of the credit of a worker and of an observer. Chunks that were sent but not read
# take memory, even if newer versions have replaced them. Our clients use 16, enough for 1 Gb/s with a
# round trip of 100 ms. (ZeroMQ's high-water mark is 1000 messages.)
MAX_READER_CREDIT = 64
MAX_OBSERVER_CREDIT = 16
# Seconds without new credit after which an observer or a worker is disconnected in the middle of a
# version. Our clients send credit after four chunks of 2 MiB, so 0.6 Mb/s are fast enough.
OBSERVER_GOES_ON_WITHIN_S = 120.0
WORKER_GOES_ON_WITHIN_S = 300.0
# Observers at a time; more are refused, since each takes memory.
MAX_OBSERVERS = 256


# Stands for the lane of a chunk while the lane that carries it is not bound.
NO_LANE = -1


def lane_credit(lanes: int) -> int:
    """Chunks that a worker may have in flight on each of its `lanes` data connections."""
    return max(4, MAX_READER_CREDIT // lanes)


@dataclass
class Download:
    """The download of one version of a fragment by one reader."""

    version: VersionId
    left: int  # chunks not sent yet, ready or not
    held: VersionId | None = None  # a version that the reader has completely, as a base for deltas
    # By lane, the chunks that can be sent now.
    ready: dict[int, deque[int]] = field(default_factory=dict)

    def is_ready(self, lane: int, index: int) -> None:
        """Mark a chunk as ready to be sent on this lane."""
        self.ready.setdefault(lane, deque()).append(index)


@dataclass
class Outlet:
    """One connection of a reader, and its credit in chunks."""

    route: effects.Route
    credit: int = 0


@dataclass
class Reader:
    """A reader of versions. Its `released` messages go to the connection `announce`.

    A worker of several processes has a data connection, a *lane*, for each process, which carries a
    share of the chunks. All other readers have only lane 0, which carries all chunks.
    """

    route: effects.Route  # of lane 0
    announce: effects.Route
    account: Account
    joined: bool
    heard_at: float  # when it last sent a pull or credit
    starved_since: float | None = None  # since when chunks are ready and it has no credit
    lanes: dict[int, Outlet] = field(default_factory=dict)
    # By fragment, the lane of each chunk; None: all are on lane 0.
    lane_map: list[list[int]] | None = None
    probed_at: float = 0.0
    downloads: dict[int, Download] = field(default_factory=dict)  # by fragment
    waiting: dict[int, int] = field(default_factory=dict)  # fragment -> counter of its version
    # By fragment, the version that it has completely, as a base for deltas.
    holds: dict[int, VersionId] = field(default_factory=dict)

    def has_stopped(self, now: float) -> bool:
        """Whether it sent no credit for too long in the middle of a version. To be called regularly.

        The time starts when this first finds chunks that are ready and no credit, since the reader may
        have waited for the version for hours.
        """
        if not self.downloads:  # most, whenever they are asked
            self.starved_since = None
            return False
        lacks_credit = any(
            each.ready.get(lane)
            for lane, outlet in self.lanes.items()
            if not outlet.credit
            for each in self.downloads.values()
        )
        if not lacks_credit:
            self.starved_since = None
            return False
        if self.starved_since is None or self.heard_at > self.starved_since:
            self.starved_since = now
        within = WORKER_GOES_ON_WITHIN_S if self.joined else OBSERVER_GOES_ON_WITHIN_S
        return now - self.starved_since > within

    @property
    def credit(self) -> int:
        """Chunks that it can receive now, on all its connections."""
        return sum(outlet.credit for outlet in self.lanes.values())

    def lane_of(self, fragment: int, index: int) -> int:
        """The lane of a chunk; `NO_LANE` while that is not bound."""
        return 0 if self.lane_map is None else self.lane_map[fragment][index]

    def give(self, fragment: int, lane: int, share: Bitmap) -> None:
        """Assign these chunks to this lane, except those that another lane has already."""
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
