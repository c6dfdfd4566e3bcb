"""`diloco-broker plan`: shows how a model is split into fragments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_broker.cli import failing_in_a_sentence
from diloco_broker.cli.config_options import DEFAULTS, AsJson, parameter
from diloco_broker.cli.plan_report import Planned, as_json, as_text
from diloco_broker.storage.model_header import read_header
from diloco_broker.storage.own_plan import read_split
from diloco_protocol.clients import Operator, find_keys
from diloco_protocol.clients.command_line import (
    KeyFile,
    server_option,
    server_or_path,
    with_options,
)
from diloco_protocol.errors import UsageError
from diloco_protocol.fragments import OWN, FragmentPlan
from diloco_protocol.manifest import Manifest
from diloco_protocol.records import from_plain
from diloco_protocol.roles import Role

OPTIONS = {
    "num_fragments": "P: number of fragments. Default: that of the run or --fragment-plan, else 1.",
    "fragment_pattern": "Split: strided, contiguous or balanced. Default: strided.",
    "fragment_plan": "File with a custom split: JSON, {name or pattern of names: fragment}.",
    "sync_every": "H: steps between two pushes of a fragment. Default: that of the run, else 500.",
    "wire_dtype": "Dtype of pushes. Default: that of the run, else bf16.",
    "reply_dtype": "Dtype of replies. Default: that of the run, else fp32.",
}
SPLIT = ("num_fragments", "fragment_pattern", "fragment_plan")
# Options that determine when the fragments of a run are sent, and their size in bytes.
USED = ("sync_every", "wire_dtype", "reply_dtype")
IN_NO_ORDER = (
    "The file does not have the order of the model's tensors; the likely order is assumed (embeddings, "
    "layers by number, other tensors). A run uses the order of the worker's model: diloco-broker plan "
    "tcp://HOST:PORT shows it."
)
ALL_TRAINED = "Every floating-point tensor is assumed to be trained; give the others with --frozen."


@dataclass(frozen=True)
class Source:
    """A model, and the plan and options of its run, if any."""

    name: str
    manifest: Manifest
    plan: FragmentPlan | None = None
    pattern: str = "strided"
    options: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    notes: tuple[str, ...] = ()


@with_options(parameter(name, None, text) for name, text in OPTIONS.items())
def plan(  # noqa: PLR0917  each is an option
    model: Annotated[
        str | None,
        typer.Argument(
            show_default=False,
            help="Model (.safetensors file, .pt state dict or Hugging Face folder) or run (folder of "
            "checkpoints or address of a broker, tcp://HOST:PORT). Default: DILOCO_SERVER.",
        ),
    ] = None,
    server: Annotated[
        str | None, server_option(help="Address of a broker, instead of MODEL.")
    ] = None,
    frozen: Annotated[
        list[str] | None,
        typer.Option(
            help="Name, or pattern of names, of untrained parameters of a model file; repeatable."
        ),
    ] = None,
    parameters: Annotated[
        bool, typer.Option("--parameters", help="List every parameter, not only the layers.")
    ] = False,
    as_json_: AsJson = False,
    keys: KeyFile = None,
    **options: Any,
) -> None:
    """Show how a model is split into fragments: their parameters, bytes and schedule.

    Only the headers of model files are read.
    """
    asked = {name: options[name] for name in USED if options[name] is not None}
    with failing_in_a_sentence():
        source = _source(*server_or_path(model, server), frozen or [], keys)
        split, pattern = _split(source, *(options[name] for name in SPLIT))
        view = split.view(source.manifest, **{name: source.options[name] for name in USED} | asked)
    planned = Planned(source.name, source.manifest, split, pattern, view, source.notes)
    if as_json_:
        typer.echo(json.dumps(as_json(planned)))
    else:
        typer.echo(as_text(planned, every_parameter=parameters))


def _split(
    source: Source, pieces: int | None, pattern: str | None, file: Path | None
) -> tuple[FragmentPlan, str]:
    """The requested plan, and the name of its pattern."""
    if file is not None:
        if pattern is not None:
            raise UsageError(
                f"--fragment-pattern is {pattern}; it must be omitted with --fragment-plan {file}, "
                "which assigns each parameter to a fragment."
            )
        own = read_split(file)
        if pieces not in (None, own.num_fragments):
            raise UsageError(
                f"{own.source} has {own.num_fragments} fragments, but --num-fragments is {pieces}; "
                f"give --num-fragments {own.num_fragments}, or omit it."
            )
        return own.plan(source.manifest), OWN
    if source.plan is not None and pieces is None and pattern is None:
        return source.plan, source.pattern
    known = source.plan.num_fragments if source.plan is not None else 1
    pattern = pattern or ("strided" if source.pattern == OWN else source.pattern)
    pieces = known if pieces is None else pieces
    return FragmentPlan.of(source.manifest, pieces, pattern), pattern


def _source(address: str | None, path: Path, frozen: Sequence[str], keys: Path | None) -> Source:
    manifests = (path / "checkpoint.json", *path.glob("checkpoint-*/checkpoint.json"))
    is_checkpoint = path.name == "checkpoint.json" or any(each.exists() for each in manifests)
    if not is_checkpoint and address is None:
        manifest, in_order = read_header(path, frozen)
        notes = (*([] if in_order else [IN_NO_ORDER]), *([] if frozen else [ALL_TRAINED]))
        return Source(path.name, manifest, notes=notes)
    if frozen:
        raise UsageError(
            f"--frozen is for model files; {address or path} has the trained parameters itself."
        )
    return _of_checkpoint(path) if address is None else _of_broker(address, keys)


def _of_broker(address: str, keys: Path | None) -> Source:
    with Operator(address, keys=find_keys(keys, Role.OPERATOR, Role.WORKER)) as operator:
        answer = operator.ask("manifest")
    if not answer.ok:
        raise UsageError(f"{operator.address}: {answer.text}")
    data = answer.data
    manifest = from_plain(Manifest, data["manifest"], "manifest")
    numbers = tuple(data["plan"]) or FragmentPlan.of(manifest).numbers(manifest)
    pattern = data.get("pattern", "unknown")
    return _of_run(operator.address, manifest, numbers, data["config"], pattern)


def _of_checkpoint(path: Path) -> Source:
    from diloco_broker.cli.checkpoint_report import newest_sound
    from diloco_broker.storage import checkpoint

    place, found = newest_sound(path, checkpoint.load_record)
    record, config = found.record, found.config
    return _of_run(place.name, record.manifest, record.plan, config, config["fragment_pattern"])


def _of_run(
    name: str, manifest: Manifest, numbers: Sequence[int], config: Mapping[str, Any], pattern: str
) -> Source:
    split = FragmentPlan.from_numbers(manifest, numbers, config["num_fragments"])
    return Source(name, manifest, split, pattern, config)
