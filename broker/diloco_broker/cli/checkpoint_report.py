"""Finds the newest intact checkpoint, and describes checkpoints for people and programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import typer

from diloco_broker.storage import checkpoint, checkpoint_format
from diloco_broker.storage.checkpoint import Damaged
from diloco_protocol.errors import UsageError
from diloco_protocol.manifest import Kind
from diloco_protocol.quantities import byte_size, duration

T = TypeVar("T")
_SHOWN = ("mode", "workers", "sync_every", "outer_lr", "outer_momentum", "num_fragments")


def newest_sound(folder: Path, read: Callable[[Path], T]) -> tuple[Path, T]:
    """Find and read the newest readable checkpoint; prints a line for each damaged one it skips."""
    paths = checkpoint.at(folder)
    for path in paths:
        try:
            return path, read(path)
        except Damaged as error:
            typer.echo(f"Skipped: {error}", err=True)
    if paths:
        raise UsageError(f"All {len(paths)} checkpoints in {folder} are damaged.")
    raise UsageError(f"{folder} has no checkpoint, and is not an address like tcp://HOST:PORT.")


def describe(path: Path, *, quick: bool) -> dict[str, Any]:
    """Describe a checkpoint and its run; `quick` skips the checksums of the files."""
    try:
        with checkpoint.as_damaged(path):
            found = _described(path, quick=quick)
            as_text(path.parent, [found])  # a record that cannot be shown is damaged
            return found
    except Damaged as error:
        return {"path": str(path), "sound": False, "problem": str(error)}


def _described(path: Path, *, quick: bool) -> dict[str, Any]:
    plain = checkpoint.read_manifest(path)
    checkpoint_format.without_tensors(plain)
    if not quick:
        checkpoint.check_files(path, plain)
    entries = plain["manifest"]["entries"]
    fragments = [plain["fragments"][key] for key in sorted(plain["fragments"], key=int)]
    return {
        "path": str(path),
        "sound": True,
        "run": plain["run"],
        "life": plain["life"],
        "round": plain["number"],
        "age_s": round(time.time() - (path / checkpoint.MANIFEST).stat().st_mtime, 1),
        "bytes": sum(file["bytes"] for file in plain["files"].values()),
        "parameters": sum(prod(e["shape"]) for e in entries if e["kind"] == Kind.TRAINABLE.value),
        "tensors": len(entries),
        "versions": [f["version"]["counter"] for f in fragments[: plain["num_fragments"]]],
        "outer": plain["outer"],
        "outer_state": sorted({name for f in fragments for name in f["outer"]}),
        "workers": dict(plain["workers"]),
        "totals": dict(plain["totals"]),
        "config": dict(plain["config"]),
    }


def as_text(folder: Path, found: Sequence[dict[str, Any]]) -> str:
    """Format descriptions as lines for a terminal."""
    lines = [f"{folder}: {len(found)} checkpoint{'s'[: len(found) != 1]}, newest first", ""]
    for each in found:
        name = Path(each["path"]).name
        if each["sound"]:
            count, age = each["bytes"], duration(each["age_s"])
            lines.append(f"  {name}  before round {each['round']}, {age} ago, {byte_size(count)}")
        else:
            lines.append(f"  {name}  DAMAGED: {each['problem']}")
    sound = next((each for each in found if each["sound"]), None)
    if sound is not None:
        given = {name: sound["config"].get(name) for name in _SHOWN}
        options = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        names, done = sorted(sound["workers"]), sound["totals"]
        workers = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
        lines += [
            "",
            f"  run         {sound['run']}, incarnation {sound['life']} of the broker",
            f"  versions    {', '.join(map(str, sound['versions']))} (by fragment)",
            f"  model       {sound['parameters']:,} trainable parameters, {sound['tensors']} tensors",
            f"  optimizer   {sound['outer']}, state: {', '.join(sound['outer_state']) or 'none'}",
            f"  workers     {workers or 'none'}",
            f"  so far      {done.get('rounds', 0)} rounds, {done.get('pushes', 0)} pushes",
            f"  options     {options}",
        ]
    return "\n".join(lines)
