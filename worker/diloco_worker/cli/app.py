"""`diloco-worker`: the commands."""

from __future__ import annotations

import typer

from diloco_worker.cli.doctor import doctor
from diloco_worker.cli.run import run

app = typer.Typer(
    help="Take part in a run of a diloco-broker.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# What follows the name of the training program belongs to it, with or without -- in front.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(doctor)


@app.callback()
def commands() -> None:
    """Take part in a run of a diloco-broker."""
