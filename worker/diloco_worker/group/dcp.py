"""Reads the states of a worker that `torch.distributed.checkpoint` saved.

There each process's state has its own name, so `dcp.save({"diloco": diloco.state_dict()})` keeps
all of them. The checkpoint's metadata lists them, since a worker that has not started does not know how
its run cuts the model.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from diloco_protocol import UsageError
from diloco_worker.model.spread.saved_share import ProcessName

Path = tuple[str | int, ...]  # of a value in the saved dict


def saved_state(
    checkpoint: str | os.PathLike[str] | StorageReader,
    name: str,
    worker: str | None,
    rank: int,
    count: int,
) -> dict[str, Any]:
    """What a worker saved under this name: its own part where as many processes saved it, else all
    parts.

    Not collective: each process reads for itself.

    Args:
        worker: the id of the worker; None where it has to be the only one.

    Raises:
        UsageError: the checkpoint has no such state.
    """
    reader: Any = (
        checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
    )
    try:
        metadata = reader.read_metadata()
    except Exception as error:
        raise UsageError(
            f"{checkpoint} is not a checkpoint of torch.distributed.checkpoint: {error!r:.300}."
        ) from error
    paths: dict[str, Path] = metadata.planner_data or {}
    found = {key: path for key, path in paths.items() if path[0] == name and len(path) > 1}
    if not found:
        there = ", ".join(sorted({str(path[0]) for path in paths.values()}))
        raise UsageError(
            f"The checkpoint has no {name!r}; it has: {there or 'nothing with a name'}."
        )
    unwanted = _of_others(
        {path[2] for path in found.values() if len(path) > 2}, worker, rank, count
    )
    target: dict[str, Any] = {}
    for key, path in found.items():
        if len(path) > 2 and path[2] in unwanted:
            continue
        kind = metadata.state_dict_metadata[key]
        is_tensor = isinstance(kind, TensorStorageMetadata)
        target[key] = torch.empty(kind.size, dtype=kind.properties.dtype) if is_tensor else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # on purpose: each reads alone
        load(target, storage_reader=reader, no_dist=True)
    nested: dict[str, Any] = unflatten_state_dict(target, found)[name]
    return nested


def _of_others(names: set[str | int], worker: str | None, rank: int, count: int) -> set[str | int]:
    """The names of processes whose states are not needed here."""
    known = {name: read for name in names if (read := ProcessName.read(name)) is not None}
    workers = sorted({each.worker for each in known.values()})
    if worker not in workers:
        if len(workers) > 1:
            raise UsageError(
                f"The checkpoint has the states of several workers, {', '.join(workers)}; give this one "
                "the worker_id of one of them."
            )
        worker = workers[0] if workers else None
    own = {name for name, each in known.items() if each == ProcessName(worker or "", rank, count)}
    wanted = own or {name for name, each in known.items() if each.worker == worker}
    return known.keys() - wanted
