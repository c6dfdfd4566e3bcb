"""A TCP proxy between one worker and the broker, which cuts their connections when it is told to.

The worker connects to the proxy's address for all of its lives; the broker behind it may die and come
back.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

CONNECT_WITHIN_S = 5.0
PIECE = 1 << 16  # bytes read at a time


class Proxy:
    """Forwards bytes both ways until it is told to cut. A context manager.

    Args:
        host, port: of the broker.

    Attributes:
        address: where the worker connects to, such as tcp://127.0.0.1:40123.
        cuts: connections that were broken on purpose.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._left: int | None = None  # bytes that still pass before a cut
        self._is_shut = False
        self._is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def cut(self) -> None:
        """Break every connection now."""
        with self._lock:
            self._cut()

    def cut_within(self, count: int) -> None:
        """Break every connection once so many more bytes have passed, both ways together."""
        with self._lock:
            self._left = count

    @property
    def is_armed(self) -> bool:
        """Whether a cut is still to come."""
        with self._lock:
            return self._left is not None

    def shut(self) -> None:
        """Break every connection and let nobody through until `open`."""
        with self._lock:
            self._is_shut = True
            self._cut()

    def open(self) -> None:
        """Let connections through again."""
        with self._lock:
            self._is_shut = False

    def close(self) -> None:
        """Break every connection and accept no more."""
        with self._lock:
            self._is_closed = True
            for near, far in self._pairs:
                _shut(near)
                _shut(far)
        _shut(self._listener)
        self._listener.close()

    def _cut(self) -> None:
        self.cuts += len(self._pairs)
        self._left = None
        for near, far in self._pairs:
            _shut(near)
            _shut(far)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            far = self._reach()
            if far is None:
                near.close()
                continue
            pair = (near, far)
            with self._lock:
                if self._is_shut or self._is_closed:
                    near.close()
                    far.close()
                    continue
                self._pairs.add(pair)
            over = threading.Event()
            for source, sink in (pair, pair[::-1]):
                threading.Thread(
                    target=self._pump, args=(source, sink, pair, over), daemon=True
                ).start()

    def _reach(self) -> socket.socket | None:
        try:
            far = socket.create_connection(self._target, CONNECT_WITHIN_S)
        except OSError:
            return None  # the broker is down
        far.settimeout(None)
        return far

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        pair: tuple[socket.socket, socket.socket],
        over: threading.Event,
    ) -> None:
        """One direction, until either end is gone or a cut comes. The second to end closes both."""
        with contextlib.suppress(OSError):  # cut, or gone
            while data := source.recv(PIECE):
                passing, is_last = self._passing(data)
                sink.sendall(passing)
                if is_last:
                    self.cut()
        _shut(source)
        _shut(sink)
        with self._lock:
            if not over.is_set():
                over.set()
                return
            self._pairs.discard(pair)
        for end in pair:
            end.close()

    def _passing(self, data: bytes) -> tuple[bytes, bool]:
        """What of this still passes, and whether the cut comes behind it."""
        with self._lock:
            if self._left is None:
                return data, False
            passing = data[: self._left]
            self._left -= len(passing)
            if self._left > 0:
                return passing, False
            self._left = None
            return passing, True


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # shut already
        end.shutdown(socket.SHUT_RDWR)
