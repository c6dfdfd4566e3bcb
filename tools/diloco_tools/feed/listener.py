"""The thread that listens to the feed for every display, and connects again after a long silence.

ZeroMQ connects again by itself when a connection breaks. It does not notice a host that vanished without
a word, nor a name that has another address by now: after some silence the socket is made anew.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from diloco_protocol.addresses import with_scheme
from diloco_protocol.feed import FeedError, MalformedFeedError, Snapshot
from diloco_tools.feed.model import FeedModel, Freshness
from diloco_tools.feed.subscriber import FeedSubscriber

POLL_S = 0.25  # how long the end of the program may have to wait
RENEW_AFTER_S = 15.0  # of silence; the feed speaks once a second


class Feed(Protocol):
    """What is listened to: a `FeedSubscriber`, or a stand-in."""

    malformed: int
    last_error: str

    def receive(self, timeout_s: float) -> Snapshot | None: ...

    def close(self) -> None: ...


class Listener(threading.Thread):
    """Hands each snapshot to `take`, and what cannot be read to `complain`, both called in this thread.

    The same sentence is complained of once, until another follows or the connection is new.

    Attributes:
        malformed: frames that were no snapshots.
        other_versions: snapshots of another feed version.

    Raises:
        FeedAddressError: from `open_feed`, which is called at once: the address is none.
    """

    def __init__(
        self,
        open_feed: Callable[[], Feed],
        take: Callable[[Snapshot], None],
        complain: Callable[[FeedError], None],
        *,
        renew_after_s: float = RENEW_AFTER_S,
    ) -> None:
        super().__init__(name="feed", daemon=True)
        self._open_feed = open_feed
        self._feed = open_feed()
        self._take = take
        self._complain = complain
        self._renew_after_s = renew_after_s
        self.malformed = self.other_versions = 0
        self._ended = threading.Event()

    def run(self) -> None:
        """Until `stop`."""
        try:
            while not self._ended.is_set():
                self._listen(self._feed)
                if not self._ended.is_set():
                    self._feed.close()
                    self._feed = self._open_feed()
        finally:
            self._feed.close()

    def stop(self) -> None:
        """Have the thread end, within a quarter of a second."""
        self._ended.set()

    def close(self) -> None:
        """End the thread, or the connection of one that was never started. Again does no harm."""
        self.stop()
        if self.ident is None:
            self._feed.close()
        else:
            self.join()

    def _listen(self, feed: Feed) -> None:
        heard_at, unreadable, said = time.monotonic(), 0, ""
        while not self._ended.is_set() and time.monotonic() - heard_at < self._renew_after_s:
            complaint: FeedError | None = None
            try:
                snapshot = feed.receive(POLL_S)
            except FeedError as error:  # a feed version that is not ours: the next broker's may be
                snapshot, complaint = None, error
                self.other_versions += 1
            if snapshot is not None:
                heard_at = time.monotonic()
                self._take(snapshot)
            if feed.malformed > unreadable:
                self.malformed += feed.malformed - unreadable
                unreadable = feed.malformed
                complaint = complaint or MalformedFeedError(
                    f"{unreadable} unreadable snapshots, the last: {feed.last_error}"
                )
            if complaint is not None and str(complaint) != said:
                said = str(complaint)
                self._complain(complaint)


@dataclass(frozen=True)
class Reading:
    """What is known of a feed at `now`, seconds of the clock of its model.

    `received` counts snapshots, `unreadable` frames that were none or of another feed version.
    """

    model: FeedModel
    now: float
    received: int = 0
    unreadable: int = 0

    @property
    def is_fresh(self) -> bool:
        return self.model.freshness(self.now) is not Freshness.STALE


class FeedWatcher:
    """Keeps the newest snapshot at hand, from `start` to `close`; `read` is for any thread.

    `complain` is called as by `Listener`, and `note` with each snapshot that is news and the time by
    the clock of the model, while `lock` is held.

    Raises:
        FeedAddressError: the address is none.
    """

    def __init__(
        self,
        address: str,
        complain: Callable[[FeedError], None],
        note: Callable[[Snapshot, float], None] = lambda snapshot, now: None,
    ) -> None:
        self.address = with_scheme(address)
        self.lock = threading.Lock()
        self.model = FeedModel()
        self.received = 0
        self._note = note
        self.listener = Listener(lambda: FeedSubscriber(self.address), self._take, complain)
        self.start, self.close = self.listener.start, self.listener.close

    def read(self) -> Reading:
        """What is known of the feed now."""
        unreadable = self.listener.malformed + self.listener.other_versions
        with self.lock:
            return Reading(replace(self.model), time.monotonic(), self.received, unreadable)

    def _take(self, snapshot: Snapshot) -> None:
        with self.lock:
            now = time.monotonic()
            if self.model.update(snapshot, now):
                self.received += 1
                self._note(snapshot, now)
