"""What comes in from one worker: the credit of its pushes, and what was exchanged with it.

A push may have as many unacknowledged chunks under way as it was granted. Credits bind before any of
ZeroMQ's high-water marks.
"""

from __future__ import annotations

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
    """What was exchanged with one worker or observer.

    Attributes:
        bytes_up, bytes_down: of chunks.
        staleness: of its last counted push, by fragment: versions between base and merge.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    staleness: dict[int, int] = field(default_factory=dict)


@dataclass
class Upload:
    """One push of one connection: how many chunks it may still send.

    Its window is as wide as bandwidth times delay need. Chunks that wait to be added, whoever sent them,
    show that the broker is busy: more under way would only wait in its memory. Where a whole window has
    come without that, the way is what takes long, and the window is doubled.

    Attributes:
        push: the offer.
        credit: chunks that may still come.
        window: chunks under way at most, at present.
        widest: what `window` may grow to.
        is_void: what still comes of it is ignored: its sender has been told.
    """

    push: Push
    credit: int = 0
    window: int = 0
    widest: int = 0
    is_void: bool = False
    calm: int = 0  # chunks since one was acknowledged while others waited

    def acknowledged(self, *, is_calm: bool) -> int:
        """A chunk is in, and its credit goes back. Returns how many there are on top.

        Args:
            is_calm: no chunk waits to be added now.
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
