"""A TCP proxy that breaks connections at given places."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence

JOIN_WITHIN_S = 10.0


class CuttingProxy:
    """Forwards bytes both ways, and breaks the connection at hand whenever a count is reached.

    Args:
        target: where to, such as tcp://127.0.0.1:8512.
        cuts: ascending numbers of bytes, over all connections and both directions together. The byte
            of that number is the last one its connection forwards.

    Attributes:
        address: where it listens.
        cuts: those still to come.
    """

    def __init__(self, target: str, cuts: Sequence[int]) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = list(cuts)
        self._count = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def __enter__(self) -> CuttingProxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closing = True
            for each in self._open:
                _shut(each)
        _shut(self._listener)
        self._listener.close()
        for thread in self._threads:
            thread.join(JOIN_WITHIN_S)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                far = socket.create_connection(self._target, JOIN_WITHIN_S)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
                if self._closing:
                    _shut(near)
            closed = threading.Barrier(2)
            self._start(self._pump, near, far, closed)
            self._start(self._pump, far, near, closed)

    def _pump(self, source: socket.socket, sink: socket.socket, closed: threading.Barrier) -> None:
        """One direction, until either end is gone or a cut comes."""
        try:
            while data := source.recv(4096):
                with self._lock:
                    last = bool(self.cuts) and self._count + len(data) >= self.cuts[0]
                    if last:
                        data = data[: self.cuts.pop(0) - self._count]
                    self._count += len(data)
                sink.sendall(data)
                if last:
                    break
        except OSError:
            pass  # the other direction has shut both
        _shut(source)
        _shut(sink)
        closed.wait(JOIN_WITHIN_S)  # neither closes what the other still reads from
        with self._lock:
            self._open.discard(source)
        source.close()


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # shut already
        end.shutdown(socket.SHUT_RDWR)
