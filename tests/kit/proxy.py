"""A proxy that breaks connections at given messages of ZMTP.

The stream of ZMTP 3.1 (https://rfc.zeromq.org/spec/37/, framed as in 3.0, spec/23/) is a greeting of 64
bytes, then frames: a byte of flags (1: more frames follow, 2: the length has eight bytes, 4: a command),
the length in one byte or eight (big-endian), the body. A message is all frames up to one without "more".
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from diloco_tools.tcp_proxy import Gate, TcpProxy

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4


@dataclass(frozen=True)
class Cut:
    """A place at which a connection breaks.

    Attributes:
        up: on the way to the broker; else on the way down.
        kind: of the message there, as its header says; "greeting" and "ready" are ZMTP's own.
        skip: this number of its kind pass before, on the same connection; of ZMTP's own, which come once
            on each, on earlier ones.
        passed: bytes of it that still pass; a negative number leaves out that many at its end; None:
        all.
    """

    up: bool
    kind: str
    skip: int = 0
    passed: int | None = None


@dataclass(frozen=True)
class Seen:
    """A message that came to the proxy. With `breaks` its connection broke in it or right behind it."""

    connection: int
    up: bool
    kind: str
    header: Mapping[str, Any]
    breaks: bool


class MessageProxy(TcpProxy):
    """Breaks connections at messages, one cut after the other.

    After a cut only connections opened since then are cut: those of the worker that was hit.

    Attributes:
        cuts: those still to come; `is_done` is set once there are none.
        seen: every message, noted before any of it goes on; so what it causes is noted later.
    """

    def __init__(self, target: str, cuts: Iterable[Cut] = ()) -> None:
        super().__init__(target)
        self.cuts = list(cuts)
        self.is_done = threading.Event()
        self.seen: list[Seen] = []
        self._first = 0  # connection that the next cut may hit
        self._skipped: Counter[int] = Counter()  # by connection

    def gate(self, connection: int, up: bool) -> Gate:
        stream = _Stream()
        limit: int | None = None

        def gate(data: bytes) -> tuple[bytes, bool]:
            nonlocal limit
            passing = b""
            for unit in stream.take(data):
                if not unit.offset:
                    limit = self._meets(connection, up, unit)
                if limit is not None and limit <= unit.offset + len(unit.data):
                    return passing + unit.data[: limit - unit.offset], True
                passing += unit.data
            return passing, False

        return gate

    def _meets(self, connection: int, up: bool, unit: _Unit) -> int | None:
        """How many bytes of this message pass before the connection breaks; None: it does not."""
        limit = None
        cut = self.cuts[0] if self.cuts and connection >= self._first else None
        if cut is not None and (cut.up, cut.kind) == (up, unit.kind):
            place = connection if unit.header else -1
            if self._skipped[place] == cut.skip:
                limit = unit.size if cut.passed is None else cut.passed
                limit = min(max(limit + unit.size * (limit < 0), 0), unit.size)
                del self.cuts[0]
                self._first = self._connections
                self._skipped.clear()
            else:
                self._skipped[place] += 1
        if not self.cuts:
            self.is_done.set()
        self.seen.append(Seen(connection, up, unit.kind, unit.header, limit is not None))
        return limit


@dataclass(frozen=True)
class _Unit:
    """A greeting, command or message of `size` bytes; of a greeting the piece from `offset` on."""

    kind: str
    size: int
    data: bytes
    offset: int = 0
    header: Mapping[str, Any] = field(default_factory=dict)


class _Stream:
    """One direction of a connection, bytes in, units out.

    A greeting comes in pieces, since each end waits for some of the other's before it sends the rest.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._greeted = 0

    def take(self, data: bytes) -> Iterator[_Unit]:
        if self._greeted < GREETING_BYTES:
            piece, data = data[: (left := GREETING_BYTES - self._greeted)], data[left:]
            yield _Unit("greeting", GREETING_BYTES, piece, self._greeted)
            self._greeted += len(piece)
        self._rest += data
        while (unit := _first_unit(self._rest)) is not None:
            self._rest = self._rest[unit.size :]
            yield unit


def _first_unit(data: bytes) -> _Unit | None:
    """The command or message that the bytes begin with; None where they end before it does."""
    stop, first = 0, b""
    while True:
        if len(data) <= stop:
            return None
        flags = data[stop]
        width = 8 if flags & LONG else 1
        begin = stop + 1 + width
        end = begin + int.from_bytes(data[stop + 1 : begin], "big")
        if len(data) < begin or len(data) < end:
            return None
        first = first or data[begin:end]
        stop = end
        if not flags & MORE:
            break
    if flags & COMMAND:
        return _Unit(first[1 : 1 + first[0]].decode().lower(), stop, data[:stop])
    header = msgpack.unpackb(first)
    return _Unit(header["kind"], stop, data[:stop], header=header)
