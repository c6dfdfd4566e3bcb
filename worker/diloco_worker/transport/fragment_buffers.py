"""The vectors that the I/O thread has in its hands: deltas being sent, versions arriving, bases.

A version is assembled in memory of its own. Once training stands on it, the memory of the base before
it is room for the next version: two vectors a fragment take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field
from typing import TypeVar

import torch

from diloco_protocol import Code, ModelLayout, ProtocolError, RunConfig, Segment
from diloco_protocol.chunks import ChunkSpan, FragmentLayout
from diloco_protocol.dtypes import in_few_bits, least_bytes, span_bytes, whole_dtype
from diloco_protocol.messages import Chunk, Message
from diloco_worker.model.flat_state import FlatState

T = TypeVar("T")


def check_length(
    message: Message, payload: memoryview, layout: ModelLayout | None, config: RunConfig | None
) -> None:
    """Raise ProtocolError when a chunk has not the length that its place in the model needs."""
    if not isinstance(message, Chunk) or layout is None or config is None:
        return
    spans = layout.all[message.fragment].spans if 0 <= message.fragment < len(layout.all) else ()
    if not 0 <= message.index < len(spans):
        return  # the session says that there is no such chunk
    span = spans[message.index]
    if message.delta_of is not None:
        check_parts(message, payload, span, config.reply_dtype)
        return
    wanted = span_bytes(span, whole_dtype(config.reply_dtype))
    if payload.nbytes != wanted:
        text = f"chunk {message.index} has {payload.nbytes} bytes instead of {wanted}."
        raise ProtocolError(Code.BAD_CHUNK, text)


def check_parts(message: Chunk, payload: memoryview, span: ChunkSpan, wire: str) -> None:
    """Raise ProtocolError when a difference has not the lengths that its place needs."""
    parts = message.parts or ()
    least, most = least_bytes(span, wire), span_bytes(span, wire)
    fits = all(least <= size <= most for size in parts) and sum(parts) == payload.nbytes
    if not fits or not parts or span.segment is not Segment.PARAMETERS or not in_few_bits(wire):
        text = (
            f"chunk {message.index} has {payload.nbytes} bytes, which are no difference in {wire}."
        )
        raise ProtocolError(Code.BAD_CHUNK, text)


@dataclass(eq=False, repr=False, kw_only=True)
class FragmentBuffers:
    """See the head of this module, and `Memory` of `transport.executor`. Belongs to the I/O thread.

    `states` are room for later versions once training stands on others. A fragment is copied in a thread
    of its own, one at a time, and only where nobody is training it.
    """

    # Copies a fragment of the model to the host, for a broker that has no parameters.
    capture: Callable[[FragmentLayout], FlatState] | None
    # Called in that thread with the id of the push that it is for, and the copy or what went wrong.
    copied: Callable[[int, Future[FlatState]], object]
    # Works out the tag of frozen values of the model, for one that is not to fetch what it has.
    tag_of: Callable[[FragmentLayout], int] | None
    named: Callable[[Future[int]], object]  # called with it in that thread, as `copied`
    pinned: bool  # whether to receive into pinned memory (the model is on a CUDA device)
    states: InitVar[Mapping[int, FlatState]]  # by fragment, the values of what is held already
    outgoing: dict[int, FlatState] = field(default_factory=dict)  # by push id, what is being sent
    # By fragment: what is being assembled, and room for the next time; what has been delivered, merged
    # or not; what training stands on.
    _assembly: dict[int, FlatState] = field(default_factory=dict)
    _spare: dict[int, FlatState] = field(default_factory=dict)
    _held: dict[int, FlatState] = field(default_factory=dict)
    # Of a worker of several processes, by fragment: the chunks that this one has, as a layout of their
    # own, and the index of each in it.
    _shares: tuple[FragmentLayout, ...] = ()
    _numbers: tuple[Mapping[int, int], ...] = ()
    _bases: dict[int, FlatState] = field(default_factory=dict)
    _copying: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self, states: Mapping[int, FlatState]) -> None:
        self._held |= states

    def share_out(
        self, shares: tuple[FragmentLayout, ...], numbers: tuple[Mapping[int, int], ...]
    ) -> None:
        """From here on only the chunks of these shares come and go."""
        self._shares, self._numbers = shares, numbers

    def _share(self, layout: FragmentLayout) -> FragmentLayout:
        return self._shares[layout.fragment] if self._shares else layout

    def _number(self, fragment: int, index: int) -> int:
        return self._numbers[fragment][index] if self._numbers else index

    def begin(self, layout: FragmentLayout) -> None:
        fragment, layout = layout.fragment, self._share(layout)
        if fragment not in self._assembly:
            room = self._spare.pop(fragment, None)
            self._assembly[fragment] = room or FlatState.empty(layout, pinned=self.pinned)

    def store(self, fragment: int, index: int, payload: memoryview, wire_dtype: str) -> None:
        """Decode a chunk into its place; the payload has the right length."""
        self._assembly[fragment].store(self._number(fragment, index), payload, wire_dtype)

    def follow(
        self, fragment: int, index: int, payload: memoryview, wire_dtype: str, parts: Sequence[int]
    ) -> int | None:
        """The same of a difference from what is held; returns the checksum of what comes of it."""
        held = self._held.get(fragment)
        if held is None:
            return None
        number = self._number(fragment, index)
        return self._assembly[fragment].follow(number, held, payload, parts, wire_dtype)

    def finish(self, fragment: int) -> FlatState:
        state = self._held[fragment] = self._assembly.pop(fragment)
        return state

    def held(self, fragment: int) -> FlatState | None:
        return self._held.get(fragment)

    def forget(self) -> None:
        self._held.clear()

    def set_base(
        self, fragment: int, state: FlatState | None, came_as: FlatState | None = None
    ) -> None:
        """Training stands on this; the former base is room, unless it is held or being sent.

        With None no copy is kept of what is held: the model itself has it. Where `state` is a copy on
        another device, what it `came_as` is let go. It is no room: somebody may have been given it.
        """
        if state is None:
            self._held.pop(fragment, None)
            return
        if came_as is not None and self._held.get(fragment) is came_as:
            self._held[fragment] = state
        former, self._bases[fragment] = self._bases.get(fragment), state
        if former is None or former is state or former is self._held.get(fragment):
            return
        if former.device.type != "cpu":
            return
        if all(sent is not former for sent in self.outgoing.values()):
            self._spare[fragment] = former

    def chunk(self, push_id: int, fragment: int, index: int) -> memoryview:
        return self.outgoing[push_id].chunk(self._number(fragment, index))

    def drop(self, push_id: int) -> None:
        self.outgoing.pop(push_id, None)

    def prepare(self, push_id: int, layout: FragmentLayout) -> bool:
        """Lay out a donation: what is held as it is, or else a copy of the model.

        A large model takes long to copy, and heartbeats must go on meanwhile: returns False then, and
        `copied` is called later. So it is with what is held on another device.
        """
        held = self._held.get(layout.fragment)
        if held is not None and held.device.type == "cpu":
            self.outgoing[push_id] = held
            return True
        read = self.capture if held is None else lambda _: held.to(torch.device("cpu"))
        assert read is not None
        self._aside(read, layout, lambda done: self.copied(push_id, done))
        return False

    def name(self, layout: FragmentLayout) -> None:
        """Work out the tag of the model's own values; `named` is called later, as `copied`."""
        assert self.tag_of is not None
        self._aside(self.tag_of, layout, self.named)

    def _aside(
        self,
        read: Callable[[FragmentLayout], T],
        layout: FragmentLayout,
        done: Callable[[Future[T]], object],
    ) -> None:
        """Read the model in a thread, one after the other."""
        result: Future[T] = Future()
        result.add_done_callback(done)

        def work() -> None:
            try:
                with self._copying:
                    result.set_result(read(layout))
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is taken
                result.set_exception(error)

        threading.Thread(target=work, name="diloco-copy", daemon=True).start()
