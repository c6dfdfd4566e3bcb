"""Models for workers of several processes, each whole and spread, and how the two are compared."""

import copy
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from diloco_protocol import ModelLayout, Segment, lay_out
from diloco_protocol.chunks import FragmentLayout
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.merging import Change
from diloco_worker.model.model_manifest import live_tensors
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.spread import slices
from diloco_worker.model.spread.blocks import Block, block_of, local
from diloco_worker.model.spread.ranks import Ranks
from diloco_worker.model.spread.spread_tensors import SpreadTensors


class Varied(nn.Module):
    """Tied weights, BatchNorm, a bool buffer, a frozen layer, fp64, a scalar, nothing at all."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6, dtype=dtype)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 5)
        self.frozen.requires_grad_(False)
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 4))
        self.image = nn.Conv2d(3, 4, 3)
        self.image.weight.data = self.image.weight.data.to(memory_format=torch.channels_last)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.head = nn.Linear(6, 13, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight


class Layers(nn.Module):
    """A stack whose rows are even, uneven, and fewer than processes."""

    def __init__(self, sizes: Sequence[int] = (12, 7, 2, 1, 9), dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed = nn.Embedding(11, sizes[0], dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in pairwise(sizes))
        self.norm = nn.BatchNorm1d(sizes[-1])
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)


class Stages(nn.Module):
    """What pipelines cut: an embedding, numbered layers, and a head that is the embedding."""

    def __init__(self, numbers: Sequence[int] | None = None, embed: bool = True, head: bool = True):
        super().__init__()
        torch.manual_seed(4)
        if embed:
            self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleDict(
            {str(n): seeded(lambda: nn.Linear(6, 6), n) for n in numbers or range(12)}
        )
        if head:
            self.norm = nn.LayerNorm(6)
            torch.manual_seed(4)
            weight = nn.Embedding(13, 6).weight
            self.head = nn.Linear(6, 13, bias=False)
            self.head.weight = self.embed.weight if embed else weight


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def sharded(whole: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """Under FSDP2, layer by layer."""
    made: Any = copy.deepcopy(whole)
    chosen: dict[str, Any] = {"mesh": mesh} if mesh is not None else {}
    for layer in getattr(made, "layers", nn.ModuleList()).children():
        fully_shard(layer, **chosen)
    fully_shard(made, **chosen)
    return made  # type: ignore[no-any-return]


def tensor_parallel(whole: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Weights by columns and by rows in turn; what is left is a copy in each process."""
    made = copy.deepcopy(whole)
    for number, module in enumerate(m for m in made.modules() if isinstance(m, nn.Linear)):
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = (
                Shard(number % 2) if name == "weight" else (Shard(0), Replicate())[number % 2]
            )
            spread = distribute_tensor(parameter.data, mesh, [placement])
            kept = nn.Parameter(spread, requires_grad=parameter.requires_grad)
            module.register_parameter(name, kept)
    return made


def mesh_of(*shape: int) -> DeviceMesh:
    names = ("outer", "inner")[: len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def rows(block: Block) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(block.offset, block.size, strict=True))


def moved(module: nn.Module, seed: int, by: float = 0.1) -> None:
    """Elsewhere, the same in each process; integers are larger."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in {id(t): t for t in live_tensors(module).values()}.values():
            if tensor.is_floating_point():
                tensor.add_(by * torch.randn(tensor.shape, dtype=torch.float64).to(tensor.dtype))
            elif tensor.dtype is not torch.bool:
                tensor.add_(3)


class Both:
    """A model that is whole in each process, and spread over them."""

    def __init__(
        self,
        ranks: Ranks,
        whole: nn.Module,
        spread: nn.Module | Sequence[nn.Module],
        tied: Sequence[Sequence[str]] = (),
    ) -> None:
        self.ranks = ranks
        self.whole = whole
        self.plain = ModelTensors.of_module(whole)
        self.spread = SpreadTensors.of_group(spread, ranks, tied)
        assert self.spread.manifest == self.plain.manifest, (
            self.spread.manifest,
            self.plain.manifest,
        )
        self.layout: ModelLayout
        self.bytes = 0
        original = ranks.exchange

        def counted(
            sent: Tensor, sizes: Sequence[int], room: Tensor, wanted: Sequence[int]
        ) -> None:
            self.bytes += sum(sizes)
            original(sent, sizes, room, wanted)

        ranks.exchange = counted  # type: ignore[method-assign]

    def cut(self, chunk_elements: int, fragments: int = 1) -> None:
        """Lay the model out. With small chunks, exchanges are small as well, and many."""
        trained = [e.name for e in self.plain.manifest.entries if e.kind.value == "trainable"]
        plan = {name: number * fragments // len(trained) for number, name in enumerate(trained)}
        self.layout = lay_out(
            self.plain.manifest, plan, num_fragments=fragments, chunk_elements=chunk_elements
        )
        slices.SLICE_ELEMENTS = 11 * chunk_elements
        self.spread.set_layout(self.layout)

    def copy_to_spread(self) -> None:
        """The spread model has the values of the whole one."""
        whole = live_tensors(self.whole)
        with torch.no_grad():
            for name, tensor in self.spread.lookup().items():
                block = block_of(name, tensor)
                local(tensor).copy_(whole[name][rows(block)].reshape(local(tensor).shape))

    def assert_equal_models(self) -> None:
        whole = live_tensors(self.whole)
        for name, tensor in self.spread.lookup().items():
            expected = whole[name][rows(block_of(name, tensor))]
            assert torch.equal(local(tensor).cpu(), expected.reshape(local(tensor).shape)), name

    def share(self, state: FlatState) -> FlatState:
        """What this process has of a whole fragment."""
        fragment = state.layout.fragment
        made = FlatState.empty(self.spread.shares[fragment])
        own = [i for i, o in enumerate(self.spread.owners[fragment]) if o == self.ranks.rank]
        for number, index in enumerate(own):
            to, of = made.layout.spans[number], state.layout.spans[index]
            values = state.vectors[of.segment][of.start : of.stop]
            made.vectors[to.segment][to.start : to.stop].copy_(values)
        return made

    def assert_equal_states(self, found: FlatState, whole: FlatState) -> None:
        fragment = whole.layout.fragment
        own = [i for i, o in enumerate(self.spread.owners[fragment]) if o == self.ranks.rank]
        assert len(own) == found.layout.chunks
        for number, index in enumerate(own):
            assert bytes(found.chunk(number)) == bytes(whole.chunk(index)), (fragment, index)

    def elsewhere(self, part: FragmentLayout, seed: int) -> FlatState:
        """A version that is not far from the model."""
        state = self.plain.capture(part)
        torch.manual_seed(seed)
        for segment, vector in state.vectors.items():
            if segment is Segment.INTEGERS:
                vector.add_(torch.randint(-2, 3, vector.shape))
            else:
                vector.add_(0.1 * torch.randn(vector.shape))
        return state

    def assert_same_rounds(
        self,
        chunk_elements: int,
        fragments: int = 1,
        wires: Sequence[str] = ("fp32", "bf16"),
        kept_on: torch.device = torch.device("cpu"),  # noqa: B008  a constant
    ) -> None:
        """Cut so, captures, deltas and merges are bit for bit those of the whole model.

        Args:
            kept_on: where this process has the version that deltas are measured from.
        """
        self.cut(chunk_elements, fragments)
        for part in self.layout.all:
            moved(self.whole, seed=part.fragment)
            self.copy_to_spread()
            share = self.spread.share_of(part)
            captured = self.spread.capture(share)
            self.assert_equal_states(captured, self.plain.capture(part))
            base = self.elsewhere(part, seed=11)
            for wire in wires:
                expected = self.plain.delta(base, wire)
                for of in (None, captured):
                    found = self.spread.delta(self.share(base).to(kept_on), wire, of)
                    self.assert_equal_states(found.wire, expected.wire)
                    assert math.isclose(found.norm, expected.norm, rel_tol=1e-6, abs_tol=1e-9)
                    assert found.bad is None
            for alpha in (0.0, 0.5, 1.0):
                for origin in (None, self.elsewhere(part, seed=12)):
                    moved(self.whole, seed=13)
                    self.copy_to_spread()
                    new = self.elsewhere(part, seed=14)
                    self.plain.bring_in(Change(new, alpha, origin))
                    begun = None if origin is None else self.share(origin)
                    self.spread.bring_in(Change(self.share(new), alpha, begun))
                    self.assert_equal_models()
            self.plain.put(base)
            self.spread.put(self.share(base))
            self.assert_equal_models()
