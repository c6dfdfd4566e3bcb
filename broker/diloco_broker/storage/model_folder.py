"""Writes a model as a Hugging Face folder, with the names, dtypes and other files of an existing one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from diloco_broker.storage.model_file import write_model
from diloco_broker.storage.model_header import safetensors_entries, safetensors_files
from diloco_protocol.errors import UsageError
from diloco_protocol.manifest import TensorEntry, summarise

ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"
# Suffixes of files with parameters, which are not copied from the other folder.
VALUES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")


def write_like(model: Mapping[str, Tensor], to: Path, like: Path) -> int:
    """Write `model` into the folder `to`, for `from_pretrained`. Returns the size of its tensors, bytes.

    The folder gets the files of `like` with the values of `model`: the same files, names and dtypes. If
    `like` is a PEFT folder (it has `adapter_config.json`), only adapters are written. Other safetensors
    files of an earlier model in `to` are removed once all files are written.

    Raises:
        UsageError: `like` is not such a folder, or has another model.
    """
    if like.resolve() == to.resolve():
        raise UsageError(f"--to and --like are the same folder, {to}; give another --to.")
    is_adapter = (like / ADAPTER).is_file()
    if not is_adapter and not (like / "config.json").is_file():
        raise UsageError(
            f"--like {like} is not a Hugging Face folder: give one with config.json (or {ADAPTER}), as "
            "save_pretrained writes it."
        )
    try:
        files = [like / "adapter_model.safetensors"] if is_adapter else safetensors_files(like)
        entries = {file.name: safetensors_entries([file]) for file in files}
    except Exception as error:  # noqa: BLE001  a foreign file makes its reader raise anything at all
        raise UsageError(
            f"--like {like} cannot be read ({type(error).__name__}): its model must be safetensors, as "
            "save_pretrained writes it."
        ) from None
    all_of_them = [each for known in entries.values() for each in known]
    problems = _differences(model, all_of_them)
    if not is_adapter and not problems:
        problems = _left_out(model, {_own_name(model, each.name) for each in all_of_them})
    if problems:
        raise UsageError(f"--like {like} has a different model: {summarise(problems)}.")
    to.mkdir(exist_ok=True)
    former = set() if is_adapter else _pieces_in(to)
    for file in sorted(like.iterdir()):
        if file.is_file() and file.suffix not in VALUES:
            shutil.copyfile(file, to / file.name)
    written = 0
    for name, known in entries.items():
        values = {e.name: model[_own_name(model, e.name)].to(_dtype(e)) for e in known}
        written += write_model(values, to / name, {"format": "pt"})
    for name in former - entries.keys():
        if not (like / name).is_file():
            (to / name).unlink(missing_ok=True)
    return written


def _pieces_in(folder: Path) -> set[str]:
    """Names of the model files of a folder, and of their index."""
    if not (folder / "config.json").is_file():
        return set()
    try:
        files = {each.name for each in safetensors_files(folder)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()  # without a readable index the files are unknown
    return {name for name in files if name.endswith(".safetensors")} | {INDEX}


def _differences(model: Mapping[str, Tensor], entries: list[TensorEntry]) -> list[str]:
    found = []
    for entry in entries:
        ours = model.get(_own_name(model, entry.name))
        if ours is None:
            found.append(f"it has {entry.name}, which this run lacks")
        elif tuple(ours.shape) != entry.shape:
            found.append(f"{entry.name} has shape {entry.shape} there and {tuple(ours.shape)} here")
        elif not isinstance(getattr(torch, entry.dtype, None), torch.dtype):
            found.append(f"{entry.name} is {entry.dtype} there, which cannot be written")
    return found


def _left_out(model: Mapping[str, Tensor], written: set[str]) -> list[str]:
    """Tensors that the folder would lack. A tied tensor is written under one of its names."""
    return [
        f"it lacks {name}, which this run has"
        for name, tensor in model.items()
        if name not in written and not any(torch.equal(tensor, model[each]) for each in written)
    ]


def _own_name(model: Mapping[str, Tensor], name: str) -> str:
    """The name of a tensor in the run. PEFT files omit the adapter's name (lora_A.default.weight)."""
    head, _, tail = name.rpartition(".")
    return f"{head}.default.{tail}" if name not in model else name


def _dtype(entry: TensorEntry) -> torch.dtype:
    found: torch.dtype = getattr(torch, entry.dtype)
    return found
