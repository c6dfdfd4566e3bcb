"""A model in the wrappers of libraries has the names that it has without them."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from diloco_protocol import UsageError
from diloco_worker.model.model_manifest import manifest_of
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.wrappers import named_tensors


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A process group of one process, without the warnings of old wrappers."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    dist.destroy_process_group()


def a_model() -> nn.Sequential:
    """With a part that is called `module`, tied weights, and a buffer that is not saved."""
    made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    made[2].weight = made[0].weight
    made.add_module("module", nn.Linear(3, 1))
    made[0].register_buffer("table", torch.ones(2), persistent=False)
    return made


def fsdp(model: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def in_parts(model: nn.Sequential) -> nn.Module:
    """Some layers are wrapped, each in a different way."""
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]
    model[1] = checkpoint_wrapper(model[1])
    return model


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def whole_fsdp(model: nn.Module) -> nn.Module:
    return fsdp(model, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "fsdp1": whole_fsdp,
    "layers": in_parts,
    "all": lambda model: compiled(DistributedDataParallel(in_parts(model))),
    "inside out": lambda model: DistributedDataParallel(compiled(checkpoint_wrapper(model))),
    "fsdp1 outside": lambda model: whole_fsdp(compiled(checkpoint_wrapper(model))),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_model_is_the_one_without_wrappers(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, plain = a_model(), a_model()
    weight = model[2].weight
    wrapped = wrap(model)
    assert manifest_of(wrapped) == manifest_of(plain)
    tensors = ModelTensors.of_module(wrapped)
    assert tensors.lookup()["2.weight"] is weight
    assert "0.table" not in {entry.name for entry in tensors.manifest.entries}
    assert tensors.watch is not None and tensors.watch.look() is None
    parameters = wrapped.named_parameters(remove_duplicate=False)
    of_torch = {fqn: id(each) for name, each in parameters for fqn in _get_fqns(wrapped, name)}
    ours = {n.name: id(n.tensor) for n in named_tensors(wrapped) if n.is_parameter}
    assert ours == of_torch, "the names of torch's own checkpoints"


def test_part_of_a_model_may_have_a_wrappers_name() -> None:
    class DataParallel(nn.Module):
        """By its name what torch calls one."""

        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    names = [entry.name for entry in manifest_of(nn.Sequential(DataParallel())).entries]
    assert names == ["0.module.weight", "0.module.bias"]


def test_hooks_of_state_dicts_change_nothing() -> None:
    """Such as a fused projection that is split for checkpoints, or tensors that a checkpoint omits."""
    model = nn.Linear(2, 4)

    def split(module: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
        fused = state.pop(f"{prefix}weight")
        state[f"{prefix}q"], state[f"{prefix}k"] = fused[:2], fused[2:]

    model.register_state_dict_post_hook(split)  # type: ignore[no-untyped-call]
    assert manifest_of(model) == manifest_of(nn.Linear(2, 4))


def test_flat_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="fully_shard"):
        manifest_of(fsdp(a_model()))
