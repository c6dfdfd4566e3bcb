"""Reads the names, shapes and dtypes of a model from its files, without the values.

A file does not say which tensors are trained. Floating-point tensors count as trained, except those with
a common name of a buffer and those that the caller names as frozen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from diloco_protocol.errors import UsageError
from diloco_protocol.fragments import block_of
from diloco_protocol.manifest import Kind, Manifest, TensorEntry, summarise

# Torch dtypes by their names in safetensors.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
EMBEDDING = re.compile(r"embed(?!_out)|wte|wpe")
# Last name parts of floating-point buffers, in batch norm and rotary embeddings.
BUFFERS = {"running_mean", "running_var", "inv_freq", "original_inv_freq"}


def read_header(path: Path, frozen: Sequence[str] = ()) -> tuple[Manifest, bool]:
    """The manifest of the model in this file, as far as the file determines it.

    Args:
        path: a .safetensors file, a .pt state dict, or a Hugging Face folder.
        frozen: names, or patterns of names, of parameters that are not trained.

    Returns:
        The manifest, and whether its tensors are in the model's order. Safetensors files do not keep the
        order; for them the result has embeddings, then layers by number, then the other tensors.

    Raises UsageError if it cannot be read or trained, or a pattern in `frozen` matches no tensor.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist.")
    try:
        if path.is_dir() or path.suffix == ".safetensors":
            files = safetensors_files(path) if path.is_dir() else [path]
            entries = sorted(
                safetensors_entries(files), key=lambda entry: _likely_order(entry.name)
            )
            in_order = False
        else:
            entries, in_order = _state_dict(path), True
    except Exception as error:  # noqa: BLE001  a foreign file makes its reader raise anything at all
        raise UsageError(
            f"{path} cannot be read: it must be a .safetensors file, a state dict of tensors alone "
            "saved with torch.save, a folder with model.safetensors in it, or a folder of checkpoints "
            f"({type(error).__name__})."
        ) from None
    idle = [p for p in frozen if not any(fnmatchcase(entry.name, p) for entry in entries)]
    if idle:
        raise UsageError(f"--frozen matches no tensor of {path}: {summarise(idle)}.")
    manifest = Manifest(tuple(_as_frozen(entry, frozen) for entry in entries))
    problems = manifest.problems()
    if problems:
        raise UsageError(f"The model in {path} cannot be trained: {summarise(problems)}.")
    return manifest, in_order


def safetensors_files(folder: Path) -> list[Path]:
    """The model files of a Hugging Face folder: one model.safetensors, or several listed in an index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / Path(name).name for name in names]
    return [folder / "model.safetensors"]


def safetensors_entries(files: Iterable[Path]) -> list[TensorEntry]:
    """All tensors of these files, in the order of the files."""
    from safetensors import safe_open

    entries = []
    for file in files:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dict
                part = opened.get_slice(name)
                dtype = DTYPES.get(part.get_dtype(), part.get_dtype())
                entries.append(_entry(name, tuple(part.get_shape()), dtype))
    return entries


def _state_dict(path: Path) -> list[TensorEntry]:
    import torch

    try:  # without reading the values
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # a file of the old format
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping):
        raise TypeError("not a state dict")
    entries: dict[Any, TensorEntry] = {}
    for name, tensor in state.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), dtype) if tensor.numel() else name
        if key in entries:  # tied: one tensor under several names
            first = entries[key]
            entries[key] = replace(first, aliases=(*first.aliases, name))
        else:
            entries[key] = _entry(name, tuple(tensor.shape), dtype)
    return list(entries.values())


def _entry(name: str, shape: tuple[int, ...], dtype: str) -> TensorEntry:
    entry = TensorEntry(name, shape, dtype, Kind.TRAINABLE)
    is_buffer = not entry.is_floating_point or name.rpartition(".")[2] in BUFFERS
    return replace(entry, kind=Kind.BUFFER) if is_buffer else entry


def _as_frozen(entry: TensorEntry, frozen: Sequence[str]) -> TensorEntry:
    is_frozen = any(fnmatchcase(entry.name, pattern) for pattern in frozen)
    return replace(entry, kind=Kind.FROZEN) if is_frozen else entry


def _likely_order(name: str) -> tuple[int, list[tuple[int, int, str]]]:
    """A sort key for the likely position of a tensor in its model; layers.2 precedes layers.10."""
    place = 1 if block_of(name) else 0 if EMBEDDING.search(name) else 2
    parts = re.split(r"(\d+)", name)
    return place, [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
