"""`diloco-launch sky`: writes SkyPilot tasks for a broker and for islands on scattered GPUs.

The broker is a cluster of one small on-demand machine. Each island is a managed job: SkyPilot finds its
GPUs, and replaces them where a spot machine is taken away. The tasks are checked by SkyPilot's own
parser; no cloud was used.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_protocol.clients.command_line import failing_in_a_sentence, with_options
from diloco_protocol.errors import UsageError
from diloco_tools.launch.commands import COMMAND, check_serve_options, make_keys, serve_words
from diloco_tools.launch.yaml_text import yaml_text
from diloco_tools.options import matching, option, options_of, reads

CONTROL_PORT, FEED_PORT, RENDEZVOUS_PORT = 8512, 8513, 29400
START = "start.sh"
# Of clusters and jobs on any cloud: some allow 35 characters, and SkyPilot adds its own.
_name = matching(
    r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?",
    "lower-case letters, digits and dashes, a letter first, at most 20",
)
_at_least = matching(r"\d+(\.\d+)?\+?", "a number, such as 4, or at least that: 4+")
PLACE = r"[A-Za-z0-9][\w.*/-]*"
_place = matching(PLACE, "a place such as us-east-1 or gcp/us-central1")
_ISLAND = re.compile(rf"(?:([1-9]\d{{0,2}})x)?([A-Za-z][\w.-]*)(?:@({PLACE}))?")
# Its folder on the disk stays when SkyPilot stops the machine and starts it again.
_SERVE = """\
chmod -R go= ~/diloco/keys && cd ~/diloco || exit 1
while :; do
  {serve} && exit 0
  code=$?
  case $code in 3) exit 0 ;; 2 | 126 | 127) exit "$code" ;; esac  # over, or called wrongly
  echo "the broker ended with code $code; it restarts"
  sleep 5
done
"""
# SkyPilot hands files to managed jobs through a bucket, which keeps no modes.
_TRAIN = """\
chmod -R go= ~/diloco-secret || exit 1
mkdir -p -m 700 ~/.diloco && install -m 600 ~/diloco-secret/worker.key ~/.diloco/worker.key || exit 1
export DILOCO_KEYS=~/.diloco/worker.key
export PET_NNODES=$SKYPILOT_NUM_NODES PET_RDZV_BACKEND=c10d PET_RDZV_ID={worker}
export PET_RDZV_ENDPOINT=$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{port}
export PET_TEE=3 TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[{worker} rank ${{rank}}]: '
exec {command}
"""


@dataclass(frozen=True)
class Island:
    """The accelerators of each node of an island; `place` as SkyPilot's `infra`, None: anywhere."""

    gpus: int
    kind: str
    place: str | None


def island(text: str) -> Island:
    """Read `8xA100@us-east-1`. Raises ValueError."""
    found = _ISLAND.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r:.80} is invalid; expected GPUs and a place, such as 8xA100@us-east-1, "
            "8xH100@gcp/us-central1, or 1xL4 for any place."
        )
    count, kind, place = found.groups()
    return Island(int(count or 1), kind, place and _infra(place))


def _infra(place: str) -> str:
    """A region alone is one of any cloud."""
    return place if "/" in place else f"*/{place}"


@dataclass(frozen=True)
class SkyRun:
    """A run by SkyPilot. Fields declared as options are those of `diloco-launch sky`.

    Attributes:
        folder: of the run, on this machine; absolute.
        start_in: the folder that is copied to each node of an island; absolute.
        command: starts the training on each node of an island.
        serve: options of `diloco-broker serve`.
    """

    folder: Path
    start_in: Path
    command: tuple[str, ...]
    islands: tuple[Island, ...]
    serve: tuple[str, ...] = ()
    name: str = option("diloco", "Name of the run; all names begin with it.", parse=_name)
    nodes: int = option(1, "Nodes of each worker.", "--nodes-per-island", min=1)
    spot: bool = option(True, "Islands on spot machines.", "--spot/--on-demand")
    setup: str = option(
        "pip install diloco-broker", "Shell commands that prepare each machine, before it starts."
    )
    broker_at: str | None = option(
        None, "Where the broker is: REGION or CLOUD/REGION.", parse=_place
    )
    broker_cpus: str = option("2+", "Cores of the broker.", parse=_at_least)
    broker_memory: str = option("8+", "Memory of the broker in GB.", parse=_at_least)
    storage: int = option(50, "Size of the broker's disk in GB.", min=10)
    restarts: int = option(3, "Consecutive restarts of an island of one node in its place.", min=0)
    replacements: int = option(
        100, "Restarts of an island on other machines after failures.", min=0
    )

    @property
    def broker(self) -> str:
        return f"{self.name}-broker"

    @property
    def workers(self) -> list[str]:
        return [f"island-{number}" for number in range(len(self.islands))]

    @property
    def keys(self) -> Path:
        return self.folder / "keys"


def broker_task(run: SkyRun) -> dict[str, Any]:
    own = {
        "--workers": str(len(run.islands)),
        "--keys": "keys",
        "--bind": f"tcp://0.0.0.0:{CONTROL_PORT}",
        "--feed": f"tcp://0.0.0.0:{FEED_PORT}",
        "--save-dir": "run",
    }
    options = [word for pair in own.items() for word in pair] + list(run.serve)
    where = {"infra": _infra(run.broker_at)} if run.broker_at else {}
    return {
        "name": run.broker,
        "resources": {
            **where,
            "cpus": run.broker_cpus,
            "memory": run.broker_memory,
            "disk_size": run.storage,
            "ports": [CONTROL_PORT, FEED_PORT],
            "use_spot": False,
        },
        "file_mounts": {
            f"~/diloco/keys/{name}": str(run.keys / name) for name in ("broker.key", "allowed")
        },
        "setup": run.setup,
        "run": _SERVE.format(serve=shlex.join(["diloco-broker", "serve", *options])),
    }


def island_task(run: SkyRun, number: int) -> dict[str, Any]:
    wanted, worker = run.islands[number], run.workers[number]
    # One node of several cannot be restarted alone: the others are in the middle of a step.
    restarts = run.restarts if run.nodes == 1 else 0
    launcher = ["diloco-worker", "run", "--over-is-success", "--restarts", str(restarts), "--"]
    return {
        "name": f"{run.name}-{worker}",
        "num_nodes": run.nodes,
        "workdir": str(run.start_in),
        "resources": {
            **({"infra": wanted.place} if wanted.place else {}),
            "accelerators": f"{wanted.kind}:{wanted.gpus}",
            "use_spot": run.spot,
            "job_recovery": {"max_restarts_on_errors": run.replacements},
        },
        "envs": {
            "DILOCO_SERVER": None,  # SkyPilot asks for it: --env DILOCO_SERVER=tcp://HOST:PORT
            "DILOCO_WORKER_ID": worker,
            "DILOCO_SHARD_INDEX": str(number),
            "DILOCO_NUM_SHARDS": str(len(run.islands)),
        },
        "file_mounts": {
            "~/diloco-secret/worker.key": str(run.keys / "clients" / f"worker-{worker}.key")
        },
        "setup": run.setup,
        "run": _TRAIN.format(
            worker=worker, port=RENDEZVOUS_PORT, command=shlex.join([*launcher, *run.command])
        ),
    }


def start_script(run: SkyRun) -> str:
    """Commands of SkyPilot that start the run."""

    def file(name: str) -> str:
        return shlex.quote(str(run.folder / f"{name}.yaml"))

    jobs = "\n".join(
        f"sky jobs launch --yes --detach-run --name {run.name}-{worker} "
        f'--env DILOCO_SERVER="$server" {file(worker)}'
        for worker in run.workers
    )
    return f"""\
#!/bin/sh
# Starts the run {run.name}. Written by diloco-launch sky; no cloud was used to test it.
# The model:  rsync -P {run.broker}:diloco/run/final-model.safetensors .
# The end:    sky jobs cancel --name {run.name}-island-N, then sky down {run.broker}
set -eu
sky launch --yes --detach-run --cluster {run.broker} {file("broker")}
server=tcp://$(sky status --ip {run.broker}):{CONTROL_PORT}
{jobs}
"""


def write(run: SkyRun) -> None:
    """Write the tasks and the script; existing keys stay. Raises UsageError."""
    tasks = {"broker": broker_task(run)}
    tasks |= {worker: island_task(run, number) for number, worker in enumerate(run.workers)}
    texts = {f"{name}.yaml": yaml_text([task]) for name, task in tasks.items()}
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        for name, text in (texts | {START: start_script(run)}).items():
            (run.folder / name).write_text(text)
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be written: {error.strerror}; give a --folder."
        ) from None
    make_keys(run.keys, run.workers)


@with_options(options_of(SkyRun))
def sky(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...", help="Command that starts the training on each node, after --."
        ),
    ],
    *,
    islands: Annotated[
        list[Any],
        typer.Option(
            "--island",
            metavar="GPUS",
            parser=reads(island),
            help="A worker, a job of its own: 8xA100@us-east-1, 8xH100@gcp/us-central1, or 1xL4 for "
            "any place; repeatable.",
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of tasks and keys. Default: ~/.diloco/runs/NAME."),
    ] = None,
    serve: Annotated[
        str,
        typer.Option(help="Options of diloco-broker serve: '--sync-every 500 --max-rounds 100'."),
    ] = "",
    **given: Any,
) -> None:
    """Write SkyPilot tasks: a broker, islands on spot machines; checked by its parser, no cloud used."""
    with failing_in_a_sentence(COMMAND):
        here = Path.cwd().resolve()
        usual = Path.home() / ".diloco" / "runs" / given["name"]
        run = SkyRun(
            (folder or usual).resolve(),
            here,
            tuple(command),
            tuple(islands),
            serve_words(serve),
            **given,
        )
        if run.folder.is_relative_to(here):
            raise UsageError(
                f"SkyPilot would copy {run.folder}, which holds all keys, to each island with the "
                "current folder; give a --folder outside it."
            )
        check_serve_options(["--insecure", *run.serve], here)
        write(run)
    typer.echo(f"{run.folder} has the run {run.name}: tasks, keys, {START}.")
    typer.echo(f"Start: sh {shlex.quote(str(run.folder / START))}")
