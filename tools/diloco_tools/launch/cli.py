"""`diloco-launch`: which engine."""

from __future__ import annotations

import typer

from diloco_tools.launch.kubernetes.cli import kubernetes
from diloco_tools.launch.slurm.cli import app as slurm

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(slurm, name="slurm")
app.command("kubernetes")(kubernetes)


@app.callback()
def main() -> None:
    """Start a run on the cluster that you have: files for its engine, keys, and a folder."""
