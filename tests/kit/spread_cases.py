"""What the processes of one worker do in tests.

Each process goes through the cases that fit their number, and writes the failures to a file.
"""

import json
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from diloco_protocol import UsageError
from diloco_worker import DiLoCoWorker
from diloco_worker.model.merging import Change
from diloco_worker.model.spread import slices
from diloco_worker.model.spread.blocks import block_of, local
from diloco_worker.model.spread.ranks import GroupBroken, Ranks
from diloco_worker.model.spread.spread_tensors import SpreadTensors
from kit.other_device import THERE, OtherDevice
from kit.spread_models import (
    Both,
    Layers,
    Stages,
    Varied,
    mesh_of,
    rows,
    seeded,
    sharded,
    tensor_parallel,
)

WAIT_S = 60  # for another process
CASES: dict[str, tuple[frozenset[int], Callable[[Ranks], None]]] = {}


def case(*counts: int) -> Callable[[Callable[[Ranks], None]], Callable[[Ranks], None]]:
    def note(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
        CASES[function.__name__] = (frozenset(counts or (1, 2, 3, 4)), function)
        return function

    return note


@case()
def replicas_do_what_a_plain_worker_does(ranks: Ranks) -> None:
    for dtype, chunk_elements, fragments in (
        (torch.float32, 7, 2),
        (torch.bfloat16, 1 << 19, 1),
        (torch.float64, 7, 1),
    ):
        whole = seeded(partial(Varied, dtype))
        both = Both(ranks, whole, seeded(partial(Varied, dtype)))
        both.assert_same_rounds(chunk_elements, fragments)


@case(1, 2)
def replicas_on_cuda_do_what_a_plain_worker_does(ranks: Ranks) -> None:
    if not torch.cuda.is_available():
        return
    for dtype in (torch.float32, torch.bfloat16):
        whole = seeded(partial(Varied, dtype))
        both = Both(ranks, whole, seeded(partial(Varied, dtype)).cuda())
        assert both.spread.pins
        for chunk_elements in (7, 1 << 19):
            both.assert_same_rounds(chunk_elements, kept_on=torch.device("cuda"))


@case(1, 2)
def replicas_on_another_device_do_what_a_plain_worker_does(ranks: Ranks) -> None:
    """What is a process's own is encoded and merged where it is.

    Larger chunks than elsewhere: each operation on this device takes a fraction of a millisecond.
    """
    with OtherDevice():
        for dtype, chunk_elements in ((torch.float32, 20), (torch.bfloat16, 1 << 19)):
            both = Both(ranks, seeded(Layers).to(dtype), seeded(Layers).to(dtype).to(THERE))
            both.assert_same_rounds(chunk_elements, wires=("fp32", "bf16", "int8"))


@case()
def replicas_move_nothing_to_freeze(ranks: Ranks) -> None:
    both = Both(ranks, seeded(Layers), seeded(Layers))
    both.cut(16)
    for part in both.layout.all:
        both.spread.delta(both.share(both.elsewhere(part, 1)), "bf16")
    assert both.bytes == 0
    for part in both.layout.all:
        owners = both.spread.owners[part.fragment]
        assert (
            max(owners.count(r) for r in range(ranks.count)) <= -(-len(owners) // ranks.count) + 2
        )


@case()
def fsdp_does_what_a_plain_worker_does(ranks: Ranks) -> None:
    for dtype, chunk_elements, fragments in ((torch.float32, 1 << 19, 1), (torch.bfloat16, 5, 2)):
        whole = seeded(partial(Layers, dtype=dtype))
        both = Both(ranks, whole, sharded(whole))
        both.assert_same_rounds(chunk_elements, fragments)


@case(1, 2)
def fsdp_is_read_and_changed_whatever_was_computed_before(ranks: Ranks) -> None:
    whole = seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    made = sharded(whole).eval()  # no statistics
    made(torch.randn(4, 6))
    both = Both(ranks, whole, made)
    watch = both.spread.watch
    assert watch is not None
    both.cut(5)
    part = both.layout.fragments[0]
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    for trains in (False, True, False):
        made(torch.randn(4, 6)).sum().backward() if trains else made(torch.randn(4, 6))
        if trains:
            optimizer.step()
        assert watch.look() is None
        new = both.elsewhere(part, 5)
        both.plain.put(new)
        both.spread.put(both.share(new))
        both.assert_equal_models()
        with torch.no_grad():  # what the next computation uses
            x = torch.randn(4, 6)
            assert torch.allclose(made(x), whole.eval()(x), atol=1e-5)


@case(2, 3, 4)
def fsdp_moves_little_to_freeze(ranks: Ranks) -> None:
    whole = seeded(lambda: nn.Linear(100, 96, bias=False))
    both = Both(ranks, whole, sharded(whole))
    both.cut(100)
    part = both.layout.fragments[0]
    both.spread.delta(both.share(both.elsewhere(part, 1)), "bf16")
    assert both.bytes == 0  # each row is a chunk, and belongs to the process that has it
    both.cut(90)
    both.bytes = 0
    both.spread.delta(both.share(both.elsewhere(part := both.layout.fragments[0], 1)), "bf16")
    assert 0 < sum(r for r in ranks.total([both.bytes])) <= ranks.count**2 * ranks.count * 90 * 4


@case(2, 3, 4)
def tensor_parallel_does_what_a_plain_worker_does(ranks: Ranks) -> None:
    whole = seeded(Layers)
    both = Both(ranks, whole, tensor_parallel(whole, mesh_of(ranks.count)))
    for chunk_elements in (5, 1 << 19):
        both.assert_same_rounds(chunk_elements)


@case(4)
def fsdp_of_tensor_parallel_does_what_a_plain_worker_does(ranks: Ranks) -> None:
    mesh = mesh_of(2, 2)
    for sizes in ((8, 12, 16, 4), (7, 5, 9, 1, 3)):
        whole = seeded(partial(Layers, sizes))
        made = sharded(tensor_parallel(whole, mesh["inner"]), mesh=mesh["outer"])
        assert any("_StridedShard" in str(getattr(p, "placements", ())) for p in made.parameters())
        both = Both(ranks, whole, made)
        both.assert_equal_models()  # each block is where its values are in the whole model
        for chunk_elements in (5, 1 << 19):
            both.assert_same_rounds(chunk_elements)


def stage(rank: int, count: int) -> Stages:
    """Layers dealt in turn: the numbers of each process are not neighbours."""
    return Stages(range(rank, 12, count), embed=rank == 0, head=rank == count - 1)


TIED = [("embed.weight", "head.weight")]


@case()
def stages_that_take_turns_do_what_a_plain_worker_does(ranks: Ranks) -> None:
    both = Both(ranks, Stages(), stage(ranks.rank, ranks.count), TIED)
    for chunk_elements, fragments in ((10, 3), (64, 1), (1 << 19, 1)):
        both.assert_same_rounds(chunk_elements, fragments)


@case(2)
def first_and_last_stage_in_one_process_have_the_order_of_the_whole_model(ranks: Ranks) -> None:
    own = [0, 1, 2, 9, 10, 11] if ranks.leads else [3, 4, 5, 6, 7, 8]
    both = Both(ranks, Stages(), Stages(own, embed=ranks.leads, head=ranks.leads))
    both.assert_same_rounds(10)


@case(4)
def stages_of_fsdp_do_what_a_plain_worker_does(ranks: Ranks) -> None:
    mesh, number = mesh_of(2, 2), ranks.rank // 2
    made = Stages(range(number * 6, number * 6 + 6), embed=number == 0, head=number == 1)
    both = Both(ranks, Stages(), sharded(made, mesh=mesh["inner"]), TIED)
    both.assert_same_rounds(10)


@case(2, 3, 4)
def blocks_are_where_the_values_of_a_dtensor_are(ranks: Ranks) -> None:
    line = mesh_of(ranks.count)
    given: list[tuple[Any, Any]] = [(line, [each]) for each in (Shard(0), Shard(1), Replicate())]
    if ranks.count == 4:
        square = mesh_of(2, 2)
        each = (Shard(0), Shard(1), Replicate())
        given += [(square, [a, b]) for a in each for b in each]
    for shape in ((8, 8), (5, 7), (1, 3), (2, 0, 3), (9, 2, 2)):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for mesh, placements in given:
            spread = distribute_tensor(whole, mesh, placements)
            mine = local(spread)
            block = block_of("it", spread)
            assert block.elements == mine.numel()
            assert torch.equal(spread.full_tensor()[rows(block)].reshape(-1), mine.reshape(-1))


@case(2)
def partial_sums_are_refused(ranks: Ranks) -> None:
    spread = DTensor.from_local(torch.ones(3), mesh_of(2), [Partial()])
    with pytest.raises(UsageError, match="partial sums"):
        block_of("it", spread)


def refused(ranks: Ranks, made: nn.Module, match: str, tied: Any = ()) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        SpreadTensors.of_group(made, ranks, tied)
    assert len(set(ranks.gather(str(caught.value)))) == 1


@case(2, 3, 4)
def what_is_no_model_together_is_refused_by_all(ranks: Ranks) -> None:
    last = ranks.rank == ranks.count - 1
    refused(ranks, seeded(Layers, seed=int(last)), "embed.weight has other values")
    refused(ranks, nn.Sequential(nn.Linear(2, 3 if last else 2)), "0.weight is")
    refused(ranks, nn.Linear(2, 2, dtype=torch.float64 if last else None), "weight is")
    refused(ranks, seeded(Stages), "elsewhere.weight", [("embed.weight", "elsewhere.weight")])
    frozen = seeded(lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    frozen["a"].requires_grad_(not last)
    refused(ranks, frozen, r"a.weight is trained in one process and frozen in process")
    frozen["a"].requires_grad_(False)
    with torch.no_grad():
        frozen["a"].weight.add_(int(last))
    refused(ranks, frozen, "a.weight has other values")


@case(2, 3, 4)
def missing_part_is_refused_by_all(ranks: Ranks) -> None:
    mesh = mesh_of(ranks.count)
    made = sharded(nn.Linear(4, 8), mesh=mesh)
    if ranks.rank == 1:  # what process 1 should have
        made = nn.ModuleDict({"other": nn.Linear(2, 2)})
    refused(ranks, made, "weight lacks a part")


@case()
def value_that_is_not_finite_is_told_by_its_tensor(ranks: Ranks) -> None:
    whole = seeded(Layers)
    both = Both(ranks, whole, sharded(whole))
    both.cut(5)
    part = both.layout.fragments[0]
    base = both.elsewhere(part, 1)
    with torch.no_grad():
        whole.layers[0].weight[-1, -1] = torch.inf
    both.copy_to_spread()
    assert both.spread.delta(both.share(base), "bf16").bad == "layers.0.weight"


@case(2, 3, 4)
def failure_of_one_is_raised_by_all_and_tears_no_value(ranks: Ranks) -> None:
    whole = seeded(Layers)
    both = Both(ranks, whole, sharded(whole))
    both.cut(5)
    part = both.layout.fragments[0]
    new = both.share(both.elsewhere(part, 1))
    change: Any = Change(new, 0.5)
    if ranks.rank == 1:
        change.merged = failing(change.merged, 3, "out of memory")
    with pytest.raises(MemoryError if ranks.rank == 1 else GroupBroken, match="out of memory"):
        both.spread.bring_in(change)
    with pytest.raises(GroupBroken):
        both.spread.capture(new.layout)
    # What is in the model is either the old or the new value.
    before = {name: local(t).clone() for name, t in sharded(seeded(Layers)).named_parameters()}
    for name, tensor in both.spread.lookup().items():
        if name in before and (mine := local(tensor)).numel():
            far = (mine - before[name]).abs().max()
            assert far < 0.5, name


@case(2, 3, 4)
def failure_to_read_is_raised_by_all(ranks: Ranks) -> None:
    for fails_at in range(1, 9):  # its own values, and those that it sends
        whole = seeded(Layers)
        both = Both(ranks, whole, sharded(whole))
        both.cut(5)
        if ranks.rank == 1:
            exchange: Any = both.spread._exchange
            exchange._read = failing(exchange._read, fails_at, "no room to read")
        error = MemoryError if ranks.rank == 1 else GroupBroken
        with pytest.raises(error, match="no room to read"):
            both.spread.capture(both.spread.shares[0])


def failing(original: Callable[..., Any], at: int, said: str) -> Callable[..., Any]:
    """The same, until this call of it."""
    calls = iter(range(1, at))

    def call(*args: Any) -> Any:
        if next(calls, None) is None:
            raise MemoryError(said)
        return original(*args)

    return call


@case()
def pieces_that_are_looked_at_do_not_depend_on_the_exchanges(ranks: Ranks) -> None:
    whole = seeded(Layers)
    both = Both(ranks, whole, sharded(whole))
    both.cut(7, 2)
    seen: dict[str, list[float]] = {}
    slices.SLICE_ELEMENTS = 4 * ranks.count
    both.spread.set_layout(both.layout)
    both.spread.look_at(lambda name, values: seen.update({name: values.tolist()}))
    shares = both.spread.shares[:-1]
    assert list(seen) == [p.entry.name for share in shares for p in share.places]
    for part, share in zip(both.layout.fragments, shares, strict=True):
        held = both.share(both.plain.capture(part))
        for place in share.places:
            assert seen[place.entry.name] == held.of(place).tolist()


@case(1, 2)
def local_outer_steps_are_those_of_one_process(ranks: Ranks) -> None:
    def train(model: nn.Module, state: Any = None, **group: Any) -> dict[str, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = DiLoCoWorker(model, optimizer, "local", sync_every=2, **group)
        if state is not None:
            worker.load_state_dict(state)
        with worker:
            for _ in range(5):
                for parameter in model.parameters():
                    parameter.grad = parameter.detach() * 0.5
                optimizer.step()
            assert worker.sync_count == (2 if state is None else 5)
            return worker.state_dict()

    whole = seeded(Layers)
    made = sharded(whole)
    ours = train(made, train(made, process_group="world"), process_group="world")
    plain = train(whole, train(whole))
    for name, parameter in made.named_parameters():
        values: Any = parameter
        assert torch.equal(values.full_tensor(), whole.get_parameter(name)), name
    (name,) = ours["outer"]
    assert name.endswith(f", process {ranks.rank} of {ranks.count}")
    assert plain["local_step"] == ours["local_step"] == 10


def main(rank: int, count: int, folder: Path, only: str | None = None) -> None:
    assert only in (None, *CASES)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=WAIT_S),
    )
    failed: dict[str, str] = {}
    for name, (counts, function) in CASES.items():
        if failed:
            failed[name] = "not begun: a case before it has failed"
        elif count in counts and only in (None, name):
            world = dist.group.WORLD
            assert world is not None
            ranks = Ranks(world)
            try:
                function(ranks)
            except BaseException:  # noqa: BLE001  written down, and told by the test
                failed[name] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(failed))
    dist.destroy_process_group()
