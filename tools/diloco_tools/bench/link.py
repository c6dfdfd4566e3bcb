"""A link of our own: so much delay each way, so many bytes a second, shared by all its connections.

Bytes leave as if they had been put on a wire one after the other: each piece is on its way once the
one before it is out, and comes out `delay` later. What waits to be put on the wire is bounded, so a
sender feels the link's speed. Connections share it in each direction. It stands for a network
without loss.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diloco_tools.bench.raw import HOST

if TYPE_CHECKING:
    from diloco_tools.bench.actor import Action

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
        """Queue so many bytes; the moment at which they come out."""
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


class Link:
    """The actions of the role "link"."""

    def __init__(self) -> None:
        self._lanes: dict[int, tuple[Lane, Lane]] = {}

    @property
    def actions(self) -> Mapping[str, Action]:
        return {"open": self.open, "forget": self.forget, "shares": self.shares}

    def open(self, port: int, bits_per_s: float, delay_s: float) -> dict[str, Any]:
        """Lead what connects to a new port to `port`."""
        listener = socket.create_server((HOST, 0))
        lanes = (Lane(bits_per_s / 8, delay_s), Lane(bits_per_s / 8, delay_s))
        _in_background(_accept, listener, port, lanes)
        inlet = listener.getsockname()[1]
        self._lanes[inlet] = lanes
        return {"port": inlet}

    def forget(self, port: int) -> None:
        """Let what was used up to now of what leads from this port not count."""
        for lane in self._lanes[port]:
            lane.forget()

    def shares(self, port: int) -> dict[str, Any]:
        """What share was used of it, to where it leads and back."""
        up, down = self._lanes[port]
        return {"up": up.share, "down": down.share}


def _in_background(target: Any, *arguments: Any) -> None:
    threading.Thread(target=target, args=arguments, daemon=True).start()


def _accept(listener: socket.socket, port: int, lanes: tuple[Lane, Lane]) -> None:
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((HOST, port))
        except OSError:
            near.close()
            continue
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink, lane in ((near, far, lanes[0]), (far, near, lanes[1])):
            under_way: deque[tuple[float, bytes]] = deque()
            news = threading.Condition()
            _in_background(_read, source, lane, under_way, news)
            _in_background(_write, sink, under_way, news)


def _read(
    source: socket.socket,
    lane: Lane,
    under_way: deque[tuple[float, bytes]],
    news: threading.Condition,
) -> None:
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
        with news:  # b"" is the end
            under_way.append((lane.put(len(data)), data))
            news.notify()


def _write(
    sink: socket.socket, under_way: deque[tuple[float, bytes]], news: threading.Condition
) -> None:
    with contextlib.suppress(OSError):
        while True:
            with news:
                news.wait_for(lambda: under_way)
                at, data = under_way.popleft()
            left = at - time.monotonic()
            if left > 0:
                time.sleep(left)
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)
