"""The tensors of a model that the processes of one worker have together, as one of them sees them.

The `ModelTensors` of such a worker, with shares in the place of fragments: each process captures,
measures and changes its own chunks, and the result is the whole worker's. Most methods are collectives:
all processes call them together, and a failure in one raises in all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diloco_protocol import ModelLayout, TensorEntry, UsageError
from diloco_protocol.chunks import FragmentLayout, Place
from diloco_worker.model.encoding import Delta, Encoding
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.merging import Change, wait_for_copies
from diloco_worker.model.model_manifest import dtype_name, live_tensors, manifest_of, unwrapped
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.model_watch import ModelWatch
from diloco_worker.model.spread.agreement import Agreement, agree
from diloco_worker.model.spread.blocks import local
from diloco_worker.model.spread.exchange import Exchange, Live, ProcessFailed, Values
from diloco_worker.model.spread.ranks import VIEW, GroupBroken, Ranks
from diloco_worker.model.spread.saved_share import ProcessName, part_of, shared_out
from diloco_worker.model.spread.shares import Piece, owners_of, share_of, tensor_name
from diloco_worker.model.spread.slices import Slice, slices_of
from diloco_worker.model.wrappers import parts_of

T = TypeVar("T")


class SpreadTensors(ModelTensors):
    """`set_layout` is called before anything but `live`."""

    ranks: Ranks

    @classmethod
    def of_group(
        cls,
        model: nn.Module | Sequence[nn.Module],
        ranks: Ranks,
        tied: Sequence[Sequence[str]] = (),
    ) -> SpreadTensors:
        """The model of this process and the others; raises UsageError in all of them.

        Args:
            tied: groups of names of one tensor, which may be in several processes.
        """
        module = unwrapped(model)

        def settled() -> dict[str, Tensor]:
            return _settled(module)

        live = ranks.agreed(settled)
        mine = ranks.agreed(lambda: manifest_of(module, may_be_spread=True))
        agreement = agree(ranks, mine, live, tied)
        made = cls(agreement.manifest, settled, ModelWatch(module, settled))
        made.ranks, made._agreement = ranks, agreement
        made._exchange = Exchange(ranks)
        return made

    _agreement: Agreement
    _exchange: Exchange
    owners: tuple[tuple[int, ...], ...] = ()  # by fragment, the process that owns each chunk
    shares: tuple[FragmentLayout, ...] = ()  # by fragment, what this process owns, as a layout
    _slices: Sequence[Sequence[Slice]] = ()
    _is_broken = False

    def set_layout(self, layout: ModelLayout) -> None:
        """Set how the model is cut. The same everywhere, and not a collective."""
        blocks, rank, count = self._agreement.blocks, self.ranks.rank, self.ranks.count
        self.owners = tuple(owners_of(part, blocks, count) for part in layout.all)
        pairs = list(zip(layout.all, self.owners, strict=True))
        self.shares = tuple(share_of(part, owners, rank)[0] for part, owners in pairs)
        self._slices = [slices_of(part, owners, blocks, rank, count) for part, owners in pairs]

    def part_of(self, saved: Sequence[dict[str, Any]], layout: ModelLayout) -> dict[str, Any]:
        return part_of(saved, layout, self.ranks.rank, self.ranks.count, self.owners)

    def shared_out(self, plain: dict[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
        """The state that this process saves, under its name, with its owners and counts."""
        ranks = self.ranks
        made = shared_out({**plain, "counts": {**counts}}, ranks.rank, ranks.count, self.owners)
        return {str(ProcessName(plain["worker_id"], ranks.rank, ranks.count)): made}

    def share_of(self, layout: FragmentLayout) -> FragmentLayout:
        """The part of a fragment that this process owns, as a separate layout."""
        return self.shares[layout.fragment]

    def numbers_of(self, layout: FragmentLayout) -> Sequence[int]:
        owners = self.owners[layout.fragment]
        return [index for index, owner in enumerate(owners) if owner == self.ranks.rank]

    def begin_view(self) -> None:
        """Other values will be in the model of all processes for a while."""
        self.ranks.meet(VIEW)

    @property
    def leads(self) -> bool:
        return self.ranks.leads

    @property
    def devices(self) -> list[torch.device]:
        return [local(tensor).device for tensor in self.lookup().values()]

    def live(self) -> Iterator[tuple[TensorEntry, Tensor]]:
        """Each entry that this process has a part of, with that part."""
        found = self._local()
        entries = {entry.name: entry for entry in self.manifest.entries}
        return ((entries[name], tensors[0]) for name, tensors in found.items())

    # Collectives.

    @torch.no_grad()
    def capture(self, layout: FragmentLayout) -> FlatState:
        """Copy this process's share of a fragment to the host."""

        def put(state: FlatState, values: Values) -> None:
            for piece, value in values.items():
                state.of(piece.place).copy_(value)

        return self._each_slice(layout, lambda: FlatState.empty(layout, pinned=self.pins), put)

    @torch.no_grad()
    def delta(self, base: FlatState, dtype_name: str, captured: FlatState | None = None) -> Delta:
        """Global minus local of this process's share of a fragment, in wire form.

        Its length, and its error, are those of the whole worker.
        """

        def begin() -> Encoding:
            device = self._device_for(base)
            encoding = Encoding(base.layout, dtype_name, base, self.room, device=device)
            if captured is not None:
                for place in base.layout.places:
                    encoding.add(place, captured.of(place))
            return encoding

        def add(encoding: Encoding, values: Values) -> None:
            for piece, value in values.items():
                encoding.add(piece.place, value)

        encoding = (
            self._each_slice(base.layout, begin, add)
            if captured is None
            else self._together(lambda: self.ranks.agreed(begin))
        )
        bad = None if encoding.bad is None else tensor_name(encoding.bad)
        told = self._together(lambda: self.ranks.gather([encoding.squares, bad]))
        first_bad = next((name for _, name in told if name is not None), None)
        return Delta(encoding.delta.wire, math.sqrt(sum(each for each, _ in told)), first_bad)

    @torch.no_grad()
    def bring_in(self, change: Change) -> None:
        """Change the model of all processes; each has its part of the change.

        An exception leaves each element with the old or the new value, and the worker broken.
        """
        made: dict[Piece, Tensor] = {}

        def change_them(_: None, values: Values) -> None:
            made.clear()
            for piece, value in values.items():
                made[piece] = change.merged(piece.place, value).to(piece.dtype).view(-1)

        layout = change.new.layout
        self._each_slice(layout, lambda: None, change_them, reads=change.reads, made=made)
        wait_for_copies(self.devices)

    def look_at(self, take: Callable[[str, Tensor], object]) -> None:
        """Hand over, by name, all trained or averaged pieces that this process owns."""
        for share in self.shares[:-1]:
            places = deque(place for place in share.places if place.start < place.stop)

            def take_all(
                parts: list[Tensor], values: Values, places: deque[Place] = places
            ) -> None:
                # A slice may have only a part of a piece; they come in order.
                for piece, value in values.items():
                    place = places[0]
                    is_end = piece.place.stop == place.stop
                    parts.append(value.cpu() if is_end else value.to("cpu", copy=True))
                    if is_end:
                        take(place.entry.name, torch.cat(parts) if len(parts) > 1 else parts[0])
                        parts.clear()
                        places.popleft()

            self._each_slice(share, list[Tensor], take_all)

    def _each_slice(
        self,
        layout: FragmentLayout,
        begin: Callable[[], T],
        take: Callable[[T, Values], None],
        *,
        reads: bool = True,
        made: Values | None = None,
    ) -> T:
        """Walk through a fragment: hand over this process's values, and distribute `made`.

        Returns the result of `begin`. A failure here is raised after the last exchange, in all
        processes.
        """
        slices = self._slices[layout.fragment]

        def ready() -> tuple[T, Live]:
            self._exchange.reserve(slices, pinned=self.pins)
            return begin(), self._local()

        def walk() -> T:
            result, live = self.ranks.agreed(ready)
            error: Exception | None = None
            for slice_ in slices:
                values: Values = {}
                if reads:
                    values, error = self._exchange.gather(slice_, live, error)
                if error is None:
                    try:
                        take(result, values if reads else _unread(slice_))
                    except Exception as failure:  # noqa: BLE001  raised below
                        error = failure
                if made is not None:
                    error = self._exchange.scatter(slice_, made, live, error)
            # The failed process reports its own error.
            is_of_another = isinstance(error, ProcessFailed)
            self.ranks.raise_together(None if is_of_another else error)
            return result

        return self._together(walk)

    def _together(self, action: Callable[[], T]) -> T:
        """Run a collective. Interrupted, the processes are out of step."""
        if self._is_broken:
            raise GroupBroken(
                "A process of this worker has failed, so they cannot go on together; let the launcher "
                "start all of them again (torchrun --max-restarts)."
            )
        try:
            return action()
        except BaseException:
            self._is_broken = True
            raise

    def _local(self) -> dict[str, list[Tensor]]:
        """By name, what this process has; raises UsageError where it changed."""
        tensors = self.lookup()
        entries = {entry.name: entry for entry in self.manifest.entries}
        found: dict[str, list[Tensor]] = {}
        for name, own in self._agreement.names.items():
            entry, block = entries[name], self._agreement.blocks[name][self.ranks.rank]
            assert block is not None
            for each in own:
                tensor = tensors.get(each)
                if tensor is None:
                    raise UsageError(f"The model has no tensor {each!r} (any more).")
                mine = local(tensor)
                if mine.numel() != block.elements or dtype_name(mine) != entry.dtype:
                    raise UsageError(
                        f"{each} is {dtype_name(mine)}{list(mine.shape)} here, and was "
                        f"{entry.dtype}{list(block.size)}; the shapes, dtypes and placements of a model "
                        "must stay as they were when it joined."
                    )
                found.setdefault(name, []).append(mine)
        return found


def _unread(slice_: Slice) -> dict[Piece, Tensor]:
    """Placeholders for the pieces that this process owns, where their present values do not matter."""
    return {
        piece: torch.zeros(1, dtype=piece.dtype).expand(piece.stop - piece.start)
        for piece in slice_.pieces
    }


def _settled(module: nn.Module) -> dict[str, Tensor]:
    """The tensors by name. FSDP2 replaces them by whole ones between forward and backward."""
    for part in parts_of(module):
        for each in part.modules():
            reshard: Any = getattr(each, "reshard", None)
            if reshard is not None and type(each).__name__.startswith("FSDP"):
                reshard()
    return live_tensors(module)
