"""`diloco-launch local`: a broker and the workers of one script on this machine."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any

import typer

from diloco_protocol.clients.command_line import failing_in_a_sentence, with_options
from diloco_protocol.errors import UsageError
from diloco_tools.launch.commands import COMMAND, check_serve_options, serve_words
from diloco_tools.launch.local.run import LocalRun, make_folders, search_path, start
from diloco_tools.launch.local.status import Status
from diloco_tools.options import options_of
from diloco_tools.terminal import console

# Options of serve that the launcher sets itself.
OWN_OPTIONS = ("--save-dir", "--address-file", "--keys")


@with_options(options_of(LocalRun))
def local(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="The training script, or the command that starts it, with options: train.py --lr 3e-4.",
        ),
    ],
    *,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run; an existing run continues. Default: a new one, "
            "runs/SCRIPT-DATE-TIME."
        ),
    ] = None,
    serve: Annotated[
        str,
        typer.Option(help="Options of diloco-broker serve: '--max-rounds 100 --outer-lr 0.9'."),
    ] = "",
    **given: Any,
) -> None:
    """Try a script: diloco-launch local -n 2 -- train.py --lr 3e-4

    Starts a broker and the workers w0, w1, ... on this machine, each with its
    shard of the data, and shows the run until all workers have ended. Ctrl-C
    stops the workers and then the broker, which saves; a second one kills them.

    Exit codes: 0 success, 1 a program failed for good, a script never joined,
    or no round closed, 2 usage error, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP.
    """
    with failing_in_a_sentence(COMMAND):
        run = LocalRun(
            _folder(folder, command), _command(command), serve=serve_words(serve), **given
        )
        _check(run)
        status = Status(console())
        if any(run.checkpoints.glob("checkpoint-*")):
            status.say(f"continuing the run in {run.folder}; without --folder a new one begins")
        try:
            make_folders(run)
        except OSError as error:
            raise UsageError(
                f"{error.filename} cannot be written: {error.strerror}; give a --folder in which you "
                "may write."
            ) from None
    raise typer.Exit(start(run, status))


def _command(words: Sequence[str]) -> tuple[str, ...]:
    """The words of a process; a script runs in this Python."""
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise UsageError(f"The script {words[0]!r:.200} does not exist.")
        return (sys.executable, *words)
    if shutil.which(words[0], path=search_path()) is None:
        raise UsageError(f"The program {words[0]!r:.200} was not found; give its path.")
    return tuple(words)


def _folder(given: Path | None, command: Sequence[str]) -> Path:
    """The absolute path of the given folder, or of a new one."""
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
    """Raise UsageError for errors that would otherwise show only in the middle of the start."""
    if not str(run.folder).isprintable():
        raise UsageError(
            f"The path {str(run.folder)!r:.200} has characters that cannot be printed."
        )
    for option in OWN_OPTIONS:
        if any(word.partition("=")[0] == option for word in run.serve):
            raise UsageError(
                f"--serve cannot set {option}: a local run sets it"
                + (" (give --folder)." if option == "--save-dir" else ".")
            )
    if run.serve:
        check_serve_options(run.serve_options, Path.cwd())
