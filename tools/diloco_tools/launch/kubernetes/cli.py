"""`diloco-launch kubernetes`: prints the manifests of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_protocol.clients.command_line import failing_in_a_sentence, with_options
from diloco_tools.launch.commands import COMMAND, check_serve_options, make_keys, serve_words
from diloco_tools.launch.kubernetes.objects import objects_of
from diloco_tools.launch.kubernetes.run import KubernetesRun, image
from diloco_tools.launch.yaml_text import yaml_text
from diloco_tools.options import options_of, reads

HEAD = """\
# The run {name}: a broker and {islands}. Written by diloco-launch kubernetes.
# It has been checked against the schemas of Kubernetes, and not run on a cluster.
# It contains secret keys: pass it to kubectl only.
"""


@with_options(options_of(KubernetesRun))
def kubernetes(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...", help="Command that starts the training in each pod, after --."
        ),
    ],
    *,
    islands: Annotated[int, typer.Option(min=1, help="Workers: JobSets that fail independently.")],
    broker_image: Annotated[
        Any,
        typer.Option(
            metavar="IMAGE", parser=reads(image), help="Of the Dockerfile's target broker."
        ),
    ],
    worker_image: Annotated[
        Any,
        typer.Option(
            metavar="IMAGE", parser=reads(image), help="Of its target worker, with your script."
        ),
    ],
    keys: Annotated[
        Path | None,
        typer.Option(help="Folder of the run's keys, made once and kept. Default: keys-NAME."),
    ] = None,
    serve: Annotated[
        str,
        typer.Option(help="Options of diloco-broker serve: '--sync-every 500 --max-rounds 100'."),
    ] = "",
    **given: Any,
) -> None:
    """Print the objects of a run for kubectl apply -f -; checked by schema, not run on a cluster."""
    with failing_in_a_sentence(COMMAND):
        run = KubernetesRun(
            keys or Path(f"keys-{given['name']}"),
            broker_image,
            worker_image,
            tuple(command),
            islands,
            serve_words(serve),
            **given,
        )
        check_serve_options(["--insecure", *run.serve], Path.cwd())
        make_keys(run.keys, run.workers)
        typer.echo(as_yaml(run), nl=False)


def as_yaml(run: KubernetesRun) -> str:
    """One document per object. Raises UsageError if PyYAML is missing."""
    islands = f"{run.islands} island{'s'[: run.islands != 1]}"
    return HEAD.format(name=run.name, islands=islands) + yaml_text(objects_of(run))
