"""Uploads of one worker: the credit of its pushes, and the bytes exchanged with it.

A push may have as many unacknowledged chunks in flight as its credit. The credit runs out before any of
ZeroMQ's high-water marks is reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco_protocol.messages import Push

# Chunks that one push may have in flight: at first, which is enough on a local network, and at most, for
# slow links: 1 Gb/s with a round trip of 100 ms has 12 MiB in flight, 12 chunks of bf16.
FIRST_WINDOW = 6
UPLOAD_WINDOW = 16
# The same for all pushes together, to bound the broker's memory; each push may have two at least.
FIRST_WINDOW_TOTAL = 16
UPLOAD_WINDOW_TOTAL = 64


def upload_window(pushes: int) -> int:
    """Chunks that each of `pushes` concurrent pushes may have in flight at most."""
    return max(2, min(UPLOAD_WINDOW, UPLOAD_WINDOW_TOTAL // max(1, pushes)))


def first_window(pushes: int) -> int:
    """Chunks that each of `pushes` concurrent pushes may have in flight at first."""
    return max(2, min(FIRST_WINDOW, FIRST_WINDOW_TOTAL // max(1, pushes)))


@dataclass
class Account:
    """Bytes exchanged with one worker or observer, and the staleness of its pushes."""

    bytes_up: int = 0  # of chunks
    bytes_down: int = 0
    # By fragment, versions between base and merge of its last counted push.
    staleness: dict[int, int] = field(default_factory=dict)


@dataclass
class Window:
    """The credit of a push on one connection, and its window: the chunks in flight.

    The window should match the link's bandwidth-delay product. If received chunks of any push wait to be
    added, the broker is busy, and more chunks in flight would only wait in its memory. If none waited
    during a full window, the link is the bottleneck, and the window is doubled.
    """

    credit: int = 0  # chunks that may still be sent
    window: int = 0  # chunks in flight at most, currently
    widest: int = 0  # upper bound of `window`
    calm: int = 0  # chunks acknowledged since one was while others waited

    def acknowledged(self, *, is_calm: bool) -> int:
        """Restore the credit of an acknowledged chunk. Returns additional credit of a larger window.

        `is_calm`: no chunk waits to be added now.
        """
        self.credit += 1
        self.calm = self.calm + 1 if is_calm else 0
        if self.calm < self.window:
            return 0
        self.calm = 0
        more = min(self.window, self.widest - self.window, UPLOAD_WINDOW_TOTAL - self.credit)
        more = max(0, more)
        self.window += more
        self.credit += more
        return more


@dataclass
class Upload:
    """One push on the current connections of a worker, with a window for each lane."""

    push: Push  # the offer
    windows: tuple[Window, ...] = (Window(),)  # by lane
    is_void: bool = False  # the push has ended and its sender knows: its chunks are ignored
    # The lanes of unacknowledged chunks, except those of lane 0.
    _lanes: dict[int, int] = field(default_factory=dict)

    def void(self) -> None:
        self.is_void = True

    def may_come(self, lane: int) -> bool:
        """Whether this lane has credit for another chunk."""
        return self.windows[lane].credit > 0

    def comes(self, index: int, lane: int) -> None:
        """Use one credit of the lane for a received chunk."""
        self.windows[lane].credit -= 1
        if lane:
            self._lanes[index] = lane

    def acknowledged(self, index: int, *, is_calm: bool) -> tuple[int, int]:
        """Acknowledge a chunk. Returns its lane and the additional credit of that."""
        lane = self._lanes.pop(index, 0)
        return lane, self.windows[lane].acknowledged(is_calm=is_calm)


@dataclass
class Uploads:
    """The pushes of one worker on its current connections: one of each fragment."""

    window: int = 0  # chunks that its last push could have in flight
    newest_push: int | None = None  # the last push id
    # By fragment, its last push if that was all zeros.
    zeros: dict[int, int] = field(default_factory=dict)
    is_told_of_zeros: bool = False  # a warning that it learns nothing was logged
    _by_fragment: dict[int, Upload] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Upload]:
        return iter(list(self._by_fragment.values()))

    def of(self, fragment: int) -> Upload | None:
        return self._by_fragment.get(fragment)

    def under_way(self, fragment: int, push_id: int) -> Upload | None:
        upload = self._by_fragment.get(fragment)
        return upload if upload is not None and upload.push.push_id == push_id else None

    def begin(self, upload: Upload) -> None:
        self._by_fragment[upload.push.fragment] = upload

    def grant(
        self, push: Push, *, waiting: int, sharing: int, lanes: int = 1, is_bounded: bool = True
    ) -> int:
        """Start or resume a push. Returns the additional credit of each lane.

        Its unacknowledged chunks (`waiting`) are still in memory, so they count against the windows,
        whose size depends on the number of pushes in progress at a time (`sharing`).
        """
        widest = upload_window(sharing * lanes)
        window = min(widest, max(first_window(sharing * lanes), self.window))
        if not is_bounded:
            widest = window = max(2, UPLOAD_WINDOW_TOTAL // lanes)
        credit = max(0, window - -(-waiting // lanes))
        earlier = self.under_way(push.fragment, push.push_id)
        # Chunks that an earlier grant allowed on this connection may still be in flight.
        former = [each.credit for each in earlier.windows] if earlier else [0] * lanes
        allowed = [min(credit + each, UPLOAD_WINDOW_TOTAL) for each in former]
        self.begin(Upload(push, tuple(Window(each, window, widest) for each in allowed)))
        return credit

    def acknowledged(self, upload: Upload, index: int, *, is_calm: bool) -> tuple[int, int]:
        """Acknowledge a chunk. Returns its lane and additional credit.

        The next push starts with the enlarged window.
        """
        lane, more = upload.acknowledged(index, is_calm=is_calm)
        if more:
            self.window = upload.windows[lane].window
        return lane, more

    def void(self, fragment: int, push_id: int) -> bool:
        upload = self.under_way(fragment, push_id)
        if upload is not None:
            upload.void()
        return upload is not None

    def void_all(self) -> None:
        for upload in self._by_fragment.values():
            upload.void()

    def clear(self) -> None:
        """Forget all pushes after a reconnect: no chunk is in flight."""
        self._by_fragment.clear()

    def is_new(self, push: Push) -> bool:
        """Whether this is not the previous push, offered again."""
        is_new = self.newest_push != push.push_id
        self.newest_push = push.push_id
        return is_new

    def has_zeros_again(self, push: Push) -> bool:
        """Whether this is the second push in a row of a fragment with zeros only; True once.

        It can be True again after each of these fragments has had a push with other values.
        """
        if push.norm != 0:
            self.zeros.pop(push.fragment, None)
            self.is_told_of_zeros = self.is_told_of_zeros and bool(self.zeros)
            return False
        if not push.steps:
            return False  # zeros are expected without steps
        earlier = self.zeros.get(push.fragment, push.push_id)
        self.zeros[push.fragment] = push.push_id
        if earlier == push.push_id or self.is_told_of_zeros:
            return False
        self.is_told_of_zeros = True
        return True
