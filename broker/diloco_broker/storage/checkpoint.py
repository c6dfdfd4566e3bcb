"""Writes checkpoints atomically, and finds, verifies and reads them.

A checkpoint is a folder:

    checkpoint-0003-000000000412/    written by the broker's third incarnation, before round 412
        fragment-0.safetensors       parameters, buffers, integers, and the outer optimizer's state
        ...
        checkpoint.json              everything else, with size and SHA-256 of each file

The newest is the last one written: that of the latest incarnation with the highest round. (A run that
was rewound has lower rounds than before.) If a different or damaged checkpoint has the name already,
`-2` is appended.

A checkpoint is written to a folder whose name begins with a dot, each file is flushed to the disk, and
then the folder is renamed. A fragment that has not changed since the previous checkpoint is a hard link
to its file there.

This code does not run in the broker's loop. A `Checkpoint` is immutable and is written chunk by chunk,
so saving does not copy the model.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from diloco_broker.storage import checkpoint_format
from diloco_broker.storage.checkpoint_format import FORMAT, Checkpoint
from diloco_protocol.errors import UsageError
from diloco_protocol.records import to_plain

MANIFEST = "checkpoint.json"
PIECE_BYTES = 1 << 20  # read at a time to compute a checksum
NAME = re.compile(r"checkpoint-(\d{4,})-(\d{12,})(?:-(\d+))?")
FILE = re.compile(r"fragment-\d+\.safetensors")
# A model of 50,000 tensors takes 20 MB.
MOST_JSON_BYTES = 64 << 20


class Damaged(Exception):
    """A checkpoint cannot be used; the message says which and why."""


class NotPermitted(Damaged):
    """This user may not read a checkpoint, which may be intact."""


def _unreadable(path: Path, error: OSError) -> Damaged:
    kind = NotPermitted if isinstance(error, PermissionError) else Damaged
    return kind(f"{path} cannot be read: {error.strerror or error}.")


def save(folder: Path, checkpoint: Checkpoint, keep: int, spared: Container[str] = ()) -> Path:
    """Write a checkpoint, and return its path.

    Removes all checkpoints of the run except the newest `keep` and those named in `spared`. Raises
    OSError if it cannot be written; earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = name = folder / f"checkpoint-{checkpoint.incarnation:04d}-{checkpoint.number:012d}"
    again = 1
    while place.exists():
        if _has(place, checkpoint):
            return place
        again += 1  # never replace an existing one: a kill in between would lose both
        place = name.with_name(f"{name.name}-{again}")
    before = _newest_manifest(folder)
    aside = folder / f".{place.name}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        files = {
            _file_name(fragment): _save_fragment(fragment, checkpoint, to=aside, before=before)
            for fragment in checkpoint.tensors
        }
        _write_manifest(aside / MANIFEST, checkpoint_format.plain(checkpoint, files))
        sync_folder(aside)
        aside.rename(place)
        sync_folder(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    retire(folder, checkpoint.record.run, keep, spared)
    return place


def _has(place: Path, checkpoint: Checkpoint) -> bool:
    """Whether this folder is an intact copy of this checkpoint, which need not be written again."""
    try:
        plain = read_manifest(place)
        check_files(place, plain)
    except Damaged:
        return False
    body = checkpoint_format.plain(checkpoint, plain["files"])
    return bool(plain == json.loads(json.dumps(body)))


def sweep(folder: Path) -> None:
    """Remove partial checkpoints of killed brokers; only for the holder of the folder's lock."""
    for path in folder.glob(".checkpoint-*"):
        shutil.rmtree(path, ignore_errors=True)


def retire(folder: Path, run: str, keep: int, spared: Container[str] = ()) -> None:
    """Remove old checkpoints of this run; damaged ones and those of other runs are kept."""
    left = keep
    for path in found(folder):
        try:
            of_run = str(read_manifest(path).get("run"))
        except Damaged:
            continue
        if of_run != run:
            continue
        left -= 1
        if left < 0 and path.name not in spared:
            _remove(path)


def _remove(path: Path) -> None:
    """Rename the folder first, so that a kill in between does not leave a partial checkpoint."""
    gone = path.with_name(f".{path.name}.gone")
    with contextlib.suppress(OSError):
        path.rename(gone)
        shutil.rmtree(gone)


def life_of(path: Path) -> int:
    """The number of the incarnation that wrote a checkpoint, from its name."""
    found = NAME.fullmatch(path.name)
    return int(found[1]) if found else 0


def at(place: Path) -> list[Path]:
    """The checkpoint at this path (its folder or manifest), or all checkpoints in this folder.

    Raises UsageError if the path cannot be read.
    """
    if place.name == MANIFEST:
        place = place.parent
    try:
        return [place] if (place / MANIFEST).exists() else found(place)
    except OSError as error:
        raise UsageError(f"{place} cannot be read: {error.strerror}.") from None


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, including damaged ones."""
    if not folder.is_dir():
        return []
    named = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    order = {path: (int(n[1]), int(n[2]), int(n[3] or 1)) for n, path in named if n}
    return sorted(order, key=order.__getitem__, reverse=True)


def saved_at(path: Path) -> float | None:
    """When a checkpoint was written, seconds since 1970; None if unknown."""
    try:
        return (path / MANIFEST).stat().st_mtime
    except OSError:
        return None


def load(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte of it; raises Damaged."""
    plain = read_manifest(path)
    with as_damaged(path):
        found = checkpoint_format.without_tensors(plain)
        check_files(path, plain)
        parts = [part for part in found.layout.all if part.chunks]
        has, wanted = set(found.record.fragments), {part.fragment for part in parts}
        if has != wanted:
            raise Damaged(f"{path} has fragments {sorted(has)} of {sorted(wanted)}.")
        tensors = {
            part.fragment: checkpoint_format.load_tensors(
                path / _file_name(part.fragment), part, plain["fragments"][str(part.fragment)]
            )
            for part in parts
        }
    return replace(found, tensors=tensors)


def load_record(path: Path) -> Checkpoint:
    """A checkpoint without its tensors; raises Damaged."""
    plain = read_manifest(path)
    with as_damaged(path):
        return checkpoint_format.without_tensors(plain)


@contextlib.contextmanager
def as_damaged(path: Path) -> Iterator[None]:
    """Convert errors of reading a malformed file to Damaged.

    Errors of memory, descriptors or the disk pass through: the file may be intact.
    """
    try:
        yield
    except (Damaged, MemoryError, OSError):  # the last two are problems of this machine
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):  # raised by torch
            raise MemoryError(str(error)) from error
        raise Damaged(f"{path} cannot be read: {error!r:.200}.") from None


def check_files(path: Path, plain: Mapping[str, Any]) -> None:
    """Compare size and checksum of each file with the manifest; raises Damaged."""
    for name, expected in plain["files"].items():
        if not FILE.fullmatch(name):
            raise Damaged(
                f"{path / MANIFEST} names {name!r:.80}, which is not a file of a checkpoint."
            )
        total = hashlib.sha256()
        try:
            with opened(path / name) as file:
                has_size = os.fstat(file.fileno()).st_size == expected["bytes"]
                while has_size and (piece := file.read(PIECE_BYTES)):
                    total.update(piece)
        except OSError as error:
            raise _unreadable(path / name, error) from None
        if not has_size or total.hexdigest() != expected["sha256"]:
            raise Damaged(f"{path / name} is damaged: its size or checksum differs.")


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, and verify its checksum; raises Damaged."""
    try:
        with opened(path / MANIFEST) as file:
            text = file.read(MOST_JSON_BYTES + 1)
        if len(text) > MOST_JSON_BYTES:
            raise ValueError(f"more than {MOST_JSON_BYTES} bytes")
        document = json.loads(text)
        body, expected = document["checkpoint"], document["sha256"]
        body.items()
    except FileNotFoundError:
        raise Damaged(f"{path} has no {MANIFEST}.") from None
    except OSError as error:
        raise _unreadable(path / MANIFEST, error) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path / MANIFEST} cannot be parsed ({error!r:.200}).") from None
    if _sum_of(body) != expected:
        raise Damaged(f"{path / MANIFEST} is damaged: its checksum differs.")
    if body.get("format") != FORMAT:
        raise Damaged(f"{path} has format {body.get('format')}, this release reads {FORMAT}.")
    return dict(body)


def opened(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading; without `follow`, symbolic links are rejected.

    Raises OSError for any other kind of file: reading a pipe or a device might never end.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file")
    return open(descriptor, "rb")


def runs_in(folder: Path) -> frozenset[str]:
    """The names of the runs that have checkpoints in this folder; damaged checkpoints are skipped."""
    runs = set()
    for path in found(folder):
        with contextlib.suppress(Damaged):
            runs.add(str(read_manifest(path).get("run")))
    return frozenset(runs)


# Writing.


def _file_name(fragment: int) -> str:
    return f"fragment-{fragment}.safetensors"


def _save_fragment(
    fragment: int, checkpoint: Checkpoint, *, to: Path, before: tuple[Path, dict[str, Any]] | None
) -> dict[str, Any]:
    """Write one fragment, or link to its file in `before`, the previous checkpoint."""
    name = _file_name(fragment)
    if before is not None:
        path, plain = before
        # Link only within one incarnation: older files may have been damaged since.
        is_ours = plain.get("life") == checkpoint.incarnation
        version = to_plain(checkpoint.record.fragments[fragment].version)
        if is_ours and version == plain["fragments"].get(str(fragment), {}).get("version"):
            with contextlib.suppress(OSError):  # the file system may not support links
                os.link(path / name, to / name)
                return dict(plain["files"][name])
    layout = next(part for part in checkpoint.layout.all if part.fragment == fragment)
    size, digest = checkpoint_format.save_tensors(to / name, layout, checkpoint.tensors[fragment])
    return {"bytes": size, "sha256": digest}


def _write_manifest(path: Path, body: dict[str, Any]) -> None:
    with open(path, "x") as file:
        json.dump({"sha256": _sum_of(body), "checkpoint": body}, file)
        file.flush()
        os.fsync(file.fileno())


def _sum_of(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sync_folder(path: Path) -> None:
    """Flush a folder's entries, so that a rename survives a power failure."""
    with contextlib.suppress(OSError):  # some file systems do not support it
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _newest_manifest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    for path in found(folder)[:1]:
        with contextlib.suppress(Damaged):
            return path, read_manifest(path)
    return None
