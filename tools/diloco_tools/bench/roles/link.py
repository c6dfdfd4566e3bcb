"""The role "link": a network link of a given delay each way and a given number of bytes a second.

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
from typing import Any

from diloco_tools.tcp_proxy import Gate, TcpProxy

PIECE = 1 << 16  # bytes: half a millisecond at 1 Gb/s
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
        self.forget()

    def forget(self) -> None:
        """Let what was used up to now not count."""
        with self._lock:
            self._began = self._ended = 0.0
            self._bytes = self._whole_bytes = 0

    @property
    def share(self) -> float:
        """Bytes over what the link could have carried in that time; 0 before anything large."""
        with self._lock:
            if not self._began:
                return 0.0
            return self._bytes / (self._ended - self._began) / self._rate

    def room(self) -> float:
        """Seconds until more may be queued."""
        with self._lock:
            return self._free_at - time.monotonic() - QUEUE_S

    def put(self, size: int) -> float:
        """Queue `size` bytes; the moment at which they come out."""
        with self._lock:
            begins = max(time.monotonic(), self._free_at)
            self._free_at = begins + size / self._rate
            if size >= LARGE:
                self._began = self._began or begins
            if self._began:
                self._whole_bytes += size
            if size >= LARGE:
                self._bytes, self._ended = self._whole_bytes, self._free_at
            return self._free_at + self._delay


class SlowProxy(TcpProxy):
    """Leads its connections through a lane up and a lane down, which they share."""

    def __init__(self, target: str, bytes_per_s: float, delay_s: float) -> None:
        self.up, self.down = Lane(bytes_per_s, delay_s), Lane(bytes_per_s, delay_s)
        super().__init__(target)

    def forward(self, source: socket.socket, sink: socket.socket, gate: Gate, *, up: bool) -> None:
        lane = self.up if up else self.down
        under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        writer = self.in_background(_write, sink, under_way)
        data = b"more"
        while data:
            room = lane.room()
            if room > 0:
                time.sleep(room)
                continue  # another connection may have taken it
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


class Links:
    """Some links, by the ports that lead into them."""

    def __init__(self, _: object) -> None:
        self._links: dict[int, SlowProxy] = {}

    def open(self, target: str, bits_per_s: float, delay_s: float) -> dict[str, Any]:
        """Lead what connects to a new port to `target`, such as tcp://127.0.0.1:8512."""
        link = SlowProxy(target, bits_per_s / 8, delay_s)
        self._links[link.port] = link
        return {"port": link.port}

    def forget(self, port: int) -> None:
        """Let what was used up to now of what leads from this port not count."""
        self._links[port].up.forget()
        self._links[port].down.forget()

    def shares(self, port: int) -> dict[str, Any]:
        """What share was used of it, to where it leads and back."""
        return {"up": self._links[port].up.share, "down": self._links[port].down.share}
