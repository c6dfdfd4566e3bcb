"""The vectors of a process that does not lead: its share of deltas, of versions arriving, of bases.

The leader says when a version is whole. Until training takes it every share that was whole is kept: the
chunks of the next version may come before the leader's word.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from diloco_protocol import ProtocolError, VersionId
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.dtypes import span_bytes, whole_dtype
from diloco_protocol.errors import Code
from diloco_protocol.messages import Chunk
from diloco_worker.model.flat_state import FlatState
from diloco_worker.transport.fragment_buffers import check_parts


class AnotherCopy(Exception):
    """What is held of a version is not what the broker has under its name."""


@dataclass(eq=False)
class Arriving:
    """This process's share of one version."""

    version: VersionId
    state: FlatState
    missing: set[int]  # by index within the share


@dataclass(eq=False, repr=False)
class LaneBuffers:
    """See the head of this module. Any thread may call.

    A chunk is named by its index in the fragment, as on the wire.
    """

    shares: tuple[FragmentLayout, ...]  # by fragment, the frozen one included
    numbers: tuple[dict[int, int], ...]  # by fragment: of each chunk owned its index in the share
    pinned: bool = False
    outgoing: dict[int, FlatState] = field(default_factory=dict)  # by push id
    initial: dict[int, FlatState] = field(default_factory=dict)  # the model's own values
    _arriving: dict[int, Arriving] = field(default_factory=dict)
    _whole: dict[int, dict[VersionId, FlatState]] = field(default_factory=dict)
    _bases: dict[int, tuple[VersionId, FlatState]] = field(default_factory=dict)
    _spare: dict[int, FlatState] = field(default_factory=dict)
    _taken: dict[int, VersionId] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def store(self, chunk: Chunk, payload: memoryview, reply_dtype: str) -> None:
        """Keep a chunk of a version, of which parameters come in this dtype.

        Raises:
            ProtocolError: it is not one of this process's, or of a wrong length.
            AnotherCopy: it is a difference from a version of which this process has something else.
        """
        fragment, index, version = chunk.fragment, chunk.index, chunk.version
        is_known = 0 <= fragment < len(self.shares) and index in self.numbers[fragment]
        if version is None or not is_known:
            text = f"chunk {index} of fragment {fragment} is not of this process."
            raise ProtocolError(Code.BAD_CHUNK, text)
        share, number = self.shares[fragment], self.numbers[fragment][index]
        span, whole = share.spans[number], whole_dtype(reply_dtype)
        if chunk.delta_of is not None:
            check_parts(chunk, payload, span, reply_dtype)
        elif payload.nbytes != (wanted := span_bytes(span, whole)):
            text = f"chunk {index} has {payload.nbytes} bytes, in {whole} it has {wanted}."
            raise ProtocolError(Code.BAD_CHUNK, text)
        with self._lock:
            if version in self._whole.get(fragment, {}):
                return
            arriving = self._arriving.get(fragment)
            if arriving is None or arriving.version != version:
                if arriving is not None:
                    self._spare.setdefault(fragment, arriving.state)
                room = self._spare.pop(fragment, None) or FlatState.empty(share, pinned=self.pinned)
                arriving = Arriving(version, room, set(range(share.chunks)))
                self._arriving[fragment] = arriving
            if chunk.delta_of is None:
                arriving.state.store(number, payload, whole)
            else:
                held = self._held(fragment, chunk.delta_of)
                parts, wire = chunk.parts or (), reply_dtype
                if (
                    held is None
                    or arriving.state.follow(number, held, payload, parts, wire) != chunk.checksum
                ):
                    raise AnotherCopy
            arriving.missing.discard(number)
            if not arriving.missing:
                del self._arriving[fragment]
                self._whole.setdefault(fragment, {})[version] = arriving.state

    def _held(self, fragment: int, version: VersionId) -> FlatState | None:
        base = self._bases.get(fragment)
        if base is not None and base[0] == version:
            return base[1]
        return self._whole.get(fragment, {}).get(version)

    def take(self, fragment: int, version: VersionId) -> FlatState:
        """The share of a version that the leader has called whole.

        Raises KeyError where it is not here.
        """
        with self._lock:
            self._taken[fragment] = version
            base = self._bases.get(fragment)
            if base is not None and base[0] == version:
                return base[1]
            whole = self._whole.get(fragment, {})
            if version not in whole and not self.shares[fragment].chunks:
                whole[version] = FlatState.empty(self.shares[fragment])
            return whole[version]

    def set_base(self, fragment: int, state: FlatState, came_as: FlatState | None = None) -> None:
        """Training stands on this, which was taken last; the former base is room."""
        with self._lock:
            version = self._taken[fragment]
            former = self._bases.get(fragment)
            self._bases[fragment] = (version, state)
            whole = self._whole.get(fragment, {})
            # Those that came before it. Of a broker that went back a later one may count less.
            for each in list(whole) if version in whole else ():
                del whole[each]
                if each == version:
                    break
            self.initial.pop(fragment, None)
            if former is None or former[1] is state or former[1].device.type != "cpu":
                return
            if all(sent is not former[1] for sent in self.outgoing.values()):
                self._spare[fragment] = former[1]

    def stand_on(self, fragment: int, version: VersionId, state: FlatState) -> None:
        """Training goes on from a checkpoint."""
        with self._lock:
            self._taken[fragment] = version
            self._bases[fragment] = (version, state)

    def donate(self, push_id: int, fragment: int, version: VersionId | None) -> bool:
        """Lay out what is held of a version, or the model's own values; False where there is none."""
        with self._lock:
            base = self._bases.get(fragment)
            if version is None:
                found = self.initial.get(fragment)
            elif base is not None and base[0] == version:
                found = base[1].to(torch.device("cpu"))
            else:
                found = self._whole.get(fragment, {}).get(version)
            if found is None and not self.shares[fragment].chunks:
                found = FlatState.empty(self.shares[fragment])
            if found is not None:
                self.outgoing[push_id] = found
            return found is not None

    def chunk(self, push_id: int, fragment: int, index: int) -> memoryview | None:
        """The bytes of a chunk to be sent; None where its push is over, or not laid out yet."""
        state = self.outgoing.get(push_id)
        return None if state is None else state.chunk(self.numbers[fragment][index])


def numbers_of(owners: tuple[int, ...], rank: int) -> dict[int, int]:
    """Of each chunk that a process owns, its index in the share."""
    mine = [index for index, owner in enumerate(owners) if owner == rank]
    return {index: number for number, index in enumerate(mine)}
