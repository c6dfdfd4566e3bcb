"""A queue that limits the time spent on messages of peers that have not joined.

Any peer may send a `join` that takes 5 ms to read, or request the status as often as it likes. Together
such peers get a tenth of the loop's time, plus its idle time. Messages above that wait in this queue;
when it is full, the peer with the most queued bytes is disconnected.
"""

from __future__ import annotations

from collections import Counter, deque

from diloco_broker.shell.sockets import Incoming

# Share of the loop's time, and the seconds of it that may accumulate: enough for 100 simultaneous joins.
SHARE = 0.1
SAVED_AT_MOST_S = 0.5
# Limits of the queue, messages and bytes: four descriptions of 8 MiB at once, and some others.
ROOM = 1024
ROOM_BYTES = 48 << 20
# Overhead of a queued message, bytes.
A_MESSAGE = 1 << 10


class Strangers:
    """Deferred messages of peers that have not joined. Times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._waiting: deque[Incoming] = deque()
        self._bytes: Counter[bytes] = Counter()  # queued bytes by route
        self._saved_s = SAVED_AT_MOST_S
        self._saved_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def has_time(self, now: float) -> bool:
        """Whether part of their time share is left."""
        earned_s = max(0.0, now - self._saved_at) * SHARE
        self._saved_s = min(SAVED_AT_MOST_S, self._saved_s + earned_s)
        self._saved_at = now
        return self._saved_s > 0.0

    def spend(self, seconds: float) -> None:
        self._saved_s -= seconds

    def comes_later(self, message: Incoming, now: float) -> bool:
        """Whether this message must be queued; messages of one connection stay in order."""
        if not message.is_of_stranger:  # its peer joined after it sent the queued ones
            return message.route in self._bytes
        return bool(self._waiting) or not self.has_time(now)

    def put_off(self, message: Incoming) -> bytes | None:
        """Queue a message. If the queue is full, returns the route with most bytes, to disconnect."""
        self._waiting.append(message)
        self._bytes[message.route] += _size(message)
        if len(self._waiting) <= ROOM and self._bytes.total() <= ROOM_BYTES:
            return None
        ((loudest, _),) = self._bytes.most_common(1)
        self._waiting = deque(each for each in self._waiting if each.route != loudest)
        del self._bytes[loudest]
        return loudest

    def next(self) -> Incoming:
        message = self._waiting.popleft()
        self._bytes[message.route] -= _size(message)
        if not self._bytes[message.route]:
            del self._bytes[message.route]
        return message


def _size(message: Incoming) -> int:
    return A_MESSAGE + sum(memoryview(each).nbytes for each in message.frames)
