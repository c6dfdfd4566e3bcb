"""A network link of a given delay each way and a given number of bytes a second.

Bytes leave as if they had been put on a wire one after the other: each piece is on its way once the
one before it is out, and comes out `delay` later. What waits to be put on the wire is bounded, so a
sender feels the link's speed. All connections share it in each direction. Nothing is lost.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

from diloco_tools.tcp_proxy import PIECE, Gate, TcpProxy

LARGE = 1 << 12  # bytes: more than messages without a chunk have
QUEUE_S = 0.01  # how much may wait to be put on the wire


class Lane:
    """One direction of the link, and what share of it was used.

    The share is that of all bytes from the first large piece to the last; what travels before and
    behind these are single messages.
    """

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        self._rate = bytes_per_s
        self._delay = delay_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._pieces: list[tuple[float, float, int]] = []  # when on the wire and off it, bytes

    def forget(self) -> None:
        """Start counting anew."""
        with self._lock:
            self._pieces.clear()

    @property
    def share(self) -> float:
        """Bytes over what the link could have carried in that time; 0 before anything large."""
        with self._lock:
            large = [i for i, (_, _, size) in enumerate(self._pieces) if size >= LARGE]
            if not large:
                return 0.0
            used = self._pieces[large[0] : large[-1] + 1]
        seconds = used[-1][1] - used[0][0]
        return sum(size for _, _, size in used) / seconds / self._rate

    def room(self) -> float:
        """Seconds until more may be queued."""
        with self._lock:
            return self._free_at - time.monotonic() - QUEUE_S

    def put(self, size: int) -> float:
        """Queue `size` bytes; the moment at which they come out."""
        with self._lock:
            begins = max(time.monotonic(), self._free_at)
            self._free_at = begins + size / self._rate
            self._pieces.append((begins, self._free_at, size))
            return self._free_at + self._delay


class SlowProxy(TcpProxy):
    """Leads its connections through a lane up and a lane down, which they share."""

    def __init__(self, target: str, bytes_per_s: float, delay_s: float) -> None:
        self.up, self.down = Lane(bytes_per_s, delay_s), Lane(bytes_per_s, delay_s)
        super().__init__(target)

    def forget(self) -> None:
        """Start counting anew."""
        self.up.forget()
        self.down.forget()

    def forward(self, source: socket.socket, sink: socket.socket, gate: Gate, *, up: bool) -> None:
        lane = self.up if up else self.down
        under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        writer = self.in_background(_write, sink, under_way)
        data = b"more"
        while data:
            while (room := lane.room()) > 0:  # another connection may have taken it
                time.sleep(room)
            try:
                data = source.recv(PIECE)
            except OSError:
                data = b""
            under_way.put((lane.put(len(data)), data))  # b"" is the end
        writer.join()


def _write(sink: socket.socket, under_way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    """Send each piece at its moment."""
    with contextlib.suppress(OSError):
        while True:
            at, data = under_way.get()
            if not data:
                return
            time.sleep(max(0.0, at - time.monotonic()))
            sink.sendall(data)
