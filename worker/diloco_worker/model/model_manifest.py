"""The manifest of a model, or why it cannot be exchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diloco_protocol import Kind, Manifest, TensorEntry, UsageError
from diloco_protocol.manifest import summarise
from diloco_worker.model.spread.blocks import is_spread, local
from diloco_worker.model.wrappers import ModelParts, named_tensors, without_wrappers


def unwrapped(model: object) -> nn.Module:
    """The model without the wrappers of libraries, or the parts of one; raises UsageError."""
    if isinstance(model, list | tuple):
        return ModelParts([unwrapped(part) for part in model])
    if not isinstance(model, nn.Module):
        raise UsageError(f"The model is a {type(model).__name__}; it must be an nn.Module.")
    return without_wrappers(model)


def live_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones under each of their names."""
    return {found.name: found.tensor for found in named_tensors(module)}


def manifest_of(model: nn.Module | Sequence[nn.Module], *, may_be_spread: bool = False) -> Manifest:
    """The manifest of a model: `FragmentPlan.of(manifest_of(model), 4)`.

    Args:
        may_be_spread: values may be spread over the processes of a worker (DTensor); shapes are those
            of the whole tensors.

    Raises:
        UsageError: it cannot be exchanged.
    """
    module = unwrapped(model)
    found = list(named_tensors(module))
    live = {each.name: each.tensor for each in found}
    parameters = {each.name: each.tensor for each in found if each.is_parameter}
    entries = []
    own = live
    if may_be_spread:
        parts = {id(tensor): local(tensor) for tensor in live.values() if is_spread(tensor)}
        own = {name: parts.get(id(tensor), tensor) for name, tensor in live.items()}
    saved = [each.name for each in found if each.is_saved]
    for name, aliases in _tied(saved, own).items():
        tensor = live[name]
        tied = [parameters[each] for each in (name, *aliases) if each in parameters]
        if any(parameter.requires_grad for parameter in tied):
            kind = Kind.TRAINABLE
        else:
            kind = Kind.FROZEN if tied else Kind.BUFFER
        entry = TensorEntry(name, tuple(tensor.shape), dtype_name(tensor), kind, tuple(aliases))
        if kind is Kind.BUFFER and entry.is_floating_point and bool(torch.isinf(own[name]).any()):
            entry = replace(entry, kind=Kind.FROZEN)  # a constant; see `model_watch`
        entries.append(entry)
    manifest = Manifest(tuple(entries))
    require_sound(manifest)
    return manifest


def _tied(names: Sequence[str], live: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The first name of each tensor, with its other names."""
    first: dict[object, str] = {}
    aliases: dict[str, list[str]] = {}
    for name in names:
        tensor = live[name]
        _require_values_of_its_own(name, tensor)
        original = first.setdefault(_identity(tensor), name)
        if original == name:
            aliases[name] = []
        else:
            aliases[original].append(name)
    return aliases


def _require_values_of_its_own(name: str, tensor: Tensor) -> None:
    """Raise UsageError for a tensor whose values cannot be copied."""
    if is_lazy(tensor):
        raise UsageError(
            f"{name} belongs to a Lazy module and has no shape yet; run one batch through the model "
            "(and make the optimizer) before the DiLoCoWorker."
        )
    if any("torch.distributed" in base.__module__ for base in type(tensor).__mro__):
        raise UsageError(
            f"{name} is a {type(tensor).__name__}: its values are spread over processes; give the "
            'DiLoCoWorker of each process process_group="world", or their group.'
        )
    if tensor.is_meta:
        raise UsageError(
            f"{name} is on the meta device and has no values; give it some (module.to_empty(), then a "
            "checkpoint or the initialisation) before making the DiLoCoWorker."
        )
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{name} is in layout {tensor.layout}; only dense tensors can be exchanged."
        )
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise UsageError(
            f"{name} was made by expand: its elements share memory, so no values can be copied into it; "
            "register its .clone(), or persistent=False if it is constant."
        )


def _identity(tensor: Tensor) -> object:
    """Equal for two names of the same data."""
    if tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def require_sound(manifest: Manifest) -> None:
    problems = manifest.problems()
    if problems:
        raise UsageError(f"The model cannot be exchanged: {summarise(problems)}.")


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
