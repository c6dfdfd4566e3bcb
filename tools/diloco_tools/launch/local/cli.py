"""`diloco-launch local`: a broker and the workers of one script on this machine."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Annotated

import typer

from diloco_protocol.clients.command_line import failing_in_a_sentence
from diloco_protocol.errors import UsageError
from diloco_tools.launch.commands import COMMAND, check_serve_options, serve_words
from diloco_tools.launch.local.run import LocalRun, make_folders, search_path, start
from diloco_tools.launch.local.status import Status
from diloco_tools.terminal import console

# Few enough for the first rounds to be seen soon. Over a network a run wants more: fewer bytes.
SYNC_EVERY = 50
# Which the launcher needs to be its own.
OWN_OPTIONS = ("--save-dir", "--address-file", "--keys")


def local(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="The training script and its options, or what starts it: train.py, python train.py.",
        ),
    ],
    *,
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Workers.")] = 2,
    sync_every: Annotated[
        int, typer.Option(min=1, help="H: inner steps between two rounds.")
    ] = SYNC_EVERY,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="For everything of the run; one that has a run continues it. Default: a new one, "
            "runs/SCRIPT-DATE-TIME."
        ),
    ] = None,
    serve: Annotated[
        str,
        typer.Option(help="Options of diloco-broker serve: '--max-rounds 100 --outer-lr 0.9'."),
    ] = "",
    restarts: Annotated[
        int, typer.Option(min=0, help="Start a program again after so many failures in a row.")
    ] = 3,
) -> None:
    """Try a script: diloco-launch local -n 2 -- train.py --lr 3e-4

    Starts a broker and the workers w0, w1, ... on this machine, each with its
    shard of the data, and shows the run until all workers have ended. Ctrl-C
    lets the workers leave and the broker save; a second one ends all at once.

    Exit codes: 0 all is well, 1 a program failed for good, a script never
    joined, or no round closed, 2 called wrongly, 130 Ctrl-C, 143 SIGTERM, 129
    SIGHUP.
    """
    with failing_in_a_sentence(COMMAND):
        run = LocalRun(
            folder=_folder(folder, command),
            command=_command(command),
            workers=workers,
            sync_every=sync_every,
            serve=serve_words(serve),
            restarts=restarts,
        )
        _check(run)
        status = Status(console())
        if any(run.checkpoints.glob("checkpoint-*")):
            status.say(f"{run.folder} has a run already; without --folder a new one begins")
        try:
            make_folders(run)
        except OSError as error:
            raise UsageError(
                f"{error.filename} cannot be written: {error.strerror}; give a --folder in which you "
                "may write."
            ) from None
    raise typer.Exit(start(run, status))


def _command(words: Sequence[str]) -> tuple[str, ...]:
    """The words of a process; a script is run by this Python."""
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise UsageError(f"There is no script {words[0]!r:.200}.")
        return (sys.executable, *words)
    if shutil.which(words[0], path=search_path()) is None:
        raise UsageError(f"There is no program {words[0]!r:.200}; give the path of one.")
    return tuple(words)


def _folder(given: Path | None, command: Sequence[str]) -> Path:
    """Absolute; a new one unless it is given."""
    if given is not None:
        return given.absolute()
    scripts = [PurePath(word).stem for word in command if word.endswith(".py")]
    name = f"{[*scripts, PurePath(command[0]).name][0]}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path("runs", name).absolute()
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{name}-{number}")
    return path


def _check(run: LocalRun) -> None:
    """Raise UsageError for what would fail in the middle of the start."""
    if not str(run.folder).isprintable():
        raise UsageError(
            f"The path {str(run.folder)!r:.200} has characters that cannot be printed."
        )
    for option in OWN_OPTIONS:
        if any(word.partition("=")[0] == option for word in run.serve):
            raise UsageError(
                f"--serve cannot have {option}: a local run has its own"
                + (" (give --folder)." if option == "--save-dir" else ".")
            )
    if run.serve:
        check_serve_options(run.serve_options, Path.cwd())
