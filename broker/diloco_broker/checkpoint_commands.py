"""`diloco-broker inspect` and `export`: looking into checkpoints, and taking the model out."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_broker import checkpoint
from diloco_broker.checkpoint import Damaged
from diloco_broker.exporting import LiveModel, model_of_image, write_model
from diloco_protocol.errors import UsageError
from diloco_protocol.manifest import Kind

_SHOWN = ("mode", "workers", "sync_every", "outer_lr", "outer_momentum", "num_fragments")


def export(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder of checkpoints, one checkpoint, or the address of a running broker "
            "(tcp://HOST:PORT)."
        ),
    ] = "diloco-run",
    to: Annotated[
        Path, typer.Option(help="File to write; load it with safetensors.torch.load_file.")
    ] = Path("model.safetensors"),
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if it is there.")
    ] = False,
) -> None:
    """Write the global parameters as plain safetensors that load into the original model."""
    try:
        if to.exists() and not force:
            raise UsageError(f"{to} is there already; give --force to replace it.")
        if not to.parent.is_dir():
            raise UsageError(f"There is no folder {to.parent} to write {to.name} to.")
        if "://" in source:
            with LiveModel(source) as live:
                model, what = live.read()
        else:
            path, image = _newest_sound(Path(source))
            model, what = model_of_image(image), f"{path.name}, before round {image.number}"
        size = write_model(model, to)
    except UsageError as error:
        typer.echo(f"diloco-broker: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{to}: {len(model)} tensors, {size:,} bytes, from {what}.")


def inspect(
    folder: Annotated[
        Path, typer.Argument(help="Folder of checkpoints, or one checkpoint.")
    ] = Path("diloco-run"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for programs.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not read the tensors to check their sums.")
    ] = False,
) -> None:
    """Show what checkpoints there are, whether they are sound, and what the newest holds.

    Exits with 0 when the newest one is sound, 1 when it is not, 2 when there is none.
    """
    try:
        paths = _candidates(folder)
    except UsageError as error:
        typer.echo(f"diloco-broker: {error}", err=True)
        raise typer.Exit(2) from None
    if not paths:
        typer.echo(f"diloco-broker: There is no checkpoint in {folder}.", err=True)
        raise typer.Exit(2)
    found = [_describe(path, quick=quick) for path in paths]
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "checkpoints": found}))
    else:
        typer.echo(_as_text(folder, found))
    raise typer.Exit(0 if found[0]["sound"] else 1)


def _candidates(folder: Path) -> list[Path]:
    return checkpoint.at(folder)


def _newest_sound(folder: Path) -> tuple[Path, checkpoint.Image]:
    """The newest checkpoint that can be read; damaged ones are named on the way."""
    problems = []
    for path in _candidates(folder):
        try:
            return path, checkpoint.load(path)
        except Damaged as error:
            problems.append(str(error))
            typer.echo(f"Skipped: {error}", err=True)
    if problems:
        raise UsageError(f"None of the {len(problems)} checkpoints in {folder} is sound.")
    raise UsageError(
        f"There is no checkpoint in {folder}, and it is no address like tcp://HOST:PORT."
    )


def _describe(path: Path, *, quick: bool) -> dict[str, Any]:
    try:
        plain = checkpoint.read_manifest(path)
        if not quick:
            checkpoint.check_files(path, plain)
    except Damaged as error:
        return {"path": str(path), "sound": False, "problem": str(error)}
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
        "workers": plain["workers"],
        "totals": plain["totals"],
        "config": plain["config"],
    }


def _as_text(folder: Path, found: Sequence[dict[str, Any]]) -> str:
    lines = [f"{folder}: {len(found)} checkpoint{'s'[: len(found) != 1]}, the newest first", ""]
    for each in found:
        name = Path(each["path"]).name
        if each["sound"]:
            size = (
                f"{each['bytes'] / 1e6:,.1f} MB" if each["bytes"] > 1e5 else f"{each['bytes']:,} B"
            )
            lines.append(f"  {name}  before round {each['round']}, {_ago(each['age_s'])}, {size}")
        else:
            lines.append(f"  {name}  DAMAGED: {each['problem']}")
    sound = next((each for each in found if each["sound"]), None)
    if sound is not None:
        config = sound["config"]
        options = ", ".join(
            f"{name} {config[name]}" for name in _SHOWN if config.get(name) is not None
        )
        names = sorted(sound["workers"])
        workers = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
        lines += [
            "",
            f"  run         {sound['run']}, life {sound['life']} of the broker",
            f"  versions    {', '.join(map(str, sound['versions']))} (by fragment)",
            f"  model       {sound['parameters']:,} trainable parameters, {sound['tensors']} tensors",
            f"  optimizer   {sound['outer']}, remembers: {', '.join(sound['outer_state']) or 'nothing'}",
            f"  workers     {workers or 'none were here'}",
            f"  so far      {sound['totals'].get('rounds', 0)} rounds, "
            f"{sound['totals'].get('pushes', 0)} pushes",
            f"  options     {options}",
        ]
    return "\n".join(lines)


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
