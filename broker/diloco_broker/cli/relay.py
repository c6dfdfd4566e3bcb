"""`diloco-broker relay`: connects the workers of a site to their hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_broker.cli import failing_in_a_sentence
from diloco_broker.cli.config_options import DEFAULTS, MOST_USED_PANEL, Check, Verbose, as_declared
from diloco_broker.cli.serve import keys_of, log_to_stderr, prepare
from diloco_protocol.clients.command_line import (
    SERVER_VARIABLE,
    ServerArgument,
    server_of,
    server_option,
    with_options,
)
from diloco_protocol.clients.keys import Keys, find_keys
from diloco_protocol.errors import UsageError
from diloco_protocol.roles import Role


@with_options(
    as_declared(name, DEFAULTS[name])
    for name in ("bind", "feed", "max_workers", "keys", "insecure")
)
def relay(  # noqa: PLR0917  each is an option of the command
    address: ServerArgument = None,
    parent: Annotated[
        str | None,
        server_option(
            "--parent",
            rich_help_panel=MOST_USED_PANEL,
            help="Address of the hub, or of another relay: tcp://HOST:8512. The hub must be started "
            "with --relays. Several, separated by commas, are tried in turn. "
            f"Default: {SERVER_VARIABLE}.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name in displays. Default: host name and port (a random suffix if the system picks "
            "the port); with --parent-keys the name in that key."
        ),
    ] = None,
    parent_wire_dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the means that it sends to the hub; int4z for a slow link. Default: that of "
            "the run."
        ),
    ] = None,
    parent_keys: Annotated[
        Path | None, typer.Option(help="File of the relay's key, if the hub requires keys.")
    ] = None,
    check: Check = False,
    verbose: Verbose = False,
    **options: Any,
) -> None:
    """Connect the workers of a site to their hub, and send it one mean for all of them.

    Workers connect to the relay as to a broker, and are members of the hub's
    run. Their pseudo-gradients stay here; the hub receives the mean, and sends
    each version over the link once. The relay decides and saves nothing. If it
    dies, its workers rejoin here or elsewhere, and lose no work.

    Exit codes: 0 the run is over, or a signal; 1 an error; 2 it could not start.
    """
    log_to_stderr(verbose)
    from diloco_broker.config import BrokerConfig
    from diloco_broker.relay import daemon

    with failing_in_a_sentence():
        parent = server_of(address, parent, default=None)
        keys, name = _identity(parent_keys, name)
        config = BrokerConfig(**options, relays=True)
        if check:
            daemon.check(parent, name or daemon.default_name(config), parent_wire_dtype)
            typer.echo("The options are valid.")
            raise typer.Exit
        service = daemon.RelayBroker(
            config, parent, name=name, parent_wire_dtype=parent_wire_dtype, keys=keys
        )
    prepare(service)
    typer.echo(
        f"Relay of {parent}. Watch with: diloco-top {service.feed_address}{keys_of(service)}"
    )
    sys.stdout.flush()
    service.run()


def _identity(key: Path | None, name: str | None) -> tuple[Keys | None, str | None]:
    """The key for the hub, and the relay's name; raises UsageError."""
    keys = find_keys(key, Role.RELAY) if key is not None else None
    if keys is None:
        return None, name
    if keys.peer.role is not Role.RELAY or name not in (None, keys.peer.name):
        raise UsageError(
            f"--parent-keys is the key of {keys.peer}; a relay needs its own key, and takes its name "
            "from it: omit --name. Make a key: diloco-broker keygen DIR --relay NAME."
        )
    return keys, keys.peer.name
