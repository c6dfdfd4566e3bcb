"""`diloco-broker inspect` and `export`: describe checkpoints, and export the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from diloco_broker.cli import fail, failing_in_a_sentence
from diloco_broker.cli.config_options import AsJson
from diloco_protocol.clients import find_keys
from diloco_protocol.clients.command_line import (
    SERVER_VARIABLE,
    KeyFile,
    server_option,
    server_or_path,
)
from diloco_protocol.errors import UsageError
from diloco_protocol.roles import Role

# Modules that read checkpoints are imported where they are used: they import torch, which takes seconds.

ModelServer = Annotated[
    str | None, server_option(help="Address of a running broker, instead of SOURCE.")
]
RUN_FOLDER = Path("diloco-run")  # default --save-dir of `serve`
PATIENCE_S = 10.0  # timeout of a broker's replies


def export(  # noqa: PLR0917  each is an option
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            show_default=False,
            help="Folder of checkpoints, one checkpoint, or the address of a running broker "
            f"(tcp://HOST:PORT). Default: {SERVER_VARIABLE}, else {RUN_FOLDER}.",
        ),
    ] = None,
    server: ModelServer = None,
    to: Annotated[
        Path,
        typer.Option(
            help="File to write; safetensors.torch.load_file reads it. With --like, a folder."
        ),
    ] = Path("model.safetensors"),
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="HF_FOLDER",
            help="Folder written by save_pretrained (model or PEFT adapters); --to becomes a copy of it "
            "with this model's values, which from_pretrained loads.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file or folder.")
    ] = False,
    keys: KeyFile = None,
) -> None:
    """Export the global parameters as a safetensors file or as a Hugging Face model folder."""
    from diloco_broker.cli.checkpoint_report import newest_sound
    from diloco_broker.storage import checkpoint
    from diloco_broker.storage.model_file import model_of, write_model
    from diloco_broker.storage.model_folder import write_like
    from diloco_protocol.clients.observer import Observer
    from diloco_protocol.dtypes import SIZES, is_quantized

    with failing_in_a_sentence():
        if like is not None and to == Path("model.safetensors"):
            raise UsageError("--like writes a folder: give its name, --to FOLDER.")
        if to.is_dir() != (like is not None) and to.exists():
            kind = "folder" if to.is_dir() else "file"
            raise UsageError(f"{to} is a {kind} already; give another --to.")
        if to.exists() and not force and not (to.is_dir() and not any(to.iterdir())):
            raise UsageError(f"{to} exists already; give --force to replace it.")
        if not to.parent.is_dir():
            raise UsageError(f"The folder {to.parent} of --to {to.name} does not exist.")
        address, folder = server_or_path(source, server, RUN_FOLDER)
        if address is not None:
            key = find_keys(keys, Role.OPERATOR, Role.WORKER)
            with Observer(address, timeout=PATIENCE_S, keys=key) as observer:
                read = observer.read()
            versions = ", ".join(map(str, read.versions))
            model, what = read.tensors, f"version{'s'[: len(read.versions) != 1]} {versions}"
            if is_quantized(read.reply_dtype):
                what += (
                    f"; these are the workers' values (--reply-dtype {read.reply_dtype}), the master "
                    "copy is in the checkpoints"
                )
        else:
            path, found = newest_sound(folder, checkpoint.load)
            model, what = model_of(found), f"{path.name}, before round {found.number}"
            reply = str(found.config.get("reply_dtype", ""))
            if reply in SIZES and is_quantized(reply):
                what += f"; this is the master copy, of which workers hold an {reply} approximation"
        size = write_model(model, to) if like is None else write_like(model, to, like)
    typer.echo(f"{to}: {len(model)} tensors, {size:,} bytes, from {what}.")


def inspect(
    folder: Annotated[
        Path, typer.Argument(help="Folder of checkpoints, or one checkpoint.")
    ] = RUN_FOLDER,
    as_json: AsJson = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the checksums of the tensors.")
    ] = False,
) -> None:
    """List the checkpoints, check that they are intact, and describe the newest.

    Exit codes: 0 the newest is intact, 1 it is damaged, 2 there is none.
    """
    from diloco_broker.cli import checkpoint_report
    from diloco_broker.storage import checkpoint

    with failing_in_a_sentence():
        paths = checkpoint.at(folder)
    if not paths:
        fail(f"{folder} has no checkpoint.")
    found = [checkpoint_report.describe(path, quick=quick) for path in paths]
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "checkpoints": found}))
    else:
        typer.echo(checkpoint_report.as_text(folder, found))
    raise typer.Exit(0 if found[0]["sound"] else 1)
