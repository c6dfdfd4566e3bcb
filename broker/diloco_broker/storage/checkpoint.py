"""Checkpoints on disk: there whole or not at all, found again, and not believed unless they are sound.

A checkpoint is a folder:

    checkpoint-0003-000000000412/    the third life of the broker; 412 is the number of the next round
        fragment-0.safetensors       parameters, buffers, integers, and the outer optimizer's state
        ...
        checkpoint.json              everything else, with size and SHA-256 of each file

The newest is the one that was written last: of the last life, and in it the one with the highest
number. (A run that was rewound has lower numbers than it had before.) When something else than the next
round has changed since, or what is there was damaged, `-2` is added to the name.

A checkpoint is written beside its place under a name that begins with a dot, each file is flushed to
the disk, and then the folder is renamed. A fragment that is what it was in the last checkpoint is a hard
link to the file that is there already.

Nothing in here knows the broker's state or runs in its loop. What is saved are immutable objects (see
`Image`), written chunk by chunk, so no copy of the model is made for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco_broker.storage import safetensors_writer
from diloco_broker.storage.safetensors_writer import Chunked
from diloco_protocol.chunks import FragmentLayout, ModelLayout, Segment, lay_out_plan
from diloco_protocol.codecs import segment_dtype
from diloco_protocol.errors import ProtocolError, UsageError
from diloco_protocol.manifest import Manifest
from diloco_protocol.records import from_plain, to_plain
from diloco_protocol.version import Ledger, VersionId

FORMAT = 1
MANIFEST = "checkpoint.json"
NAME = re.compile(r"checkpoint-(\d{4,})-(\d{12,})(?:-(\d+))?")


@dataclass(frozen=True)
class FragmentImage:
    """One fragment as it is saved. No tensor in it ever changes.

    Attributes:
        version: its name; `ledger` is what it contains.
        gradients: how many the outer optimizer has had of it.
        round, averaged: the last round of it.
        chunks: master values, fp32 or int64.
        outer: what the outer optimizer remembers of each chunk, by name; None where nothing yet.
        optimizer: a torch optimizer's `state_dict`; None without one.
        tags: of the versions before this one, by counter, as far as they are known.
    """

    version: VersionId
    ledger: Ledger
    gradients: int
    round: int
    averaged: int
    chunks: Sequence[Tensor]
    outer: Mapping[str, Sequence[Tensor | None]] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    tags: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Image:
    """All that a broker needs to go on: fragments, the frozen one last, and what surrounds them.

    Attributes:
        number: of the next round.
        life: of the broker; the first is 1.
        plan: the fragment of each tensor of the manifest.
        epoch: name of that life.
        workers: counters of the workers that were here, by id.
        outer: kind of the outer optimizer.
        config: options of the broker, for people and for `inspect`.
        totals: counters of the run so far.
    """

    run: str
    number: int
    life: int
    manifest: Manifest
    plan: tuple[int, ...]
    num_fragments: int
    chunk_elements: int
    outer: str
    fragments: Mapping[int, FragmentImage]
    epoch: str = ""
    workers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)

    @property
    def layout(self) -> ModelLayout:
        return lay_out_plan(
            self.manifest,
            self.plan,
            num_fragments=self.num_fragments,
            chunk_elements=self.chunk_elements,
        )


class Damaged(Exception):
    """A checkpoint that cannot be used; the sentence says which and why."""


class NotPermitted(Damaged):
    """This user may not read a checkpoint, which may well be sound."""


def _unreadable(path: Path, error: OSError) -> Damaged:
    kind = NotPermitted if isinstance(error, PermissionError) else Damaged
    return kind(f"{path} cannot be read: {error.strerror or error}.")


def save(folder: Path, image: Image, keep: int) -> Path:
    """Write a checkpoint, and remove all but the newest `keep` of the run. Returns its path.

    Raises:
        OSError: the disk is full, or the folder cannot be written. What was there is untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = name = folder / f"checkpoint-{image.life:04d}-{image.number:012d}"
    again = 1
    while place.exists():
        if _has(place, image):
            return place
        again += 1  # never in the place of one that is there: a kill in between would lose both
        place = name.with_name(f"{name.name}-{again}")
    before = _newest_manifest(folder)
    aside = folder / f".{place.name}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        files = {
            _file_name(fragment): _save_fragment(folder, before, aside, fragment, image)
            for fragment in image.fragments
        }
        _write_manifest(aside / MANIFEST, _plain(image, files))
        _sync_folder(aside)
        aside.rename(place)
        _sync_folder(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _retire(folder, image.run, keep)
    return place


def _has(place: Path, image: Image) -> bool:
    """Whether this very image is there, sound: then it is not written again, and is never away."""
    try:
        plain = read_manifest(place)
        check_files(place, plain)
    except Damaged:
        return False
    return bool(plain == _as_read(_plain(image, plain["files"])))


def _as_read(body: Any) -> Any:
    return json.loads(json.dumps(body))


def sweep(folder: Path) -> None:
    """Remove what brokers that were killed have left half written; for the one that has the folder."""
    for path in folder.glob(".checkpoint-*"):
        shutil.rmtree(path, ignore_errors=True)


def _retire(folder: Path, run: str, keep: int) -> None:
    """Remove old checkpoints. Those of other runs are somebody's, and damaged ones belong to no run."""
    left = keep
    for path in found(folder):
        try:
            of_run = run_of(path)
        except Damaged:
            continue
        if of_run != run:
            continue
        left -= 1
        if left < 0:
            _remove(path)


def _remove(path: Path) -> None:
    """Out of sight first: a kill in between leaves nothing that looks like a checkpoint."""
    gone = path.with_name(f".{path.name}.gone")
    with contextlib.suppress(OSError):
        path.rename(gone)
        shutil.rmtree(gone)


def run_of(path: Path) -> str:
    """The run that a checkpoint is of; raises Damaged."""
    return str(read_manifest(path).get("run"))


def life_of(path: Path) -> int:
    """The life of the broker that wrote a checkpoint, by its name."""
    found = NAME.fullmatch(path.name)
    return int(found[1]) if found else 0


def at(place: Path) -> list[Path]:
    """The checkpoint at this place, given by its folder or its manifest, or those in this folder.

    Raises:
        UsageError: the place may not be read.
    """
    if place.name == MANIFEST:
        place = place.parent
    try:
        return [place] if (place / MANIFEST).exists() else found(place)
    except OSError as error:
        raise UsageError(f"{place} cannot be read: {error.strerror}.") from None


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first, sound or not."""
    if not folder.is_dir():
        return []
    named = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    order = {path: (int(n[1]), int(n[2]), int(n[3] or 1)) for n, path in named if n}
    return sorted(order, key=order.__getitem__, reverse=True)


def load(path: Path) -> Image:
    """Read a checkpoint and check every byte of it; raises Damaged."""
    plain = read_manifest(path)
    try:
        image = _from_plain(plain)
        layouts = {part.fragment: part for part in image.layout.all}
        fragments = {}
        check_files(path, plain)
        for key, described in plain["fragments"].items():
            fragment = int(key)
            fragments[fragment] = _load_fragment(path, layouts[fragment], described)
        wanted = {part.fragment for part in image.layout.all if part.chunks}
        if set(fragments) != wanted:
            raise Damaged(f"{path} has fragments {sorted(fragments)} of {sorted(wanted)}.")
    except (KeyError, TypeError, ValueError, ProtocolError, UsageError, SafetensorError) as error:
        raise Damaged(f"{path} cannot be read: {error!r:.200}.") from None
    return Image(**{**vars(image), "fragments": fragments})


def plan_at(path: Path) -> tuple[Manifest, tuple[int, ...], Mapping[str, Any]]:
    """Of a checkpoint without its tensors: model, fragment of each tensor, options; raises Damaged."""
    plain = read_manifest(path)
    try:
        image = _from_plain(plain)
    except (KeyError, TypeError, ValueError, ProtocolError) as error:
        raise Damaged(f"{path} cannot be read: {error!r:.200}.") from None
    return image.manifest, image.plan, image.config


def check_files(path: Path, plain: Mapping[str, Any]) -> None:
    """Compare size and sum of each file with what a checkpoint's manifest says; raises Damaged."""
    for name, told in plain["files"].items():
        _check_file(path / name, told)


def read_manifest(path: Path) -> dict[str, Any]:
    """The JSON of a checkpoint, its own sum checked; raises Damaged."""
    try:
        whole = json.loads((path / MANIFEST).read_text())
        body, told = whole["checkpoint"], whole["sha256"]
    except FileNotFoundError:
        raise Damaged(f"{path} has no {MANIFEST}.") from None
    except OSError as error:
        raise _unreadable(path / MANIFEST, error) from None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path / MANIFEST} cannot be understood ({error!r:.200}).") from None
    if _sum_of(body) != told:
        raise Damaged(f"{path / MANIFEST} is not what was written: its checksum differs.")
    if body.get("format") != FORMAT:
        raise Damaged(f"{path} has format {body.get('format')}, this release reads {FORMAT}.")
    return dict(body)


# Writing.


def _file_name(fragment: int) -> str:
    return f"fragment-{fragment}.safetensors"


def _save_fragment(
    folder: Path,
    before: tuple[Path, dict[str, Any]] | None,
    aside: Path,
    fragment: int,
    image: Image,
) -> dict[str, Any]:
    """Write one fragment, or link to the file that has it. Returns size and sum."""
    name = _file_name(fragment)
    this = image.fragments[fragment]
    if before is not None:
        path, plain = before
        told = plain["fragments"].get(str(fragment), {})
        # What an earlier life has written may have come to harm since.
        if plain["life"] == image.life and told.get("version") == to_plain(this.version):
            with contextlib.suppress(OSError):  # another file system, or none that links
                os.link(path / name, aside / name)
                return dict(plain["files"][name])
    layout = next(part for part in image.layout.all if part.fragment == fragment)
    size, digest = safetensors_writer.write(aside / name, _tensors(layout, this))
    return {"bytes": size, "sha256": digest}


def _tensors(layout: FragmentLayout, image: FragmentImage) -> dict[str, Chunked]:
    """What a file of a fragment holds: its segments, and the outer state of its parameters."""
    tensors = {}
    for segment in Segment:
        chunks = [image.chunks[span.index] for span in layout.spans if span.segment is segment]
        if chunks:
            tensors[segment.value] = Chunked(chunks, segment_dtype(segment, torch.float32))
    for name, states in image.outer.items():
        known = [state for state in states if state is not None]
        if known:
            tensors[f"outer.{name}"] = Chunked(known, torch.float32)
    for key, tensor in _optimizer_tensors(image.optimizer):
        flat = tensor.detach().to("cpu", torch.float32).contiguous().reshape(-1)
        tensors[f"optimizer.{key}"] = Chunked([flat], torch.float32)
    return tensors


def _optimizer_tensors(state: Mapping[str, Any] | None) -> list[tuple[str, Tensor]]:
    found = []
    for number, values in (state or {}).get("state", {}).items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                found.append((f"{number}.{name}", value))
    return found


def _plain(image: Image, files: Mapping[str, Any]) -> dict[str, Any]:
    fragments = {}
    for fragment, each in image.fragments.items():
        fragments[str(fragment)] = {
            "version": to_plain(each.version),
            "ledger": each.ledger.plain(in_hex=False),
            "gradients": each.gradients,
            "round": each.round,
            "averaged": each.averaged,
            "tags": [list(pair) for pair in each.tags.items()],
            "outer": {
                name: [state is not None for state in states] for name, states in each.outer.items()
            },
            "optimizer": _plain_optimizer(each.optimizer),
        }
    return {
        "format": FORMAT,
        "run": image.run,
        "number": image.number,
        "life": image.life,
        "manifest": to_plain(image.manifest),
        "plan": list(image.plan),
        "num_fragments": image.num_fragments,
        "chunk_elements": image.chunk_elements,
        "outer": image.outer,
        "epoch": image.epoch,
        "workers": {name: dict(counters) for name, counters in image.workers.items()},
        "config": dict(image.config),
        "totals": dict(image.totals),
        "fragments": fragments,
        "files": dict(files),
    }


def _plain_optimizer(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A torch optimizer's state without its tensors, which are in the file, by their shapes."""
    if state is None:
        return None
    values = {
        str(number): {
            name: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
            if isinstance(value, Tensor)
            else {"value": value}
            for name, value in each.items()
        }
        for number, each in state["state"].items()
    }
    return {"state": values, "param_groups": state["param_groups"]}


def _write_manifest(path: Path, body: dict[str, Any]) -> None:
    with open(path, "x") as file:
        json.dump({"sha256": _sum_of(body), "checkpoint": body}, file)
        file.flush()
        os.fsync(file.fileno())


def _sum_of(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sync_folder(path: Path) -> None:
    """Flush a folder's entries: without it a rename may be lost with the power."""
    with contextlib.suppress(OSError):  # some file systems cannot
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


# Reading.


def _from_plain(plain: Mapping[str, Any]) -> Image:
    manifest = from_plain(Manifest, plain["manifest"], "manifest")
    return Image(
        run=str(plain["run"]),
        number=int(plain["number"]),
        life=int(plain["life"]),
        manifest=manifest,
        plan=tuple(int(part) for part in plain["plan"]),
        num_fragments=int(plain["num_fragments"]),
        chunk_elements=int(plain["chunk_elements"]),
        outer=str(plain["outer"]),
        fragments={},
        epoch=str(plain["epoch"]),
        workers=plain["workers"],
        config=plain["config"],
        totals=plain["totals"],
    )


def _check_file(path: Path, told: Mapping[str, Any]) -> None:
    try:
        size, digest = safetensors_writer.checksum(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    if (size, digest) != (told["bytes"], told["sha256"]):
        raise Damaged(f"{path} is not what was written: its size or checksum differs.")


def _load_fragment(path: Path, layout: FragmentLayout, told: Mapping[str, Any]) -> FragmentImage:
    """The tensors of one fragment, each chunk in memory of its own."""
    with safe_open(path / _file_name(layout.fragment), framework="pt") as file:
        segments = {s: file.get_tensor(s.value) for s in Segment if layout.lengths[s]}
        for segment, tensor in segments.items():
            if tensor.numel() != layout.lengths[segment]:
                raise Damaged(f"{path} has {tensor.numel()} {segment.value} in {layout.fragment}.")
        chunks = [segments[s.segment][s.start : s.stop].clone() for s in layout.spans]
        outer = {}
        for name, known in told["outer"].items():
            whole = file.get_tensor(f"outer.{name}") if any(known) else torch.empty(0)
            outer[name] = _split(whole, layout, known)
        optimizer = _load_optimizer(file, told["optimizer"])
    return FragmentImage(
        version=from_plain(VersionId, told["version"], "version"),
        ledger=Ledger.from_plain(told["ledger"]),
        gradients=int(told["gradients"]),
        round=int(told["round"]),
        averaged=int(told["averaged"]),
        chunks=chunks,
        outer=outer,
        optimizer=optimizer,
        tags={int(counter): int(tag) for counter, tag in told.get("tags", ())},
    )


def _split(whole: Tensor, layout: FragmentLayout, known: Sequence[bool]) -> list[Tensor | None]:
    """The outer state of each chunk, from those that had one end to end."""
    found: list[Tensor | None] = []
    start = 0
    for span, is_known in zip(layout.spans, known, strict=True):
        stop = start + span.elements if is_known else start
        found.append(whole[start:stop].clone() if is_known else None)
        start = stop
    return found


def _load_optimizer(file: Any, told: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if told is None:
        return None
    state: dict[int, dict[str, Any]] = {}
    for number, values in told["state"].items():
        state[int(number)] = {}
        for name, value in values.items():
            if "shape" in value:
                flat = file.get_tensor(f"optimizer.{number}.{name}")
                dtype = getattr(torch, value["dtype"])
                state[int(number)][name] = flat.reshape(value["shape"]).to(dtype).clone()
            else:
                state[int(number)][name] = value["value"]
    return {"state": state, "param_groups": told["param_groups"]}
