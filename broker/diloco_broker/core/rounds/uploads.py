"""What comes in from one worker: the credit of its pushes, and what was exchanged with it.

A push may have as many unacknowledged chunks under way as it was granted. Credits bind before any of
ZeroMQ's high-water marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco_protocol.messages import Push

# Chunks one push may have under way at first, which is enough on a local network, and once the way has
# proved to be long: 1 Gb/s with a round trip of 100 ms has 12 MiB under way, 12 chunks of bf16.
FIRST_WINDOW = 6
UPLOAD_WINDOW = 16
# And all pushes together, so that many workers do not fill the broker's memory; two each at least.
FIRST_WINDOW_TOTAL = 16
UPLOAD_WINDOW_TOTAL = 64


def upload_window(pushes: int) -> int:
    """Chunks that each of so many concurrent pushes may have under way at most."""
    return max(2, min(UPLOAD_WINDOW, UPLOAD_WINDOW_TOTAL // max(1, pushes)))


def first_window(pushes: int) -> int:
    """Chunks that each of so many concurrent pushes may have under way before anything is known."""
    return max(2, min(FIRST_WINDOW, FIRST_WINDOW_TOTAL // max(1, pushes)))


@dataclass
class Account:
    """What was exchanged with one worker or observer."""

    bytes_up: int = 0  # of chunks
    bytes_down: int = 0
    # Of its last counted push, by fragment: versions between base and merge.
    staleness: dict[int, int] = field(default_factory=dict)


@dataclass
class Window:
    """How many chunks of a push may still be sent on one connection.

    It is as wide as bandwidth times delay need. Chunks that wait to be added, whoever sent them,
    show that the broker is busy: more under way would only wait in its memory. Where a whole window has
    come without that, the way is what takes long, and the window is doubled.
    """

    credit: int = 0  # chunks that may still come
    window: int = 0  # chunks under way at most, at present
    widest: int = 0  # what `window` may grow to
    calm: int = 0  # chunks since one was acknowledged while others waited

    def acknowledged(self, *, is_calm: bool) -> int:
        """A chunk is in, and its credit goes back. Returns how many there are on top.

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
    """One push on the present connections of a worker: what each of its lanes may still send."""

    push: Push  # the offer
    windows: tuple[Window, ...] = (Window(),)  # by lane
    is_void: bool = False  # what still comes of it is ignored: its sender has been told
    # Chunks that are not acknowledged, of other lanes than the first, with their lane.
    _came_on: dict[int, int] = field(default_factory=dict)

    def void(self) -> None:
        self.is_void = True

    def may_come(self, lane: int) -> bool:
        """Has this lane credit for another chunk?"""
        return self.windows[lane].credit > 0

    def comes(self, index: int, lane: int) -> None:
        """A chunk has come: a credit of its lane is used."""
        self.windows[lane].credit -= 1
        if lane:
            self._came_on[index] = lane

    def acknowledged(self, index: int, *, is_calm: bool) -> tuple[int, int]:
        """A chunk is in. Returns its lane, and the credit on top that this has now."""
        lane = self._came_on.pop(index, 0)
        return lane, self.windows[lane].acknowledged(is_calm=is_calm)


@dataclass
class Uploads:
    """The pushes of one worker on its present connections: one of each fragment."""

    window: int = 0  # chunks that its last push could have under way
    newest_push: int | None = None  # the push id that came last
    # By fragment, its last push if that was all zeros.
    zeros: dict[int, int] = field(default_factory=dict)
    is_told_of_zeros: bool = False  # people have been told that it learns nothing
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
        """Begin a push, or go on with it. Returns the chunks that each lane may send on top.

        Its chunks that are not acknowledged (`waiting`) are still in our memory, so they count against
        the windows, which depend on how many pushes may be under way at a time (`sharing`).
        """
        widest = upload_window(sharing * lanes)
        window = min(widest, max(first_window(sharing * lanes), self.window))
        if not is_bounded:
            widest = window = max(2, UPLOAD_WINDOW_TOTAL // lanes)
        credit = max(0, window - -(-waiting // lanes))
        earlier = self.under_way(push.fragment, push.push_id)
        # Chunks that an earlier grant allowed on this connection may still be under way.
        former = [each.credit for each in earlier.windows] if earlier else [0] * lanes
        allowed = [min(credit + each, UPLOAD_WINDOW_TOTAL) for each in former]
        self.begin(Upload(push, tuple(Window(each, window, widest) for each in allowed)))
        return credit

    def acknowledged(self, upload: Upload, index: int, *, is_calm: bool) -> tuple[int, int]:
        """A chunk is in. Returns its lane and the credit on top; the next push begins with what has
        grown."""
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
        """The connection is a new one: no chunk is under way."""
        self._by_fragment.clear()

    def is_new(self, push: Push) -> bool:
        """False for one that only comes again."""
        is_new = self.newest_push != push.push_id
        self.newest_push = push.push_id
        return is_new

    def has_zeros_again(self, push: Push) -> bool:
        """Whether this is the second push in a row of a fragment with zeros only; True once.

        That is told anew when every fragment has moved in between.
        """
        if push.norm != 0:
            self.zeros.pop(push.fragment, None)
            self.is_told_of_zeros = self.is_told_of_zeros and bool(self.zeros)
            return False
        if not push.steps:
            return False  # nothing was done, so zeros are no news
        earlier = self.zeros.get(push.fragment, push.push_id)
        self.zeros[push.fragment] = push.push_id
        if earlier == push.push_id or self.is_told_of_zeros:
            return False
        self.is_told_of_zeros = True
        return True
