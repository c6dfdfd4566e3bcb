"""Moves values between a model that is spread over processes, and the owners of its chunks.

A failure in one process (out of memory) must not keep it from the exchanges that the others wait in. So
it goes through them without data, and marks its messages as void; they are put into no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from diloco_worker.model.spread.ranks import Ranks
from diloco_worker.model.spread.shares import Piece
from diloco_worker.model.spread.slices import Part, Slice

# Values are aligned to this many bytes, for views in any dtype. A message to a process begins with as
# many, which mark it as good or void.
ALIGNED = 8
_GOOD, _VOID = 1, 0

# By name, this process's tensors: several, with equal values, where they are tied.
Live = Mapping[str, Sequence[Tensor]]
Values = Mapping[Piece, Tensor]


class ProcessFailed(Exception):
    """Another process sent void messages; it reports the failure itself."""


class Exchange:
    """The exchanges of one process. Collective: all processes do the same slices in order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        # Reused memory of sent and received messages.
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)

    def reserve(self, slices: Sequence[Slice], *, pinned: bool) -> None:
        """Allocate memory for all of these. Not collective."""
        most_sent = most_received = 0
        for slice_ in slices:
            for sends, takes in (slice_.gathered, slice_.scattered):
                most_sent = max(most_sent, sum(self._sizes(sends)))
                most_received = max(most_received, sum(self._sizes(takes)))
        if self._sent.numel() < most_sent:
            self._sent = torch.empty(most_sent, dtype=torch.uint8, pin_memory=pinned)
        if self._received.numel() < most_received:
            self._received = torch.empty(most_received, dtype=torch.uint8, pin_memory=pinned)

    def gather(
        self, slice_: Slice, live: Live, error: Exception | None = None
    ) -> tuple[Values, Exception | None]:
        """The values of the pieces that this process owns, in order, one-dimensional.

        Pieces that this process has completely share the memory of the model; others are on the host.
        Also returns the error of this process, if any.
        """
        values: dict[Piece, Tensor] = {}

        def put(part: Part, found: Tensor) -> None:
            if part.is_all and part.holder == part.owner:
                values[part.piece] = found
            else:
                _room_in(values, part.piece)[part.where] = found.cpu()

        def value_of(part: Part) -> Tensor:
            return self._read(live[part.piece.name][0], part)

        moved = slice_.gathered if slice_.gathers else None
        error = self._move(slice_.kept, moved, value_of, put, error)
        if error is not None:
            return {}, error
        return {piece: values[piece] for piece in slice_.pieces}, None

    def scatter(
        self, slice_: Slice, values: Values, live: Live, error: Exception | None
    ) -> Exception | None:
        """Send what this process owns to the processes that have it in their models, and copy its own.

        Args:
            error: an earlier failure of this process, which then has no values.

        Returns:
            The error of this process, if any.
        """

        def put(part: Part, found: Tensor) -> None:
            self._write(live[part.piece.name], part, found)

        moved = slice_.scattered if slice_.scatters else None
        return self._move(slice_.kept, moved, lambda p: values[p.piece][p.where], put, error)

    def _move(
        self,
        kept: Sequence[Part],
        moved: tuple[Sequence[Part], Sequence[Part]] | None,
        value_of: Callable[[Part], Tensor],
        put: Callable[[Part, Tensor], None],
        error: Exception | None,
    ) -> Exception | None:
        """Put kept parts; send and receive `moved`, in one order at both ends.

        Returns the first error.
        """

        def keep() -> None:
            for part in kept:
                put(part, value_of(part))

        if error is None:
            error = _error_of(keep)
        if moved is None:
            return error
        sends, takes = moved
        sizes, wanted = self._sizes(sends), self._sizes(takes)
        sent, received = self._sent[: sum(sizes)], self._received[: sum(wanted)]

        def fill() -> None:
            for part, run in _laid_out(sent, sizes, sends, self.ranks.rank):
                run.copy_(value_of(part))

        def take() -> None:
            for part, came in self._runs(received, wanted, takes):
                put(part, came)

        if error is None:
            error = _error_of(fill)
        for at, size in zip(_starts(sizes), sizes, strict=True):
            if size:
                sent[at] = _GOOD if error is None else _VOID
        self.ranks.exchange(sent, sizes, received, wanted)
        return error or _error_of(take)

    def _runs(
        self, room: Tensor, sizes: Sequence[int], takes: Sequence[Part]
    ) -> Iterator[tuple[Part, Tensor]]:
        starts = _starts(sizes)
        is_good = [not n or int(room[at]) == _GOOD for at, n in zip(starts, sizes, strict=True)]
        for part, run in _laid_out(room, sizes, takes, self.ranks.rank):
            if is_good[part.other(self.ranks.rank)]:
                yield part, run
        if not all(is_good):
            raise ProcessFailed(f"process {is_good.index(False)} of this worker has failed")

    def _sizes(self, parts: Sequence[Part]) -> list[int]:
        """Bytes to, or from, each process."""
        sizes = [0] * self.ranks.count
        for part in parts:
            other = part.other(self.ranks.rank)
            sizes[other] = (sizes[other] or ALIGNED) + _aligned(part.bytes)
        return sizes

    def _read(self, tensor: Tensor, part: Part) -> Tensor:
        """The values of a part, one-dimensional: a view where they are contiguous."""
        if tensor.is_contiguous():
            return tensor.view(-1)[part.first : part.last]
        return tensor[_coordinates(tensor, part)]

    def _write(self, tensors: Sequence[Tensor], part: Part, values: Tensor) -> None:
        for tensor in tensors:
            if tensor.is_contiguous():
                tensor.view(-1)[part.first : part.last].copy_(values)
            else:
                tensor[_coordinates(tensor, part)] = values.to(tensor.device)


def _error_of(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:  # noqa: BLE001  raised when all exchanges are done
        return error
    return None


def _coordinates(tensor: Tensor, part: Part) -> tuple[Tensor, ...]:
    flat = torch.arange(part.first, part.last, device=tensor.device)
    return torch.unravel_index(flat, tensor.shape)


def _laid_out(
    memory: Tensor, sizes: Sequence[int], parts: Sequence[Part], rank: int
) -> Iterator[tuple[Part, Tensor]]:
    """The memory of each part, in the dtype of its tensor."""
    places = [at + ALIGNED for at in _starts(sizes)]
    for part in parts:
        at = places[part.other(rank)]
        places[part.other(rank)] += _aligned(part.bytes)
        yield part, memory[at : at + part.bytes].view(part.piece.dtype)


def _room_in(values: dict[Piece, Tensor], piece: Piece) -> Tensor:
    if piece not in values:
        values[piece] = torch.empty(piece.stop - piece.start, dtype=piece.dtype)
    return values[piece]


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:rank]) for rank in range(len(sizes))]
