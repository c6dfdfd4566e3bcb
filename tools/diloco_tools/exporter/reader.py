"""The thread that reads the feed: the newest snapshot is always at hand, however slow scrapes are."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from diloco_protocol.feed import FeedVersionError
from diloco_tools.exporter.catalogue import Reading
from diloco_tools.feed.model import FeedModel
from diloco_tools.feed.subscriber import FeedSubscriber

TURN_S = 0.5  # how long the end of the exporter may wait for this thread


class FeedReader:
    """Reads `feed` from entering to leaving; `read` may be called from any thread.

    A broker of another feed version is reported once through `complain`, and tried on: it may be
    replaced while the exporter runs.
    """

    def __init__(self, feed: FeedSubscriber, complain: Callable[[str], None]) -> None:
        self._feed = feed
        self._complain = complain
        self._complaint = ""
        self._lock = threading.Lock()
        self._model = FeedModel()
        self._received = 0
        self._unreadable = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diloco-feed", daemon=True)

    def read(self) -> tuple[Reading, float]:
        """What is known of the feed, and the time by the clock of its model."""
        with self._lock:
            reading = Reading(replace(self._model), self._received, self._unreadable)
            return reading, time.monotonic()

    def __enter__(self) -> "FeedReader":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        other_versions = 0
        while not self._ending.is_set():
            snapshot = None
            try:
                snapshot = self._feed.receive(TURN_S)
            except FeedVersionError as error:
                other_versions += 1
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    self._complain(self._complaint)
            with self._lock:
                self._unreadable = self._feed.malformed + other_versions
                if snapshot is not None and self._model.update(snapshot, time.monotonic()):
                    self._received += 1
