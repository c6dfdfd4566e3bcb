"""The vectors of the I/O thread: deltas being sent, versions arriving, bases.

A version is assembled in its own memory. Once it is the base, the memory of the former base is reused
for the next version: each fragment alternates between two vectors. A rank of several has its share of a
fragment as a separate layout; chunks are named by their index in the fragment, as on the wire.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field
from typing import TypeVar

import torch

from diloco_protocol import Code, ModelLayout, ProtocolError, RunConfig, Segment, VersionId
from diloco_protocol.chunks import ChunkSpan, FragmentLayout
from diloco_protocol.dtypes import is_quantized, least_bytes, span_bytes, whole_dtype
from diloco_protocol.messages import Chunk, Message
from diloco_worker.model.feedback import InFewBits
from diloco_worker.model.flat_state import FlatState
from diloco_worker.session.connection import Owners

T = TypeVar("T")


def check_length(
    message: Message, payload: memoryview, layout: ModelLayout | None, config: RunConfig | None
) -> None:
    """Raise ProtocolError for a chunk whose length does not fit its place in the model."""
    if not isinstance(message, Chunk) or layout is None or config is None:
        return
    spans = layout.all[message.fragment].spans if 0 <= message.fragment < len(layout.all) else ()
    if not 0 <= message.index < len(spans):
        return  # the session rejects it
    span = spans[message.index]
    if message.delta_of is not None:
        check_parts(message, payload, span, config.reply_dtype)
        return
    wanted = span_bytes(span, whole_dtype(config.reply_dtype))
    if payload.nbytes != wanted:
        text = f"chunk {message.index} has {payload.nbytes} bytes instead of {wanted}."
        raise ProtocolError(Code.BAD_CHUNK, text)


def check_parts(message: Chunk, payload: memoryview, span: ChunkSpan, wire: str) -> None:
    """Raise ProtocolError for a difference whose lengths do not fit its place."""
    parts = message.parts or ()
    least, most = least_bytes(span, wire), span_bytes(span, wire)
    fits = all(least <= size <= most for size in parts) and sum(parts) == payload.nbytes
    if not fits or not parts or span.segment is not Segment.PARAMETERS or not is_quantized(wire):
        text = (
            f"chunk {message.index} has {payload.nbytes} bytes, which are no difference in {wire}."
        )
        raise ProtocolError(Code.BAD_CHUNK, text)


Versions = dict[VersionId | None, FlatState]


@dataclass(eq=False, repr=False, kw_only=True)
class FragmentBuffers:
    """The `Memory` of an executor or a follower. Belongs to the I/O thread.

    A session knows which version it holds, and names none. A follower names them: chunks of the next
    version may arrive before the leader says that the last is complete, so each complete version is
    held until training uses a later one.

    `states` are held already. A fragment of the model is copied in a separate thread, one at a time,
    and only while it is not trained.
    """

    # Copies a fragment of the model to the host, for seeding.
    capture: Callable[[FragmentLayout], FlatState] | None
    # Called in the copying thread with the push id and the copy, or its error.
    copied: Callable[[int, Future[FlatState]], object]
    # Computes the tag of the model's frozen values.
    tag_of: Callable[[FragmentLayout], int] | None
    named: Callable[[Future[int]], object]  # called with the tag in that thread
    pinned: bool  # whether to receive into pinned memory (the model is on a CUDA device)
    states: InitVar[Mapping[int, Versions]]  # by fragment
    outgoing: dict[int, FlatState] = field(default_factory=dict)  # by push id, payloads being sent
    # By fragment: the version being assembled, and reusable memory; complete versions, the latest last;
    # the base.
    _assembly: dict[int, tuple[VersionId | None, FlatState]] = field(default_factory=dict)
    _spare: dict[int, FlatState] = field(default_factory=dict)
    _held: dict[int, Versions] = field(default_factory=dict)
    _bases: dict[int, FlatState] = field(default_factory=dict)
    # By fragment, in a group: the share of this rank, and the index of each chunk in it.
    _shares: tuple[FragmentLayout, ...] = ()
    numbers: Sequence[Mapping[int, int]] = ()
    _copying: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self, states: Mapping[int, Versions]) -> None:
        self._held |= states

    def share_out(self, owners: Owners, rank: int, shares: tuple[FragmentLayout, ...]) -> None:
        """From now on only the chunks of this rank come and go, which are these shares."""
        self._shares = shares
        own = [[index for index, owner in enumerate(each) if owner == rank] for each in owners]
        self.numbers = [{index: number for number, index in enumerate(each)} for each in own]

    def _share(self, layout: FragmentLayout) -> FragmentLayout:
        return self._shares[layout.fragment] if self._shares else layout

    def _number(self, fragment: int, index: int) -> int:
        return self.numbers[fragment][index] if self.numbers else index

    def begin(self, layout: FragmentLayout, version: VersionId | None = None) -> None:
        fragment = layout.fragment
        _, room = self._assembly.get(fragment, (None, None))
        room = room or self._spare.pop(fragment, None)
        room = room or FlatState.empty(self._share(layout), pinned=self.pinned)
        self._assembly[fragment] = version, room

    def store(self, fragment: int, index: int, payload: memoryview, wire_dtype: str) -> None:
        """Decode a chunk into its place; the payload has the right length."""
        _, state = self._assembly[fragment]
        state.store(self._number(fragment, index), payload, wire_dtype)

    def follow(  # noqa: PLR0917  of `Memory`, and the base
        self,
        fragment: int,
        index: int,
        payload: memoryview,
        wire_dtype: str,
        parts: Sequence[int],
        base: VersionId | None = None,
    ) -> int | None:
        """Decode a difference from the held version; returns the checksum of the result."""
        held = self.held(fragment, base)
        if held is None:
            return None
        _, state = self._assembly[fragment]
        return state.follow(self._number(fragment, index), held, payload, parts, wire_dtype)

    def finish(self, fragment: int) -> FlatState:
        version, state = self._assembly.pop(fragment)
        self._held.setdefault(fragment, {})[version] = state
        return state

    def held(self, fragment: int, version: VersionId | None = None) -> FlatState | None:
        return self._held.get(fragment, {}).get(version)

    def holds(self, fragment: int) -> bool:
        """Whether any version is held. Any thread may call."""
        return bool(self._held.get(fragment))

    def share_of(self, fragment: int, version: VersionId) -> FlatState:
        """The share of a complete version; KeyError where it is missing. Any thread may call."""
        is_empty = not self._shares[fragment].chunks
        return (
            FlatState.empty(self._shares[fragment]) if is_empty else self._held[fragment][version]
        )

    def forget(self) -> None:
        self._held.clear()

    def set_base(
        self, fragment: int, state: FlatState | None, came_as: FlatState | None = None
    ) -> None:
        """Set the base of a fragment; the former one's memory is reused, unless it is held or being
        sent.

        With None no copy of the held version is kept: the model itself has it. Where `state` is a copy
        on another device, what it `came_as` is released, not reused, since it may be shared.
        """
        if state is None:
            self._held.pop(fragment, None)
            return
        held = self._held.get(fragment, {})
        for version, each in list(held.items()):
            if each is state or each is came_as:
                held[version] = state
                for earlier in list(held)[: list(held).index(version)]:
                    del held[earlier]
        former, self._bases[fragment] = self._bases.get(fragment), state
        if former is None or former is state or former.device.type != "cpu":
            return
        if all(each is not former for each in (*held.values(), *self.outgoing.values())):
            self._spare[fragment] = former

    def chunk(self, push_id: int, fragment: int, index: int) -> memoryview:
        return self.outgoing[push_id].chunk(self._number(fragment, index))

    def drop(self, push_id: int) -> None:
        dropped = self.outgoing.pop(push_id, None)
        if isinstance(dropped, InFewBits):
            dropped.encode_here()

    def prepare(
        self, push_id: int, layout: FragmentLayout, version: VersionId | None = None
    ) -> bool:
        """Lay out a seeding push: the held version, else a copy of the model.

        Returns False where it has to be copied, which takes long; `copied` is called later.
        """
        held = self.held(layout.fragment, version)
        if held is not None and held.device.type == "cpu":
            self.outgoing[push_id] = held
            return True
        read = self.capture if held is None else lambda _: held.to(torch.device("cpu"))
        assert read is not None
        self._aside(read, layout, lambda done: self.copied(push_id, done))
        return False

    def name(self, layout: FragmentLayout) -> None:
        """Compute the tag of the model's own values; `named` is called later."""
        assert self.tag_of is not None
        self._aside(self.tag_of, layout, self.named)

    def _aside(
        self,
        read: Callable[[FragmentLayout], T],
        layout: FragmentLayout,
        done: Callable[[Future[T]], object],
    ) -> None:
        """Read the model in a thread, one at a time."""
        result: Future[T] = Future()
        result.add_done_callback(done)

        def work() -> None:
            try:
                with self._copying:
                    result.set_result(read(layout))
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is taken
                result.set_exception(error)

        threading.Thread(target=work, name="diloco-copy", daemon=True).start()
