"""The parameters of a run as a plain safetensors file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_protocol.errors import UsageError
from diloco_protocol.state_dict import assemble


def model_of(found: Checkpoint) -> dict[str, Tensor]:
    """The model of a checkpoint: what its `state_dict` has, in its own shapes and dtypes."""
    return assemble(found.layout, {f: each.chunks for f, each in found.tensors.items()})


def write_model(model: Mapping[str, Tensor], path: Path) -> int:
    """Write a safetensors file, whole or not at all. Returns its size in bytes.

    Raises:
        UsageError: it cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(dict(model), aside)
        aside.replace(path)
        return path.stat().st_size
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error}.") from None
