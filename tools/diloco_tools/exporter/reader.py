"""What the exporter knows of the feed: the newest snapshot is at hand, however slow scrapes are."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from diloco_protocol.addresses import with_scheme
from diloco_protocol.feed import FeedError, FeedVersionError, Snapshot
from diloco_tools.exporter.catalogue import Reading
from diloco_tools.feed.listener import Listener
from diloco_tools.feed.model import FeedModel
from diloco_tools.feed.subscriber import FeedSubscriber


class FeedReader:
    """Listens to the feed from entering to leaving; `read` may be called from any thread.

    A broker of another feed version is reported once through `complain`, and tried on: it may be
    replaced while the exporter runs.

    Attributes:
        address: of the feed, with its tcp://.

    Raises:
        FeedAddressError: the address is none.
    """

    def __init__(self, address: str, complain: Callable[[str], None]) -> None:
        self.address = with_scheme(address)
        self._complain = complain
        self._complaint = ""
        self._lock = threading.Lock()
        self._model = FeedModel()
        self._received = 0
        self._listener = Listener(
            lambda: FeedSubscriber(self.address), self._take, self._cannot_read
        )

    def read(self) -> tuple[Reading, float]:
        """What is known of the feed, and the time by the clock of its model."""
        unreadable = self._listener.malformed + self._listener.other_versions
        with self._lock:
            reading = Reading(replace(self._model), self._received, unreadable)
            return reading, time.monotonic()

    def __enter__(self) -> "FeedReader":
        self._listener.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def _take(self, snapshot: Snapshot) -> None:
        with self._lock:
            if self._model.update(snapshot, time.monotonic()):
                self._received += 1

    def _cannot_read(self, error: FeedError) -> None:
        if isinstance(error, FeedVersionError) and str(error) != self._complaint:
            self._complaint = str(error)
            self._complain(self._complaint)
