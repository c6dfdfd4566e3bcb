"""The part of a follower's I/O thread: it moves the chunks of this rank, and decides nothing.

The leader's session commands sends, is notified of arrivals, and knows when a version is complete.
The follower returns credit for its chunks itself. A link runs it in place of a session and its
executor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_protocol import VersionId
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.dtypes import is_quantized, whole_dtype
from diloco_protocol.messages import Chunk, Credit
from diloco_worker.session import effects, events
from diloco_worker.session.compatibility import OnTerms, Terms
from diloco_worker.session.connection import Phase
from diloco_worker.session.downloads import CREDIT_BATCH
from diloco_worker.transport import between_ranks as ranks
from diloco_worker.transport.executor import Network
from diloco_worker.transport.fragment_buffers import FragmentBuffers


@dataclass(eq=False, repr=False)
class Follower(OnTerms):
    """Handles the records of the leader and the chunks of the broker."""

    network: Network
    connect: Callable[[str, str], object]  # to the broker, by its address or a Unix socket
    buffers: FragmentBuffers
    leader: ranks.LeaderConnection
    phase: Phase = Phase.NEW
    payload: Any = None  # of the received chunk
    last: bytes = b""  # the leader's last message
    uploads: set[int] = field(default_factory=set)  # push ids of seeding pushes
    terms: Terms | None = None
    _token: bytes = b""  # of the leader's session
    _is_open: bool = False
    _owed: int = 0  # credits not yet given back
    # By fragment, the newest version, and the chunks of this rank's share that it lacks.
    _arriving: dict[int, tuple[VersionId, set[int]]] = field(default_factory=dict)
    _offered: dict[int, int] = field(default_factory=dict)  # by fragment, the last push id
    # Chunks of pushes that are not laid out yet.
    _waiting: list[effects.SendChunk] = field(default_factory=list)

    def wakes_at(self) -> float | None:
        return None

    def feed(self, event: ranks.Record) -> None:  # noqa: C901, PLR0912  a case for each event
        match event:
            # From the training thread.
            case events.ShareOut(_, terms):
                self.terms = terms
            case events.Offer(push):
                self._end_push(self._offered.get(push.fragment))
                self._offered[push.fragment] = push.push_id
                self._send_waiting()
            case events.Depart():
                self.phase = Phase.LEFT
            # From the leader.
            case ranks.OpenBulk():
                self._open(event)
            case effects.Close():
                self._close()
            case effects.SendChunk():
                self._send(event)
            case ranks.Seed(push) if self.buffers.numbers[push.fragment]:
                self.uploads.add(push.push_id)
                if self.buffers.prepare(push.push_id, self._part(push.fragment), push.base):
                    self._send_waiting()
            case effects.PushOver(push_id):
                self._end_push(push_id)
            case ranks.LeaderLeft(last):
                self.last = self.last or last
                self.phase = Phase.LEFT
            # From the buffers, after a long copy.
            case events.Prepared():
                self._send_waiting()
            # From the broker.
            case events.Received(Chunk() as chunk) if self._is_open:
                self._take(chunk)
            case events.Received(message):  # the session is void
                self._break(
                    str(getattr(message, "text", "")) or f"The broker sent a {message.kind}."
                )
            case events.Disconnected(reason):
                self._break(reason)

    def _part(self, fragment: int) -> FragmentLayout:
        assert self.terms is not None
        return self.terms.layout.all[fragment]

    # The connection to the broker.

    def _open(self, asked: ranks.OpenBulk) -> None:
        assert self.terms is not None
        self._close()
        config = replace(self.terms.config, reply_dtype=asked.reply_dtype)
        self.terms = replace(self.terms, config=config)
        self._token, self._is_open = asked.binding.session, True
        self.connect(asked.address, asked.shortcut)
        self.network.send(asked.binding, bulk=True)

    def _close(self) -> None:
        self.network.disconnect()
        self._is_open = False
        self._owed = 0
        self._waiting.clear()

    def _break(self, reason: str) -> None:
        """Report a broken connection once; the leader reopens those of all ranks."""
        if self._is_open:
            self._close()
            text = f"Process {self.leader.rank} of this worker: {reason}"
            self.leader.send(events.Disconnected(text))

    # Up.

    def _send(self, asked: effects.SendChunk) -> None:
        push_id, fragment, index = asked.push_id, asked.fragment, asked.index
        if not self._is_open:
            return
        if push_id not in self.buffers.outgoing:
            self._waiting.append(asked)
            return
        chunk = Chunk(fragment, index, session=asked.session, push_id=push_id)
        self.network.send(chunk, self.buffers.chunk(push_id, fragment, index), bulk=True)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._send(each)

    def _end_push(self, push_id: int | None) -> None:
        if push_id is not None:
            self.uploads.discard(push_id)
            self.buffers.drop(push_id)
            self._waiting = [each for each in self._waiting if each.push_id != push_id]

    # Down.

    def _take(self, chunk: Chunk) -> None:
        self._owed += 1
        if self._owed >= CREDIT_BATCH:
            self.network.send(Credit(self._owed, self._token), bulk=True)
            self._owed = 0
        fragment, index, version = chunk.fragment, chunk.index, chunk.version
        own = self.buffers.numbers  # by fragment, the chunks of this rank
        is_own = 0 <= fragment < len(own) and index in own[fragment]
        if version is None or not is_own:
            self._break(f"chunk {index} of fragment {fragment} is not of this process.")
            return
        if fragment not in self._arriving or self._arriving[fragment][0] != version:
            self._arriving[fragment] = version, set(own[fragment])
            self.buffers.begin(self._part(fragment), version)
        _, missing = self._arriving[fragment]
        if missing:  # a repeated chunk may have another dtype
            if not self._store(chunk):
                del self._arriving[fragment]
                self.leader.send(events.Spoilt(fragment))
                return
            missing.discard(index)
            if not missing:
                self.buffers.finish(fragment)
        self.leader.send(events.ArrivedElsewhere(chunk))

    def _store(self, chunk: Chunk) -> bool:
        """Whether the chunk was decoded: a difference may be from another copy than the one held."""
        assert self.terms is not None
        wire, fragment, index = self.terms.config.reply_dtype, chunk.fragment, chunk.index
        if chunk.delta_of is not None and not is_quantized(wire):
            return False  # the broker has changed the dtype of its replies meanwhile
        if chunk.delta_of is None:
            self.buffers.store(fragment, index, self.payload, whole_dtype(wire))
            return True
        found = self.buffers.follow(
            fragment, index, self.payload, wire, chunk.parts or (), chunk.delta_of
        )
        return found is not None and found == chunk.checksum
