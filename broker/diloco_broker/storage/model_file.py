"""Reads the initial model of a run from a file, and writes its final model. Never unpickles files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diloco_broker.core.versions.record import InitialModel
from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_broker.storage.model_header import safetensors_files
from diloco_protocol.errors import UsageError
from diloco_protocol.tensors.codecs import has_nan, is_finite
from diloco_protocol.tensors.state_dict import assemble


def load_model(path: Path) -> dict[str, Tensor]:
    """Load a state dict from a .safetensors file, a .pt state dict, or a Hugging Face folder.

    Raises UsageError if it is missing, unreadable or has NaN.
    """
    if not path.exists():
        raise UsageError(f"--model {path} does not exist.")
    try:
        tensors = _load(path)
    except Exception as error:  # noqa: BLE001  a foreign file makes torch.load raise anything at all
        raise UsageError(
            f"--model {path} cannot be read: it must be a .safetensors file, a state dict of "
            "tensors alone saved with torch.save, or a folder with model.safetensors in it "
            f"({type(error).__name__})."
        ) from None
    return check_state_dict(tensors, f"--model {path}")


def check_state_dict(tensors: Any, what: str) -> dict[str, Tensor]:
    """Copy a state dict to the CPU; raises UsageError if it is invalid or has NaN.

    Infinite values are allowed in buffers, which only the worker's manifest identifies; see `describe`.
    """
    if not isinstance(tensors, Mapping) or not tensors:
        raise UsageError(f"{what} holds no state dict (a map from names to tensors).")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UsageError(
                f"{what} holds {name!r}, which is not a named tensor; save only the state dict."
            )
        if has_nan(tensor.detach()):
            raise UsageError(f"{what} holds NaN in {name}; use an earlier copy of the model.")
    # A copy: the caller may continue training with these tensors before the first worker joins.
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def describe(tensors: Mapping[str, Tensor] | None) -> InitialModel | None:
    """Summarize the tensors for the core."""
    if tensors is None:
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    infinite = {
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not is_finite(tensor.to(torch.float32))
    }
    return InitialModel(shapes, frozenset(infinite))


def _load(path: Path) -> Any:
    if path.is_dir():
        files = safetensors_files(path)
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def model_of(found: Checkpoint) -> dict[str, Tensor]:
    """The model of a checkpoint as a state dict, in its original shapes and dtypes."""
    return assemble(found.layout, {f: each.chunks for f, each in found.tensors.items()})


def write_model(
    model: Mapping[str, Tensor], path: Path, about: dict[str, str] | None = None
) -> int:
    """Write a safetensors file atomically. Returns its size in bytes; raises UsageError.

    `about` is the metadata of its header.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(dict(model), aside, about)
        aside.replace(path)
        return path.stat().st_size
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error}.") from None
