"""`diloco-broker relay`: a broker at a site, which takes part in the run of another as one worker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_broker.cli.config_options import DEFAULTS, MOST_USED_PANEL, as_declared
from diloco_broker.cli.failures import fail, failing_in_a_sentence
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

# What a site decides for itself; the rest is the run's, and comes from the parent.
OF_THE_SITE = (
    "workers",
    "min_workers",
    "max_workers",
    "quorum",
    "grace",
    "bind",
    "feed",
    "wire_dtype",
    "heartbeat_timeout",
    "stall_timeout",
    "disconnect_grace",
    "keys",
    "ipc",
    "insecure",
    "audit",
)


@with_options(as_declared(name, DEFAULTS[name]) for name in OF_THE_SITE)
def relay(  # noqa: PLR0917  each is an option of the command
    address: ServerArgument = None,
    parent: Annotated[
        str | None,
        server_option(
            "--parent",
            rich_help_panel=MOST_USED_PANEL,
            help="Address of the broker, or relay, whose run the site takes part in: tcp://HOST:8512. "
            "It has to be started with --relays. Of several, with commas in between, it takes the first "
            f"that lets it in. Default: {SERVER_VARIABLE}.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="What the site is called there, as a worker is. Default: host name and port "
            "(a random ending where the system picks one); with --parent-keys the name of that key.",
        ),
    ] = None,
    parent_wire_dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of what the site sends to its parent, as --wire-dtype; int4z for a slow line. "
            "Default: that of the parent's run.",
        ),
    ] = None,
    parent_keys: Annotated[
        Path | None,
        typer.Option(help="Key of a worker for the parent, where it asks for keys."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Say whether the options are good, and stand for nobody."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
    **options: Any,
) -> None:
    """Stand for the workers of a site in another broker's run: one push and one version a round.

    Workers join here as they join a broker. What they send is averaged and goes
    to the parent as one push; its versions come back to them as they are. The
    relay saves nothing and may be killed: its parent and its workers have all.

    Exit codes: 0 ended by a signal, or the run is over; 2 it could not start, or
    its parent does not take it; 1 an error.
    """
    log_to_stderr(verbose)
    from diloco_broker.config import BrokerConfig
    from diloco_broker.relay import daemon

    with failing_in_a_sentence():
        parent = server_of(address, parent, default=None)
        keys, name = _identity(parent_keys, name)
        # A window without a quorum is one of asynchronous mode: its parent says whether the run has it.
        is_async = bool(options["grace"]) and options["quorum"] is None
        config = BrokerConfig(**options, mode="async" if is_async else "sync", relays=True)
        if check:
            daemon.check(config, parent, name or daemon.default_name(config), parent_wire_dtype)
            typer.echo("The options are good.")
            raise typer.Exit
        broker = daemon.RelayBroker(
            config,
            parent,
            name=name,
            parent_wire_dtype=parent_wire_dtype,
            keys=keys,
        )
    prepare(broker)
    typer.echo(f"Relay of {parent}. Watch with: diloco-top {broker.feed_address}{keys_of(broker)}")
    sys.stdout.flush()
    broker.run()
    if broker.why_it_failed is not None:
        fail(broker.why_it_failed)


def _identity(key: Path | None, name: str | None) -> tuple[Keys | None, str | None]:
    """The key for the parent, and what the relay is called there; raises UsageError."""
    keys = find_keys(key, Role.WORKER) if key is not None else None
    if keys is None:
        return None, name
    if keys.peer.role is not Role.WORKER or name not in (None, keys.peer.name):
        raise UsageError(
            f"--parent-keys is the key of {keys.peer}; a relay takes that of a worker, and has its "
            "name: leave --name out."
        )
    return keys, keys.peer.name
