"""The receive queue: delivers messages, those of unauthenticated peers within a share of the time.

Any peer may send a `join` that takes 5 ms to read, or ask for the status at any rate. All peers that
have not joined get a tenth of the loop's time together, and what members and tensor work leave.
Messages beyond that wait here; a peer that sends more than may wait is disconnected.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from diloco_broker.shell.sockets import Incoming
from diloco_protocol.frames import LONGEST_OF_A_MEMBER, LONGEST_UNAUTHENTICATED, MAY_BE_LONG, SHORT

# Share of the loop's time, and the seconds of it that may accumulate: enough for 100 simultaneous joins.
SHARE = 0.1
SAVED_AT_MOST_S = 0.5
# Limits of the queue, messages and bytes: four descriptions of 8 MiB at once, and some others.
ROOM = 1024
ROOM_BYTES = 48 << 20
# Overhead of a queued message, bytes.
A_MESSAGE = 1 << 10


class ReceiveQueue:
    """Delivers messages in turn.

    Args:
        knows: whether a connection belongs to a member.
        take: handles a message.
        end: disconnects a peer; its second argument says what the peer did.
        least_s: seconds that a message of an unauthenticated peer is charged with at least. A relay sets
            it, because its hub spends more time on such a message than the relay itself.
    """

    def __init__(
        self,
        knows: Callable[[bytes], bool],
        take: Callable[[Incoming], None],
        end: Callable[[bytes, str], None],
        least_s: float = 0.0,
    ) -> None:
        self._knows, self._take, self._end, self._least_s = knows, take, end, least_s
        self._waiting: deque[Incoming] = deque()  # messages of unauthenticated peers
        self._bytes: Counter[bytes] = Counter()  # of them, by route
        self._saved_s = SAVED_AT_MOST_S  # what is left of their share of the time
        self._saved_at = 0.0

    def __bool__(self) -> bool:
        """Whether messages wait."""
        return bool(self._waiting)

    def deliver(self, incoming: Incoming, now: float) -> None:
        """Handle a message now or later. Messages of one connection stay in order."""
        if incoming.is_left_behind and not self._knows(incoming.route):
            return  # the last message of a member counts; of others there may be thousands
        if not incoming.is_unauthenticated:
            if incoming.route in self._bytes:  # its peer joined after it sent the waiting ones
                self._put_off(incoming)
            else:
                self._take(incoming)
        elif self._waiting or not self._has_time(now):
            self._put_off(incoming)
        else:
            self._take_timed(incoming)

    def _put_off(self, incoming: Incoming) -> None:
        """Let a message wait. If the queue is full, disconnect the peer with the most bytes in it."""
        longest = max((memoryview(each).nbytes for each in incoming.frames), default=0)
        if longest > LONGEST_UNAUTHENTICATED and not self._knows(incoming.route):
            self._end(incoming.route, "a message too long to wait, of a peer that had not joined")
            return
        self._waiting.append(incoming)
        self._bytes[incoming.route] += _size(incoming)
        if len(self._waiting) > ROOM or self._bytes.total() > ROOM_BYTES:
            ((loudest, _),) = self._bytes.most_common(1)
            self._waiting = deque(each for each in self._waiting if each.route != loudest)
            del self._bytes[loudest]
            self._end(loudest, "too many messages of a peer that had not joined")

    def catch_up(self, clock: Callable[[], float], seconds: float, *, is_idle: bool) -> None:
        """Handle waiting messages for `seconds` at most, within their share unless the loop is idle."""
        until = time.perf_counter() + seconds
        while self._waiting and (is_idle or self._has_time(clock())):
            incoming = self._waiting.popleft()
            self._bytes[incoming.route] -= _size(incoming)
            if not self._bytes[incoming.route]:
                del self._bytes[incoming.route]
            self._take_timed(incoming)
            if time.perf_counter() > until:
                return

    def _has_time(self, now: float) -> bool:
        """Whether part of the share of unauthenticated peers is left (monotonic clock)."""
        earned_s = max(0.0, now - self._saved_at) * SHARE
        self._saved_s = min(SAVED_AT_MOST_S, self._saved_s + earned_s)
        self._saved_at = now
        return self._saved_s > 0.0

    def _take_timed(self, incoming: Incoming) -> None:
        began = time.thread_time()
        self._take(incoming)
        self._saved_s -= max(self._least_s, time.thread_time() - began)

    def longest_header(self, route: bytes, frames: Sequence[Any]) -> int:
        """The longest header that this connection may send, in bytes."""
        header = memoryview(frames[0] if frames else b"")
        if header.nbytes <= SHORT:
            return SHORT
        if self._knows(route):
            return LONGEST_OF_A_MEMBER
        beginning = bytes(header[:32])
        return LONGEST_UNAUTHENTICATED if any(kind in beginning for kind in MAY_BE_LONG) else SHORT


def _size(message: Incoming) -> int:
    return A_MESSAGE + sum(memoryview(each).nbytes for each in message.frames)
