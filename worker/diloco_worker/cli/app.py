"""`diloco-worker`: the commands."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import typer

from diloco_protocol.clients.command_line import App
from diloco_protocol.clients.help_page import Group
from diloco_worker.cli.doctor import doctor
from diloco_worker.cli.run import run
from diloco_worker.launching import WRONG_USAGE


class Commands(Group):
    """Suggests `run` where a script or program was given as the command."""

    # Any: the classes are click's, or those of a copy in newer releases of typer.
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        is_script = word.endswith(".py")
        is_program = is_script or Path(word).is_file() or shutil.which(word) is not None
        if is_program and self.get_command(ctx, word) is None:
            command = shlex.join(["python", *args] if is_script else args)
            typer.echo(
                f"diloco-worker has no command {word!r:.200}; to run it as a worker:\n\n"
                f"    diloco-worker run -- {command}\n",
                err=True,
            )
            raise typer.Exit(WRONG_USAGE)
        return super().resolve_command(ctx, args)


app = App(cls=Commands, no_args_is_help=True)
# Options after the name of the training program belong to it, with or without -- before it.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(doctor)


@app.callback()
def commands() -> None:
    """Take part in a run of a diloco-broker."""
