"""A network link with a given delay each way and a given number of bytes a second.

Bytes are sent one after the other, as on a wire: each piece leaves after the one before it, and arrives
`delay` later. The queue is bounded, so a sender is limited to the link's speed. All connections share
it in each direction. Nothing is lost.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

from diloco_tools.tcp_proxy import PIECE, Gate, TcpProxy

LARGE = 1 << 12  # bytes: more than a message without a chunk
QUEUE_S = 0.01  # seconds of data that may be queued


class Lane:
    """One direction of the link, and its utilisation.

    The utilisation is that from the first large piece to the last; before and after these are only
    single messages.
    """

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        self._rate = bytes_per_s
        self._delay = delay_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._pieces: list[tuple[float, float, int]] = []  # begin and end of sending, bytes

    def forget(self) -> None:
        """Start counting anew."""
        with self._lock:
            self._pieces.clear()

    @property
    def share(self) -> float:
        """Bytes over the capacity of the link in that time; 0 before a large piece."""
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
        """Queue `size` bytes. Returns the time of their arrival."""
        with self._lock:
            begins = max(time.monotonic(), self._free_at)
            self._free_at = begins + size / self._rate
            self._pieces.append((begins, self._free_at, size))
            return self._free_at + self._delay


class SlowProxy(TcpProxy):
    """A proxy whose connections share a lane up and a lane down."""

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
            while (room := lane.room()) > 0:  # other connections queue as well
                time.sleep(room)
            try:
                data = source.recv(PIECE)
            except OSError:
                data = b""
            under_way.put((lane.put(len(data)), data))  # b"" is the end
        writer.join()


def _write(sink: socket.socket, under_way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    """Send each piece at its time."""
    with contextlib.suppress(OSError):
        while True:
            at, data = under_way.get()
            if not data:
                return
            time.sleep(max(0.0, at - time.monotonic()))
            sink.sendall(data)
