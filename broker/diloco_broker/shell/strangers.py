"""Messages of those who have not joined, which come after all others where there are too many.

Anybody may send a `join` that takes 5 ms to read, or ask for the status as often as they like. Together
they get a tenth of the loop's time, and whatever members and tensors leave of it. What is above that
waits here, and whoever sends more than there is room for is ended.
"""

from __future__ import annotations

from collections import Counter, deque

from diloco_broker.shell.sockets import Incoming

# Of the time that passes, and what may have been saved of it, seconds: a hundred workers join at once.
SHARE = 0.1
SAVED_AT_MOST_S = 0.5
# Messages that wait, and their bytes: four descriptions of 8 MiB at once, and room for others.
ROOM = 1024
ROOM_BYTES = 48 << 20
# What a message costs besides its bytes.
A_MESSAGE = 1 << 10


class Strangers:
    """See the head of this module. Times are seconds of any clock that goes on steadily."""

    def __init__(self) -> None:
        self._waiting: deque[Incoming] = deque()
        self._bytes: Counter[bytes] = Counter()  # of what waits, by route
        self._saved_s = SAVED_AT_MOST_S
        self._saved_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def has_time(self, now: float) -> bool:
        """Is there something left of their share?"""
        earned_s = max(0.0, now - self._saved_at) * SHARE
        self._saved_s = min(SAVED_AT_MOST_S, self._saved_s + earned_s)
        self._saved_at = now
        return self._saved_s > 0.0

    def spend(self, seconds: float) -> None:
        self._saved_s -= seconds

    def comes_later(self, message: Incoming, now: float) -> bool:
        """Does this one have to wait? Those of one connection stay in order."""
        if not message.is_of_stranger:  # or it was, when what it sent before came
            return message.route in self._bytes
        return bool(self._waiting) or not self.has_time(now)

    def put_off(self, message: Incoming) -> bytes | None:
        """Have it wait. Returns whom there is no room for, by route: of whom most waits."""
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
