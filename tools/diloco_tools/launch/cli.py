"""`diloco-launch`: one command for each place where a run can start."""

from __future__ import annotations

from diloco_protocol.clients.command_line import App
from diloco_tools.launch.kubernetes.cli import kubernetes
from diloco_tools.launch.local.cli import local
from diloco_tools.launch.sky import sky
from diloco_tools.launch.slurm.cli import app as slurm

app = App(no_args_is_help=True)
# Options after the name of the script belong to the script, with or without -- before it.
app.command("local", context_settings={"allow_interspersed_args": False})(local)
app.add_typer(slurm, name="slurm")
app.command("kubernetes")(kubernetes)
app.command("sky")(sky)


@app.callback()
def main() -> None:
    """Start a run on this machine or on a cluster."""
