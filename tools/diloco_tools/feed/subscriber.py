"""The socket on the broker's feed: one address in, snapshots out."""

import math
import time

import zmq

from diloco_protocol.addresses import DEFAULT_FEED_ADDRESS, can_be_reached, with_scheme
from diloco_protocol.feed import (
    TOPIC,
    FeedAddressError,
    MalformedFeedError,
    Snapshot,
    parse_snapshot,
)


class FeedSubscriber:
    """Subscribes to one broker's feed, now or as soon as it is there, and again after it was away.

    Only the newest snapshot is kept for a reader that is slow: what it did not read is gone, and
    `FeedModel.missed` counts it. Frames that are no snapshots are counted in `malformed`, with the
    reason of the last one in `last_error`, and skipped.

        with FeedSubscriber("tcp://127.0.0.1:8513") as feed:
            snapshot = feed.receive(timeout_s=5.0)
    """

    def __init__(self, address: str = DEFAULT_FEED_ADDRESS) -> None:
        """Connect in the background. `tcp://` may be left out of the address.

        Raises:
            FeedAddressError: the address is not one; whether somebody is there shows in `receive`.
        """
        self.address = address = with_scheme(address)
        self.malformed = 0
        self.last_error = ""
        not_one = (
            f"{address!a} is not a feed address: write tcp://HOST:PORT as diloco-broker serve "
            f"prints it, for example {DEFAULT_FEED_ADDRESS}"
        )
        if not can_be_reached(address):
            raise FeedAddressError(not_one)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        try:
            self._socket.linger = 0
            # No MAXMSGSIZE: libzmq does not reconnect after it, and the feed would be dead for good.
            self._socket.setsockopt(zmq.CONFLATE, 1)  # before connect; frames are single parts
            self._socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
            if "[" in address:  # IPv6 literals only: "localhost" goes on meaning 127.0.0.1
                self._socket.setsockopt(zmq.IPV6, 1)
            self._socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise FeedAddressError(not_one) from None

    def receive(self, timeout_s: float) -> Snapshot | None:
        """Wait at most `timeout_s` seconds for the next snapshot; None when there was none.

        Raises:
            FeedVersionError: the broker is too new or too old for this program.
        """
        deadline = time.monotonic() + timeout_s
        left_s = max(0.0, timeout_s)
        # A flood of garbage does not hold the caller for longer.
        while left_s >= 0 and self._socket.poll(math.ceil(1000 * left_s)):
            try:
                return parse_snapshot(self._socket.recv())
            except MalformedFeedError as error:
                self.malformed += 1
                self.last_error = str(error)
            left_s = deadline - time.monotonic()
        return None

    def close(self) -> None:
        """Close the socket and its context; again does no harm."""
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> "FeedSubscriber":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
