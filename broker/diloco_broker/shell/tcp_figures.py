"""Reads the kernel's counters of a TCP connection of ZeroMQ, which does not expose its queues."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from typing import NamedTuple

if sys.platform == "linux":
    import fcntl
    import termios

# Two 64-bit counters in struct tcp_info (Linux 4.1 and later), and their offset in bytes.
_COUNTERS = struct.Struct("=QQ")
_COUNTERS_AT = 120
_SIZE = _COUNTERS_AT + _COUNTERS.size
# To end a connection at once, however much of it has not been sent.
_AT_ONCE = struct.pack("ii", 1, 0)


class TcpFigures(NamedTuple):
    """Bytes since the connection was made.

    Attributes:
        taken: bytes that ZeroMQ has read from it.
        delivered: bytes that the peer has acknowledged.
        unsent: bytes in the kernel's send queue, unsent or unacknowledged.
    """

    taken: int
    delivered: int
    unsent: int


class Descriptor:
    """A connection, identified by its file descriptor and inode, because numbers are reused.

    No method opens another descriptor: they may have run out.

    Raises:
        OSError: the connection does not exist (any more).
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._inode = os.fstat(number).st_ino

    def figures(self) -> TcpFigures | None:
        """The byte counts; None if the connection is closed, or this system does not count bytes."""
        if sys.platform != "linux":
            return None
        # Hundreds of connections are asked several times a second.
        try:
            borrowed = self._borrow()
            try:
                found = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
            finally:
                borrowed.detach()
            delivered, received = _COUNTERS.unpack_from(found, _COUNTERS_AT)
            taken = received - self._queued(termios.FIONREAD)
            return TcpFigures(taken, delivered, self._queued(termios.TIOCOUTQ))
        except (OSError, struct.error):
            return None

    def shut(self) -> None:
        """End the connection; ZeroMQ notices at once, and frees what it holds of it."""
        with contextlib.suppress(OSError):
            borrowed = self._borrow()
            try:
                borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                borrowed.shutdown(socket.SHUT_RDWR)
            finally:
                borrowed.detach()

    def _borrow(self) -> socket.socket:
        """The connection as a socket, to be detached: it stays ZeroMQ's to close.

        Raises OSError once ZeroMQ has closed it, also if its number is in use again.
        """
        if os.fstat(self.number).st_ino != self._inode:
            raise OSError("another connection has this number now")
        # With all of this said the system is asked for none of it. The family plays no part.
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=self.number)

    def _queued(self, which: int) -> int:
        return int.from_bytes(fcntl.ioctl(self.number, which, bytes(4)), sys.byteorder)
