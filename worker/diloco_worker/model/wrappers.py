"""The tensors of a model by the names that the model itself gives them.

Libraries wrap a model, or parts of it, in modules of their own: DDP's puts `module.` in front of each
name, torch.compile's `_orig_mod.`, and so on. Workers with and without them share a run, so these names
are left out. Only classes of those libraries are looked through: a model may call a part of its own
`module`. State dicts are not used: hooks give them other entries, while the parameters are trained.

The parts of a pipeline are cut out of one model and keep its names, so their tensors, one part after the
other, are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from diloco_protocol import UsageError

# By the name of a wrapper class, the attribute of the wrapped module.
_INNER = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",  # of torch.compile
    "FullyShardedDataParallel": "_fsdp_wrapped_module",  # FSDP1; fully_shard wraps nothing
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_original_module",  # and `_forward_module`, the same in other wrappers
}
_LIBRARIES = frozenset({"torch", "lightning", "lightning_fabric"})


@dataclass(frozen=True)
class Named:
    """A tensor of a module under one of its names."""

    name: str
    tensor: Tensor
    is_parameter: bool
    is_saved: bool  # in the state dict: all but buffers that are `persistent=False`


def without_wrappers(module: nn.Module) -> nn.Module:
    """The model in its wrappers, or itself; UsageError where FSDP1 has flattened its parameters."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def named_tensors(module: nn.Module, prefix: str = "") -> Iterator[Named]:
    """Parameters and buffers in the order of a state dict, tied ones under each of their names.

    Raises UsageError as `without_wrappers` does.
    """
    if isinstance(module, ModelParts):
        yield from module.tensors()
        return
    module = without_wrappers(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Named(prefix + name, parameter, is_parameter=True, is_saved=True)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            is_saved = name not in module._non_persistent_buffers_set
            yield Named(prefix + name, buffer, is_parameter=False, is_saved=is_saved)
    for name, child in module._modules.items():
        if child is not None:
            yield from named_tensors(child, f"{prefix}{name}.")


def _inner(module: nn.Module) -> nn.Module | None:
    """The module in a wrapper of a library; None for any other module."""
    for kind in type(module).__mro__:
        name = _INNER.get(kind.__name__)
        if name is not None and kind.__module__.partition(".")[0] in _LIBRARIES:
            if kind.__name__ == "FullyShardedDataParallel":
                _require_whole(module)
            return module._modules.get(name)
    return None


def _require_whole(fsdp: nn.Module) -> None:
    """Raise UsageError for a module of FSDP1 unless its parameters are those of the model."""
    strategy = getattr(getattr(fsdp, "sharding_strategy", None), "name", None)
    if strategy != "NO_SHARD" or not getattr(fsdp, "_use_orig_params", False):
        raise UsageError(
            f"The model is wrapped in FullyShardedDataParallel ({strategy}), which cuts its parameters "
            "into flat shards; use torch's fully_shard instead (docs/frameworks.md), or NO_SHARD with "
            "use_orig_params=True."
        )


class ModelParts(nn.Module):
    """The modules of one model, to be read, not called.

    Buffers that are not saved (a table of rotary embeddings) may have one name in several parts.

    Raises:
        UsageError: no part, or a name for two tensors.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        if not parts:
            raise UsageError("model is an empty list; give the modules that this process trains.")
        self.parts = tuple(parts)  # in a tuple they are no submodules, so their names stay
        self._owners: dict[str, int] = {}  # by name, the part that has the tensor
        known: dict[str, object] = {}
        for number, part in enumerate(parts):
            for found in named_tensors(part):
                if not found.is_saved:
                    continue
                name, value = found.name, found.tensor
                if name in known and known[name] is not value:
                    raise UsageError(
                        f"Parts {self._owners[name]} and {number} of the model both have a "
                        f"{name!r}; give them names of their own, for instance as one "
                        'nn.ModuleDict({"first": ..., "second": ...}).'
                    )
                known.setdefault(name, value)
                self._owners.setdefault(name, number)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of all parts, as `nn.Module.named_parameters` gives them."""
        seen: set[int] = set()
        for found in self.tensors():
            if not found.is_parameter or (remove_duplicate and id(found.tensor) in seen):
                continue
            seen.add(id(found.tensor))
            name = f"{prefix}.{found.name}" if prefix else found.name
            yield name, cast(nn.Parameter, found.tensor)

    def tensors(self) -> Iterator[Named]:
        """Those of all parts, without unsaved buffers under the name of another part's tensor."""
        for number, part in enumerate(self.parts):
            for found in named_tensors(part):
                if self._owners.get(found.name, number) == number:
                    yield found


def parts_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that a model consists of."""
    return module.parts if isinstance(module, ModelParts) else (module,)
