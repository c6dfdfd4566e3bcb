"""`diloco-broker plan`: how a model is split into fragments, before a run or in one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_broker.cli.plan_report import Planned, as_json, as_text
from diloco_broker.core.own_plan import read_split
from diloco_broker.storage.model_header import read_header
from diloco_protocol.addresses import with_scheme
from diloco_protocol.clients.operator import Operator
from diloco_protocol.errors import ProtocolError, Unreachable, UsageError
from diloco_protocol.fragments.plan import OWN, FragmentPlan
from diloco_protocol.manifest import Manifest
from diloco_protocol.records import from_plain

DEFAULTS = {"sync_every": 500, "wire_dtype": "bf16", "reply_dtype": "fp32"}
IN_NO_ORDER = (
    "The file does not keep the order of the model's tensors; the likely one was taken (embeddings, "
    "layers by number, the rest). In a run the worker's model decides: diloco-broker plan "
    "tcp://HOST:PORT shows that."
)
ALL_TRAINED = "Every floating-point tensor was taken for trained; name others with --frozen."


@dataclass(frozen=True)
class Source:
    """A model, and the plan and options of the run that it is of, if it is of one."""

    name: str
    manifest: Manifest
    plan: FragmentPlan | None = None
    pattern: str = "strided"
    options: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    notes: tuple[str, ...] = ()


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A .safetensors file, a .pt state dict, a Hugging Face folder; or a run: a folder of "
            "checkpoints, the address of a broker (tcp://HOST:PORT)."
        ),
    ],
    num_fragments: Annotated[
        int | None, typer.Option(help="P. Default: the run's, or what --fragment-plan has, or 1.")
    ] = None,
    fragment_pattern: Annotated[
        str | None, typer.Option(help="strided, contiguous or balanced. Default: strided.")
    ] = None,
    fragment_plan: Annotated[
        Path | None,
        typer.Option(help="A split of one's own: JSON, {name or pattern of names: fragment}."),
    ] = None,
    sync_every: Annotated[int | None, typer.Option(help="H. Default: the run's, or 500.")] = None,
    wire_dtype: Annotated[str | None, typer.Option(help="Of pushes. Default: bf16.")] = None,
    reply_dtype: Annotated[str | None, typer.Option(help="Of replies. Default: fp32.")] = None,
    frozen: Annotated[
        list[str] | None,
        typer.Option(
            help="Name, or pattern of names, of parameters of a file that are not trained."
        ),
    ] = None,
    parameters: Annotated[
        bool, typer.Option("--parameters", help="Name every parameter, not only the layers.")
    ] = False,
    as_json_: Annotated[bool, typer.Option("--json", help="One JSON object for programs.")] = False,
) -> None:
    """Show how a model is split into fragments: which parameters, how many bytes, due when.

    Of model files only the headers are read.
    """
    asked = {"sync_every": sync_every, "wire_dtype": wire_dtype, "reply_dtype": reply_dtype}
    try:
        source = _source(model, frozen or [])
        split, pattern = _split(source, num_fragments, fragment_pattern, fragment_plan)
        options = {**source.options, **{k: v for k, v in asked.items() if v is not None}}
        view = split.view(source.manifest, **options)
    except (UsageError, Unreachable, ProtocolError) as error:
        typer.echo(f"diloco-broker: {error}", err=True)
        raise typer.Exit(2) from None
    planned = Planned(source.name, source.manifest, split, pattern, view, source.notes)
    if as_json_:
        typer.echo(json.dumps(as_json(planned)))
    else:
        typer.echo(as_text(planned, every_parameter=parameters))


def _split(
    source: Source, pieces: int | None, pattern: str | None, file: Path | None
) -> tuple[FragmentPlan, str]:
    """The plan that was asked for, and what its pattern is called."""
    if file is not None:
        if pattern is not None:
            raise UsageError(
                f"--fragment-pattern is {pattern}; it must be left out with --fragment-plan {file}, "
                "which says where each parameter goes."
            )
        own = read_split(file)
        if pieces not in (None, own.num_fragments):
            raise UsageError(
                f"{own.source} has {own.num_fragments} fragments, and --num-fragments is {pieces}; "
                f"give --num-fragments {own.num_fragments}, or leave it out."
            )
        return own.plan(source.manifest), OWN
    if source.plan is not None and pieces is None and pattern is None:
        return source.plan, source.pattern
    known = source.plan.num_fragments if source.plan is not None else 1
    pattern = pattern or ("strided" if source.pattern == OWN else source.pattern)
    pieces = known if pieces is None else pieces
    return FragmentPlan.of(source.manifest, pieces, pattern), pattern


def _source(model: str, frozen: Sequence[str]) -> Source:
    path = Path(model)
    manifests = (path / "checkpoint.json", *path.glob("checkpoint-*/checkpoint.json"))
    is_checkpoint = path.name == "checkpoint.json" or any(each.exists() for each in manifests)
    is_address = "://" in with_scheme(model) and not path.exists()
    if not is_checkpoint and not is_address:
        manifest, in_order = read_header(path, frozen)
        notes = (*([] if in_order else [IN_NO_ORDER]), *([] if frozen else [ALL_TRAINED]))
        return Source(path.name, manifest, notes=notes)
    if frozen:
        raise UsageError(f"--frozen is for model files; {model} knows what is trained.")
    return _of_broker(model) if is_address else _of_checkpoint(path)


def _of_broker(address: str) -> Source:
    with Operator(address) as operator:
        answer = operator.ask("manifest")
    if not answer.ok:
        raise UsageError(f"{operator.address}: {answer.text}")
    data = answer.data
    manifest = from_plain(Manifest, data["manifest"], "manifest")
    numbers = tuple(data["plan"]) or FragmentPlan.of(manifest).numbers(manifest)
    return _of_run(
        operator.address, manifest, numbers, data["config"], data.get("pattern", "unknown")
    )


def _of_checkpoint(path: Path) -> Source:
    from diloco_broker.storage import checkpoint

    for each in checkpoint.at(path):
        try:
            manifest, numbers, config = checkpoint.plan_at(each)
        except checkpoint.Damaged as error:
            typer.echo(f"Skipped: {error}", err=True)
            continue
        return _of_run(each.name, manifest, numbers, config, config["fragment_pattern"])
    raise UsageError(f"There is no sound checkpoint in {path}.")


def _of_run(
    name: str, manifest: Manifest, numbers: Sequence[int], config: Mapping[str, Any], pattern: str
) -> Source:
    split = FragmentPlan.from_numbers(manifest, numbers, config["num_fragments"])
    return Source(name, manifest, split, pattern, {key: config[key] for key in DEFAULTS})
