"""`diloco-worker run`: starts a training script with the settings of its run, and restarts it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from diloco_protocol import UsageError
from diloco_protocol.addresses import address_or_path
from diloco_protocol.clients.command_line import (
    fail,
    failing_in_a_sentence,
    server_of,
    server_option,
)
from diloco_protocol.clients.keys import HANDED_OUT
from diloco_protocol.roles import Role
from diloco_worker.auto import SEED_OFFSET, with_auto
from diloco_worker.cli.training_program import TrainingProgram
from diloco_worker.launching import END_FILE, RUN_IS_OVER, Restarts
from diloco_worker.settings import (
    NUM_SHARDS,
    SHARD_INDEX,
    chosen_shard,
    host_name,
    resolve,
    worker_keys,
)

COMMAND = "diloco-worker"


def run(  # noqa: PLR0913  each is an option
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="The command that starts the training script; ADDR before it is the same as --server.",
        ),
    ],
    *,
    server: Annotated[str | None, server_option(otherwise="")] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="The worker's key file, or the folder of diloco-broker keygen."),
    ] = None,
    worker_id: Annotated[
        str | None,
        typer.Option(help="Default: the name of the key; without one host name and slot."),
    ] = None,
    slot: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of this worker on its machine. Default: the shard index, else 0."
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Restart it after up to this many failures in a row.")
    ] = 0,
    shard_index: Annotated[
        int | None, typer.Option(min=0, help="Its share of the data, from 0.")
    ] = None,
    num_shards: Annotated[
        int | None, typer.Option(min=1, help="How many shares there are.")
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="For a script without DiLoCo: attach to its optimizers.")
    ] = False,
    own_seed: Annotated[
        bool,
        typer.Option(
            "--own-seed",
            help="With --auto: add a number of this worker to each seed of torch.manual_seed, so that "
            "no two workers shuffle the data in the same order.",
        ),
    ] = False,
    over_is_success: Annotated[
        bool,
        typer.Option(
            "--over-is-success",
            help="Exit with 0, not 3, when the run is over, for launchers that treat any other code as "
            "a failure.",
        ),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background; kill the pid to stop it.")
    ] = False,
    log_file: Annotated[
        Path | None,
        typer.Option(help="With --detach. Default: diloco-worker-ID.log in this folder."),
    ] = None,
) -> None:
    """Run a training script as a worker: diloco-worker run HOST:8512 -- python train.py

    SIGTERM, Ctrl-C, SIGHUP, SIGUSR1 and SIGUSR2 are given on to it. The exit
    code is its own (128 + N where signal N ended it). After 0, 2 (called
    wrongly), 3 (the run is over), 130 and 143 (it was asked to end) it is
    never started again.
    """
    logging.basicConfig(format="diloco-worker: %(message)s", stream=sys.stderr, level=logging.INFO)
    with failing_in_a_sentence(COMMAND):
        address, command = _address_before(command)
        place = server_of(address, server, default=None)
        given = _settings(place, keys, worker_id, slot, (shard_index, num_shards))
        words = with_auto(command) if auto else list(command)
        if own_seed:
            if not auto:
                raise UsageError("--own-seed needs --auto; else seed the data by diloco.shard.")
            given[SEED_OFFSET] = str(zlib.crc32(given["DILOCO_WORKER_ID"].encode()))
        if shutil.which(words[0]) is None:
            raise UsageError(f"The program {words[0]!r:.200} was not found; give its path.")
        if log_file is not None and not detach:
            raise UsageError(
                "--log-file needs --detach; without it the script writes to this terminal."
            )
    if detach:
        _detach(given, words, restarts, over_is_success, log_file)
        return
    with _end_file() as file:
        code = TrainingProgram(words, os.environ | given, Restarts(restarts), file).run()
    raise typer.Exit(0 if over_is_success and code == RUN_IS_OVER else code)


def _address_before(command: list[str]) -> tuple[str | None, list[str]]:
    """The address before a command, if there is one, and the command; raises UsageError."""
    first, *rest = command
    rest = rest[1:] if rest[:1] == ["--"] else rest
    if not rest or address_or_path(first) is None or shutil.which(first) is not None:
        return None, command
    if rest[0].startswith("-"):
        raise UsageError(f"{rest[0]:.200} comes after the address; options come before it.")
    return first, rest


@contextlib.contextmanager
def _end_file() -> Iterator[Path]:
    """The file where the script's workers write why they left; on several machines the user names it."""
    if named := os.environ.get(END_FILE, "").strip():
        yield Path(named)
        return
    with tempfile.TemporaryDirectory(prefix="diloco-worker-", ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "end"


def _settings(
    server: str,
    keys: Path | None,
    worker_id: str | None,
    slot: int | None,
    shard: tuple[int | None, int | None],
) -> dict[str, str]:
    """The variables of these settings, checked before the script starts; raises UsageError."""
    own = resolve({"server": server, "keys": keys, "worker_id": worker_id})
    given = {"DILOCO_SERVER": str(own.server)}
    shards = zip((SHARD_INDEX, NUM_SHARDS), shard, strict=True)
    given |= {name: str(value) for name, value in shards if value is not None}
    chosen = chosen_shard(os.environ | given)
    if slot is None:
        slot = chosen[0] if chosen is not None else 0
    name = own.worker_id or f"{host_name()}-{slot}"
    file = own.keys and _key_file(Path(own.keys).expanduser().absolute(), name)
    if file:
        _, key_name = worker_keys(file, own.worker_id)
        given["DILOCO_KEYS"] = str(file)
        name = key_name or name
    given["DILOCO_WORKER_ID"] = name
    return given


def _key_file(given: Path, name: str) -> Path:
    """The key file of this worker, where a folder of several was given."""
    own = given / HANDED_OUT / f"{Role.WORKER.value}-{name}.key"
    return own if own.is_file() else given


def _detach(
    given: dict[str, str],
    words: Sequence[str],
    restarts: int,
    over_is_success: bool,
    log_file: Path | None,
) -> None:
    """Start this command again in its own session, and print how to follow and stop it."""
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in given["DILOCO_WORKER_ID"])
    log = log_file or Path(f"diloco-worker-{name}.log")
    mine = [sys.executable, "-m", "diloco_worker", "run", "--restarts", str(restarts)]
    mine += ["--over-is-success"] if over_is_success else []
    try:
        with log.open("ab") as output:
            started = subprocess.Popen(
                [*mine, "--", *words],
                env=os.environ | given,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as error:
        fail(
            COMMAND, f"The log {log} cannot be written: {error.strerror}; give another --log-file."
        )
    typer.echo(f"pid {started.pid}")
    typer.echo(f"log {log}")
    typer.echo(
        f"{given['DILOCO_WORKER_ID']} runs in the background. Stop it with: kill {started.pid}"
    )
