"""The socket on the broker's feed, and the thread that reads it for every display."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq

from diloco_protocol.addresses import DEFAULT_FEED_ADDRESS, FEED_PORT, with_scheme
from diloco_protocol.clients import Keys
from diloco_protocol.clients.address_file import is_address, wrong_address
from diloco_protocol.clients.handshake import HandshakeMonitor
from diloco_protocol.clients.mistaken_address import is_a_control_address
from diloco_protocol.feed import (
    TOPIC,
    FeedAddressError,
    FeedError,
    FeedRefusedError,
    MalformedFeedError,
    Snapshot,
    parse_snapshot,
)
from diloco_tools.monitor.feed.model import FeedModel, Freshness

POLL_S = 0.25  # longest delay of the end of the program
RENEW_AFTER_S = 15.0  # without a snapshot; one a second is usual
KNOCK_AGAIN_S = 2.0  # after the broker rejected our key: it may be allowed again


class FeedSubscriber:
    """A subscription to a broker's feed, which reconnects whenever the broker is back.

    ZeroMQ reconnects when a connection breaks. It does not notice a host that vanished, or a name whose
    address has changed: after `renew_after_s` without a snapshot the socket is replaced. It is also
    replaced `KNOCK_AGAIN_S` after the broker rejected our key, since ZeroMQ stops trying then.

    A slow reader gets only the newest snapshot, and `FeedModel.missed` counts the others. Frames that
    are not snapshots are skipped and counted in `malformed`, with the last reason in `last_error`.

        with FeedSubscriber("tcp://127.0.0.1:8513") as feed:
            snapshot = feed.receive(timeout_s=5.0)
    """

    def __init__(
        self,
        address: str = DEFAULT_FEED_ADDRESS,
        renew_after_s: float = RENEW_AFTER_S,
        *,
        keys: Keys | None = None,
    ) -> None:
        """Connect in the background. `tcp://` may be omitted; `keys` are ours.

        Given the control address, it asks the broker there for the feed's.

        Raises:
            FeedAddressError: the address is invalid.
        """
        self.address = self._given = with_scheme(address, FEED_PORT)
        self.malformed = 0
        self.last_error = ""
        self._renew_after_s = renew_after_s
        self._keys = keys
        self._context = zmq.Context()
        try:
            if not is_address(self.address):
                raise zmq.ZMQError
            self._connect(self._given)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise FeedAddressError(str(wrong_address("The feed address", address))) from None

    def _connect(self, address: str) -> None:
        self.address = address
        self._renew_at = time.monotonic() + self._renew_after_s
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        # No MAXMSGSIZE: libzmq would not reconnect after exceeding it.
        self._socket.setsockopt(zmq.CONFLATE, 1)  # before connect; frames are single parts
        self._socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
        if "[" in self.address:  # IPv6 literals only: "localhost" still means 127.0.0.1
            self._socket.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            self._keys.lock(self._socket)
        self._handshake = HandshakeMonitor(
            self._socket, self.address, self._keys, is_a_control_address
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._handshake.socket, zmq.POLLIN)
        self._socket.connect(self.address)

    def _disconnect(self) -> None:
        if not self._socket.closed:
            self._handshake.close()
            self._socket.close()

    def receive(self, timeout_s: float) -> Snapshot | None:
        """Wait at most `timeout_s` seconds for the next snapshot; None on timeout.

        Raises:
            FeedVersionError: the broker is too new or too old for this program.
            FeedRefusedError: the broker requires a key, or another one, or does not name its feed. A
                later call tries again.
        """
        until = time.monotonic() + timeout_s
        if self._socket.closed:
            time.sleep(max(0.0, min(until, self._renew_at) - time.monotonic()))
        if time.monotonic() >= self._renew_at and (self._socket.closed or not self._socket.poll(0)):
            self._disconnect()
            self._connect(self._given)
        if self._socket.closed:
            return None
        left_s = max(0.0, until - time.monotonic())
        while left_s >= 0 and (ready := dict(self._poller.poll(math.ceil(1000 * left_s)))):
            if self._socket in ready:
                try:
                    snapshot = parse_snapshot(self._socket.recv())
                except MalformedFeedError as error:
                    self.malformed += 1
                    self.last_error = str(error)
                else:
                    self._renew_at = time.monotonic() + self._renew_after_s
                    return snapshot
            elif self._handshake.look() or self._handshake.is_worth_telling:
                refusal = FeedRefusedError(str(self._handshake.failure))
                feed = self._handshake.meant
                self._disconnect()
                if not is_address(feed) or self.address != self._given:
                    self._renew_at = time.monotonic() + KNOCK_AGAIN_S
                    raise refusal
                self._connect(feed)
            left_s = until - time.monotonic()
        return None

    def close(self) -> None:
        """Close the socket and its context. Idempotent."""
        if not self._context.closed:
            self._disconnect()
            self._context.term()

    def __enter__(self) -> "FeedSubscriber":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class Reading:
    """The state of a feed at `now`, seconds of the clock of its model."""

    model: FeedModel
    now: float
    received: int = 0  # snapshots
    unreadable: int = 0  # frames that were malformed, or of another feed version

    @property
    def is_fresh(self) -> bool:
        return self.model.freshness(self.now) is not Freshness.STALE

    def why_dead(self, silence_s: float) -> str | None:
        """Why the broker counts as dead; None while it is alive or stopping.

        A restart would not help a run that waits for workers, is paused, or cannot save, so its broker
        counts as alive.
        """
        model = self.model
        if model.snapshot is None:
            return model.refusal or "no snapshot has arrived yet"
        age = model.age_s(self.now)
        is_silent = model.snapshot.state != "stopping" and age > silence_s
        return f"the broker has sent nothing for {age:.0f} s" if is_silent else None


class Listener(threading.Thread):
    """Keeps the newest snapshot of a feed; a context manager. `read` may be called in any thread.

    Each newer snapshot is passed to `take` while `lock` is held, and each error to `complain`, both in
    this thread. An error is repeated after `RENEW_AFTER_S`, or when another error or a snapshot came in
    between.
    """

    def __init__(
        self,
        feed: FeedSubscriber,
        take: Callable[[Snapshot], None],
        complain: Callable[[FeedError], None],
    ) -> None:
        super().__init__(name="feed", daemon=True)
        self.feed, self.address = feed, feed.address
        self.lock = threading.Lock()
        self.model = FeedModel()
        self.received = 0
        self._take, self._complain = take, complain
        self._other_versions = 0  # snapshots of another feed version
        self._ended = threading.Event()

    def run(self) -> None:
        """Until `stop`."""
        unreadable, said, said_at = 0, "", 0.0
        with self.feed as feed:
            while not self._ended.is_set():
                complaint: FeedError | None = None
                try:
                    if (snapshot := feed.receive(POLL_S)) is not None:
                        self._hear(snapshot)
                        said = ""
                except FeedRefusedError as error:
                    complaint = error
                except FeedError as error:  # another version: the next broker may have ours
                    complaint = error
                    self._other_versions += 1
                if feed.malformed > unreadable:
                    unreadable = feed.malformed
                    complaint = complaint or MalformedFeedError(
                        f"{unreadable} unreadable snapshots, the last: {feed.last_error}"
                    )
                now = time.monotonic()
                if complaint and (str(complaint) != said or now - said_at >= RENEW_AFTER_S):
                    said, said_at = str(complaint), now
                    with self.lock:
                        self.model.cannot_read(complaint)
                    self._complain(complaint)

    def _hear(self, snapshot: Snapshot) -> None:
        with self.lock:
            if self.model.update(snapshot, time.monotonic()):
                self.received += 1
                self._take(snapshot)

    def read(self) -> Reading:
        """The state of the feed now."""
        unreadable = self.feed.malformed + self._other_versions
        with self.lock:
            return Reading(replace(self.model), time.monotonic(), self.received, unreadable)

    def stop(self) -> None:
        """Have the thread end within `POLL_S`."""
        self._ended.set()

    def close(self) -> None:
        """End the thread, or the connection of one that never started. Idempotent."""
        self.stop()
        if self.ident is None:
            self.feed.close()
        else:
            self.join()

    def __enter__(self) -> "Listener":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
