"""Assembles the commands of `diloco-broker`."""

from __future__ import annotations

from collections.abc import Callable

from diloco_broker.cli import checkpoints, operator
from diloco_broker.cli.keygen import keygen
from diloco_broker.cli.plan import plan
from diloco_broker.cli.relay import relay
from diloco_broker.cli.replay import replay
from diloco_broker.cli.serve import WithPort, serve
from diloco_broker.cli.standby import standby
from diloco_protocol.clients.command_line import App

app = App(no_args_is_help=True)


@app.callback()
def commands() -> None:
    """Average the pseudo-gradients of DiLoCo workers and return global parameters."""


app.command(cls=WithPort)(serve)
COMMANDS: tuple[Callable[..., None], ...] = (
    *operator.COMMANDS,
    checkpoints.export,
    checkpoints.inspect,
    relay,
    standby,
    plan,
    keygen,
    replay,
)
for command in COMMANDS:
    app.command(command.__name__.rstrip("_").replace("_", "-"))(command)
