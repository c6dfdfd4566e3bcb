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
    """Names the command that runs a training script where its own name is given as the command."""

    # Any: the classes are those of click, or of a copy that newer releases of typer have.
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
# What follows the name of the training program belongs to it, with or without -- in front.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(doctor)


@app.callback()
def commands() -> None:
    """Take part in a run of a diloco-broker."""
