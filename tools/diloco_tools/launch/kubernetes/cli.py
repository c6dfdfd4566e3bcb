"""`diloco-launch kubernetes`: prints the manifests of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from diloco_protocol.clients.command_line import failing_in_a_sentence
from diloco_protocol.errors import UsageError
from diloco_tools.launch.commands import COMMAND, check_serve_options, make_keys, serve_words
from diloco_tools.launch.kubernetes.manifest import as_yaml
from diloco_tools.launch.kubernetes.run import KubernetesRun

# So long that the names of pods, `NAME-island-123-node-0-12`, are DNS labels, too.
LABEL = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
# Of Kubernetes: 2, 500m, 1.5, 16Gi, 1e9.
QUANTITY = re.compile(r"\d+(\.\d+)?([eE]\d+|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")


def kubernetes(  # noqa: PLR0913  each is an option
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...", help="What starts the training in each pod, behind --."
        ),
    ],
    *,
    islands: Annotated[int, typer.Option(min=1, help="Workers: JobSets that fail alone.")],
    broker_image: Annotated[str, typer.Option(help="Of the Dockerfile's target broker.")],
    worker_image: Annotated[str, typer.Option(help="Of its target worker, with your script.")],
    nodes_per_island: Annotated[int, typer.Option(min=1, help="Pods of each worker.")] = 1,
    name: Annotated[str, typer.Option(help="Of the run; all names begin with it.")] = "diloco",
    namespace: Annotated[str, typer.Option(help="Where the objects are.")] = "default",
    keys: Annotated[
        Path | None,
        typer.Option(help="Folder of the run's keys, made once and kept. Default: keys-NAME."),
    ] = None,
    serve: Annotated[
        str,
        typer.Option(help="Options of diloco-broker serve: '--sync-every 500 --max-rounds 100'."),
    ] = "",
    gpus_per_node: Annotated[int, typer.Option(min=0, help="NVIDIA GPUs of each pod.")] = 0,
    storage: Annotated[str, typer.Option(help="Size of the broker's disk.")] = "20Gi",
    storage_class: Annotated[str | None, typer.Option(help="Of that disk.")] = None,
    broker_cpu: Annotated[str, typer.Option(help="Cores of the broker.")] = "2",
    broker_memory: Annotated[str, typer.Option(help="Memory of the broker.")] = "8Gi",
    worker_cpu: Annotated[str, typer.Option(help="Cores of each pod of an island.")] = "4",
    worker_memory: Annotated[str, typer.Option(help="Memory of each pod of an island.")] = "16Gi",
    grace: Annotated[
        int, typer.Option(min=1, max=3600, help="Seconds between SIGTERM and SIGKILL.")
    ] = 120,
    restarts: Annotated[
        int, typer.Option(min=0, help="Of an island of one pod in its pod, in a row.")
    ] = 3,
    replacements: Annotated[int, typer.Option(min=0, help="Of the pods of an island.")] = 100,
) -> None:
    """Print the objects of a run for kubectl apply -f -; checked by schema, not run on a cluster."""
    with failing_in_a_sentence(COMMAND):
        sizes = {
            "storage": storage,
            "broker-cpu": broker_cpu,
            "broker-memory": broker_memory,
            "worker-cpu": worker_cpu,
            "worker-memory": worker_memory,
        }
        for option, size in sizes.items():
            _check(size, QUANTITY, option, "a quantity of Kubernetes, like 2, 500m or 16Gi")
        labels = {"name": name, "namespace": namespace, "storage-class": storage_class or "a"}
        for option, label in labels.items():
            what = "small letters, digits and dashes, a letter first, 40 at most"
            _check(label, LABEL, option, what)
        for option, image in (("broker-image", broker_image), ("worker-image", worker_image)):
            _check(image, re.compile(r"[!-~]{1,255}"), option, "the name of an image")
        run = KubernetesRun(
            name=name,
            keys=keys or Path(f"keys-{name}"),
            broker_image=broker_image,
            worker_image=worker_image,
            command=tuple(command),
            islands=islands,
            nodes=nodes_per_island,
            namespace=namespace,
            gpus=gpus_per_node,
            storage=storage,
            storage_class=storage_class,
            broker_cpu=broker_cpu,
            broker_memory=broker_memory,
            worker_cpu=worker_cpu,
            worker_memory=worker_memory,
            grace=grace,
            restarts=restarts,
            replacements=replacements,
            serve=serve_words(serve),
        )
        check_serve_options(["--insecure", *run.serve], Path.cwd())
        make_keys(run.keys, run.workers)
        typer.echo(as_yaml(run), nl=False)


def _check(text: str, pattern: re.Pattern[str], option: str, what: str) -> None:
    if not pattern.fullmatch(text):
        raise UsageError(f"--{option} is {text!r:.80}; write {what}.")
