"""The thread that listens to the feed for the full screen, and connects anew after a long silence.

ZeroMQ connects again by itself when a connection breaks. It does not notice a host that vanished without
a word, nor a name that has another address by now: after some silence the socket is made anew.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from diloco_protocol.feed import FeedError, Snapshot

POLL_S = 0.25  # how long the end of the program may have to wait
RENEW_AFTER_S = 15.0  # of silence; the feed speaks once a second


class Feed(Protocol):
    """What is listened to: a `FeedSubscriber`, or a stand-in."""

    malformed: int
    last_error: str

    def receive(self, timeout_s: float) -> Snapshot | None: ...

    def close(self) -> None: ...


class Listener(threading.Thread):
    """Hands each snapshot to `take` and each complaint to `complain`, both called in this thread."""

    def __init__(
        self,
        open_feed: Callable[[], Feed],
        take: Callable[[Snapshot], None],
        complain: Callable[[str], None],
        *,
        renew_after_s: float = RENEW_AFTER_S,
    ) -> None:
        super().__init__(name="feed", daemon=True)
        self._open_feed = open_feed
        self._take = take
        self._complain = complain
        self._renew_after_s = renew_after_s
        self._ended = threading.Event()

    def run(self) -> None:
        """Until `stop`. Only a feed that cannot be opened at all ends it before."""
        while not self._ended.is_set():
            try:
                feed = self._open_feed()
            except FeedError as error:
                self._complain(str(error))
                return
            try:
                self._listen(feed)
            finally:
                feed.close()

    def stop(self) -> None:
        """Have the thread end, within a quarter of a second."""
        self._ended.set()

    def _listen(self, feed: Feed) -> None:
        heard_at, unreadable, said = time.monotonic(), 0, ""
        while not self._ended.is_set() and time.monotonic() - heard_at < self._renew_after_s:
            complaint = ""
            try:
                snapshot = feed.receive(POLL_S)
            except FeedError as error:  # a feed version that is not ours: the next broker's may be
                snapshot, complaint = None, str(error)
            if snapshot is not None:
                heard_at = time.monotonic()
                self._take(snapshot)
            elif feed.malformed > unreadable:
                unreadable = feed.malformed
                complaint = f"{unreadable} unreadable snapshots, the last: {feed.last_error}"
            if complaint and complaint != said:
                said = complaint
                self._complain(complaint)
