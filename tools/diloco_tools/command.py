"""`diloco`: every command of this project as a subcommand, each imported when it is called."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from diloco_protocol.clients.command_line import App
from diloco_protocol.clients.help_page import Group

# By name: module:app, or module:app:command for one command of an app; and its help.
SUBCOMMANDS = {
    "broker": ("diloco_broker.cli.app:app", "Serve a run; show, steer and inspect it."),
    "worker": ("diloco_worker.cli.app:app", "Start a training script as a worker of a run."),
    "doctor": (
        "diloco_worker.cli.app:app:doctor",
        "Check the connection to the broker, and estimate what a round takes.",
    ),
    "top": ("diloco_tools.monitor.terminal.cli:app", "Show a run in the terminal, and steer it."),
    "dashboard": ("diloco_tools.monitor.web.cli:app", "Show a run on a web page, and steer it."),
    "export-metrics": (
        "diloco_tools.monitor.metrics.cli:app",
        "Export a run's metrics to Prometheus.",
    ),
    "report": ("diloco_tools.monitor.report.cli:app", "Write one HTML page about a run."),
    "plan": (
        "diloco_tools.plan.cli:app",
        "Estimate how much of the time a network leaves to train.",
    ),
    "launch": ("diloco_tools.launch.cli:app", "Start a run here, on Slurm or on Kubernetes."),
    "demo": ("diloco_tools.demo.cli:app", "Train a small GPT with two workers, and compare."),
}


def load(name: str) -> Any:
    """The command of typer behind a subcommand."""
    module, app, *within = SUBCOMMANDS[name][0].split(":")
    command: Any = typer.main.get_command(getattr(import_module(module), app))
    return command.commands[within[0]] if within else command


class Subcommands(Group):
    """Lists commands without importing them."""

    # Any: contexts and commands are click's, or of the copy in newer releases of typer.
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and load(name), rest


app = App(cls=Subcommands, no_args_is_help=True)


@app.callback()
def diloco() -> None:
    """Train one model on machines that share only an ordinary network.

    `diloco SUBCOMMAND --help` shows the options of each.
    """


for _name, (_, _help) in SUBCOMMANDS.items():
    app.command(_name, help=_help)(lambda: None)
