"""What the system knows of a TCP connection of ZeroMQ, which tells nothing of its queues."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

if sys.platform == "linux":
    import fcntl
    import select
    import termios

# struct tcp_info of Linux 4.1 and later: two counters of 64 bits, in bytes.
_COUNTERS = struct.Struct("=QQ")
_COUNTERS_AT = 120
_ENOUGH = _COUNTERS_AT + _COUNTERS.size


@dataclass(frozen=True)
class TcpFigures:
    """Bytes since the connection was made.

    Attributes:
        taken: what ZeroMQ has read of it.
        delivered: what the other side has acknowledged.
        unsent: what the system holds, to be sent or to be acknowledged.
    """

    taken: int
    delivered: int
    unsent: int


class Descriptor:
    """A connection by its file descriptor, and by what tells it from a later one of the same number.

    Nothing here needs another descriptor: they may have run out.

    Raises:
        OSError: there is no such connection (any more).
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._inode = os.fstat(number).st_ino

    def is_open(self) -> bool:
        """False once ZeroMQ has closed it, also where the number is in use again."""
        try:
            return os.fstat(self.number).st_ino == self._inode
        except OSError:
            return False

    def figures(self) -> TcpFigures | None:
        """None where the connection is gone, or this system does not count."""
        if sys.platform != "linux" or not self.is_open():
            return None
        try:
            with _borrowed(self.number) as borrowed:
                found = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ENOUGH)
            waiting = _queued(self.number, termios.FIONREAD)
            unsent = _queued(self.number, termios.TIOCOUTQ)
        except OSError:
            return None
        if len(found) < _ENOUGH:
            return None
        delivered, received = _COUNTERS.unpack_from(found, _COUNTERS_AT)
        return TcpFigures(received - waiting, delivered, unsent)

    def shut(self) -> None:
        """End the connection; ZeroMQ notices at once, and frees what it holds of it."""
        with contextlib.suppress(OSError):
            if self.is_open():
                with _borrowed(self.number) as borrowed:
                    # When ZeroMQ closes it the other side is told at once, however much it has to send.
                    borrowed.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    borrowed.shutdown(socket.SHUT_RDWR)


class Arrivals:
    """Tells when bytes have come of connections that ZeroMQ reads.

    Attributes:
        descriptor: to be polled, `take` when it has something; None where the system cannot tell.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll() if sys.platform == "linux" else None
        self.descriptor = None if self._epoll is None else self._epoll.fileno()

    def arm(self, number: int) -> None:
        """Tell of the next bytes of the connection with this descriptor, once."""
        if sys.platform != "linux" or self._epoll is None:
            return
        once = select.EPOLLIN | select.EPOLLONESHOT
        with contextlib.suppress(OSError):  # it has ended
            try:
                self._epoll.modify(number, once)
            except FileNotFoundError:
                self._epoll.register(number, once)

    def take(self) -> list[int]:
        """The descriptors of those of whom bytes have come."""
        return [] if self._epoll is None else [number for number, _ in self._epoll.poll(0)]

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The connection as a socket; it stays ZeroMQ's to close."""
    # With all of this said the system is asked for none of it. The family plays no part in what is used.
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()


def _queued(descriptor: int, which: int) -> int:
    found: int = struct.unpack("i", fcntl.ioctl(descriptor, which, bytes(4)))[0]
    return found
