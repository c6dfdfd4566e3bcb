"""`diloco-broker standby`: follows a hub, and takes over when the hub fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_broker.cli import failing_in_a_sentence
from diloco_broker.cli.config_options import DEFAULTS, MOST_USED_PANEL, Check, Verbose, all_declared
from diloco_broker.cli.serve import RUN_IS_OVER, config_of, keys_of, log_to_stderr, prepare
from diloco_protocol.clients.command_line import (
    SERVER_VARIABLE,
    ServerArgument,
    server_of,
    server_option,
    with_options,
)
from diloco_protocol.clients.keys import find_keys
from diloco_protocol.errors import UsageError
from diloco_protocol.roles import Role

# Options that a standby lacks: it continues from the hub's checkpoints, and has no standby itself.
NOT_ITS_OWN = ("resume", "fresh", "standby", "lease")
_DEFAULTS = DEFAULTS | {"save_dir": Path("diloco-standby")}


@with_options(all_declared(_DEFAULTS, NOT_ITS_OWN))
def standby(
    context: typer.Context,
    *,
    address: ServerArgument = None,
    of: Annotated[
        str | None,
        server_option(
            "--of",
            rich_help_panel=MOST_USED_PANEL,
            help="Address of the hub: tcp://HOST:8512. The hub must be started with --standby. "
            f"Default: {SERVER_VARIABLE}.",
        ),
    ] = None,
    hub_keys: Annotated[
        Path | None,
        typer.Option(help="File of an operator's key for the hub, if the hub requires keys."),
    ] = None,
    check: Check = False,
    verbose: Verbose = False,
    **options: Any,
) -> None:
    """Follow a hub, copy its checkpoints, and become the run's broker when the hub fails.

    Give it the options of the hub, and give workers both addresses:
    DILOCO_SERVER=tcp://hub:8512,tcp://standby:8512. It takes over when neither
    it nor most workers can reach the hub, or on diloco-broker promote. Restarted
    after a takeover, it continues the run.

    Exit codes: as for serve.
    """
    log_to_stderr(verbose)
    with failing_in_a_sentence():
        of = server_of(address, of, default=None)
        config = config_of(options, context)
        keys = None if hub_keys is None else find_keys(hub_keys, Role.OPERATOR)
        if keys is not None and keys.peer.role is not Role.OPERATOR:
            raise UsageError(
                f"--hub-keys is the key of {keys.peer}; a standby needs an operator's key."
            )
        if check:
            typer.echo("The options are valid.")
            raise typer.Exit
        from diloco_broker.standby.daemon import StandbyBroker

        broker = StandbyBroker(config, of, keys=keys)
    prepare(broker)
    what = f"Standby of {broker.hub}."
    if broker.is_hub:
        what = f"This standby has taken over the run from {broker.hub}."
    typer.echo(f"{what} Show it with: diloco-broker status {broker.address}{keys_of(broker)}")
    sys.stdout.flush()
    broker.run()
    if broker.run_is_over and not broker.is_complete:
        raise typer.Exit(RUN_IS_OVER)
