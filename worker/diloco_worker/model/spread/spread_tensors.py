"""The tensors of a model that the processes of one worker have together, as one of them sees them.

Stands where `ModelTensors` stands in a worker of one process, with shares in the place of fragments:
what is captured, measured and brought in are this process's own chunks, while what comes of it is the
whole worker's. Most methods are collectives: all processes call them together, and where one of them
fails all raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diloco_protocol import Manifest, ModelLayout, TensorEntry, UsageError
from diloco_protocol.chunks import FragmentLayout
from diloco_worker.model.encoding import Delta, Encoding
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.merging import Change
from diloco_worker.model.model_manifest import (
    dtype_name,
    live_tensors,
    manifest_of,
    unwrapped,
)
from diloco_worker.model.model_parts import parts_of
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.model_watch import ModelWatch
from diloco_worker.model.spread.agreement import Agreement, agree
from diloco_worker.model.spread.blocks import local
from diloco_worker.model.spread.exchange import Exchange, Live, Slice, slices_of
from diloco_worker.model.spread.ranks import GroupBroken, Ranks
from diloco_worker.model.spread.saved_share import part_of, shared_out
from diloco_worker.model.spread.shares import Piece, owners_of, share_of


class SpreadTensors(ModelTensors):
    """See the head of this module. `set_layout` comes before anything but `live`."""

    ranks: Ranks

    @classmethod
    def of_group(
        cls,
        model: nn.Module | Sequence[nn.Module],
        ranks: Ranks,
        tied: Sequence[Sequence[str]] = (),
    ) -> SpreadTensors:
        """What this process and the others have of a model; raises UsageError at all of them.

        Args:
            tied: groups of names of one tensor, though they may be in several processes.
        """
        module = unwrapped(model)
        mine = ranks.agreed(lambda: _exchangeable(module))
        agreement = agree(ranks, mine, live_tensors(module), tied)
        made = cls(agreement.manifest, lambda: _settled(module), ModelWatch(module))
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
        """The model is cut like this. The same everywhere, and no collective."""
        blocks, rank, count = self._agreement.blocks, self.ranks.rank, self.ranks.count
        self.owners = tuple(owners_of(part, blocks, count) for part in layout.all)
        pairs = list(zip(layout.all, self.owners, strict=True))
        self.shares = tuple(share_of(part, owners, rank)[0] for part, owners in pairs)
        self._slices = [slices_of(part, owners, blocks, rank, count) for part, owners in pairs]

    def part_of(self, saved: Sequence[dict[str, Any]], layout: ModelLayout) -> dict[str, Any]:
        return part_of(saved, layout, self.ranks.rank, self.ranks.count, self.owners)

    def shared_out(self, plain: dict[str, Any]) -> dict[str, Any]:
        """What this process saves, with a note of what it owns."""
        return shared_out(plain, self.ranks.rank, self.ranks.count, self.owners)

    def share_of(self, layout: FragmentLayout) -> FragmentLayout:
        """What this process owns of a fragment, as a layout of its own."""
        return self.shares[layout.fragment]

    @property
    def devices(self) -> list[torch.device]:
        return [local(tensor).device for tensor in self.lookup().values()]

    @property
    def pins(self) -> bool:
        return self.may_pin and any(device.type == "cuda" for device in self.devices)

    def live(self) -> Iterator[tuple[TensorEntry, Tensor]]:
        """Each entry that this process has something of, with what it has."""
        found = self._local()
        entries = {entry.name: entry for entry in self.manifest.entries}
        return ((entries[name], tensors[0]) for name, tensors in found.items())

    # Collectives.

    @torch.no_grad()
    def capture(self, layout: FragmentLayout) -> FlatState:
        """Copy what this process owns of a fragment to the host."""
        state = FlatState.empty(layout, pinned=self.pins)

        def take(values: Mapping[Piece, Tensor]) -> None:
            for piece, value in values.items():
                state.of(piece.place).copy_(value)

        self._each_slice(layout, take)
        return state

    def delta(self, base: FlatState, dtype_name: str, captured: FlatState | None = None) -> Delta:
        """Global minus local of what this process owns of a fragment, in wire form.

        Its length, and what is wrong with it, are those of the whole worker. What was captured is not
        looked at: the model has not changed since.
        """
        encoding = Encoding(base.layout, dtype_name, base, self._buffers.take)
        bad: list[str] = []

        def take(values: Mapping[Piece, Tensor]) -> None:
            for piece, value in values.items():
                encoding.add(piece.place, value)
                if encoding.bad is not None and not bad:
                    bad.append(piece.name)

        self._each_slice(base.layout, take)
        told = self.ranks.gather([encoding.squares, bad[0] if bad else None])
        first_bad = next((name for _, name in told if name is not None), None)
        return Delta(encoding.delta.wire, math.sqrt(sum(each for each, _ in told)), first_bad)

    @torch.no_grad()
    def bring_in(self, change: Change) -> None:
        """Change the model of all processes; each has its part of the change."""
        made: dict[Piece, Tensor] = {}

        def take(values: Mapping[Piece, Tensor]) -> None:
            made.clear()
            for piece, value in values.items():
                made[piece] = change.merged(piece.place, value).to("cpu", piece.dtype).view(-1)

        self._each_slice(change.new.layout, take, reads=change.reads, made=made)

    def look_at(self, take: Callable[[str, Tensor], object]) -> None:
        """Hand over, by name, what is trained or averaged: the pieces that this process owns.

        A piece is the same however many processes share the model.
        """

        def take_all(values: Mapping[Piece, Tensor]) -> None:
            for piece, value in values.items():
                take(piece.place.entry.name, value)

        for share in self.shares[:-1]:
            self._each_slice(share, take_all)

    def distance(self, base: FlatState) -> float:
        raise UsageError(
            "This state is of an older release, which has no workers of several processes."
        )

    def _each_slice(
        self,
        layout: FragmentLayout,
        take: Callable[[Mapping[Piece, Tensor]], None],
        *,
        reads: bool = True,
        made: Mapping[Piece, Tensor] | None = None,
    ) -> None:
        """Go through a fragment: hand over what this process owns, and give the others what is made."""
        if self._is_broken:
            raise GroupBroken("This worker's processes are not at the same place any more.")
        error: Exception | None = None
        live: Live = {}
        try:
            live = self._local()
        except Exception as failure:  # noqa: BLE001  raised at all of them
            error = failure
        self._together(error)
        for slice_ in self._slices[layout.fragment]:
            try:
                values = self._exchange.gather(slice_, live) if reads else _unread(slice_)
                if error is None:
                    take(values)
            except GroupBroken:
                raise
            except Exception as failure:  # noqa: BLE001  the exchanges are gone through first
                error = error or failure
            if made is not None:
                whole = made if error is None else _unread(slice_)
                self._exchange.scatter(slice_, whole, live)
        self._together(error)

    def _together(self, error: Exception | None) -> None:
        try:
            self.ranks.raise_together(error)
        except BaseException:
            self._is_broken = True
            raise

    def _local(self) -> dict[str, list[Tensor]]:
        """By name, what this process has; raises UsageError where that is not what it was."""
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
    """Room for what this process owns, where its present values do not matter."""
    return {
        piece: torch.zeros(piece.stop - piece.start, dtype=piece.dtype) for piece in slice_.pieces
    }


def _exchangeable(module: nn.Module) -> Manifest:
    manifest = manifest_of(module, may_be_spread=True)
    live = live_tensors(module)
    for entry in manifest.entries:
        if not local(live[entry.name]).is_contiguous():
            raise UsageError(
                f"{entry.name} is not contiguous, and a worker of several processes exchanges only "
                "such tensors; make it so with .contiguous() before the DiLoCoWorker is made."
            )
    return manifest


def _settled(module: nn.Module) -> dict[str, Tensor]:
    """The tensors by name. FSDP2 puts whole ones in their place between forward and backward."""
    for part in parts_of(module):
        for each in part.modules():
            reshard: Any = getattr(each, "reshard", None)
            if reshard is not None and type(each).__name__.startswith("FSDP"):
                reshard()
    return live_tensors(module)
