"""`diloco-broker keygen`: makes keys for a broker and its peers."""

from __future__ import annotations

import getpass
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from diloco_broker.cli import fail, failing_in_a_sentence
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients.keys import VARIABLE
from diloco_protocol.errors import UsageError
from diloco_protocol.roles import Peer, Role, check_name

MONITOR = "display"


def keygen(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder of the keys; created if missing.", show_default=False
        ),
    ],
    workers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORKER]...", help="Names of workers, which they train under."),
    ] = None,
    operator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Name of an operator, who may operate the run; repeatable."
        ),
    ] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Name of a relay, which vouches for its workers; repeatable."
        ),
    ] = None,
    monitor: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name of a read-only display; repeatable."),
    ] = None,
) -> None:
    """Make keys for the broker, its workers, operators, relays and monitors.

    The first call makes the broker's key, and one key of an operator and of a monitor. Later calls add
    keys and change none. A running broker accepts new keys within seconds.
    """
    is_new = not (folder / "broker.key").exists()
    wanted = [(Role.WORKER, name) for name in workers or ()]
    wanted += [(Role.OPERATOR, name) for name in operator or ([_me()] if is_new else [])]
    wanted += [(Role.RELAY, name) for name in relay or ()]
    wanted += [(Role.MONITOR, name) for name in monitor or ([MONITOR] if is_new else [])]
    if not wanted:
        fail(f"No key to make; name a worker: diloco-broker keygen {folder} gpu-0")
    with failing_in_a_sentence():
        for _, name in wanted:  # before writing any file
            check_name(name)
        try:
            keys = KeyFolder.make(folder)
            made = keys.add_all(Peer(role, name) for role, name in wanted)
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be written: {error.strerror}.") from None
    quoted = shlex.quote(str(folder))
    if is_new:
        typer.echo(f"The broker's key stays on its machine:\n  {_serve(quoted)}")
    for role, heading in _HEADINGS.items():
        files = [(peer.name, file) for peer, file in made.items() if peer.role is role]
        if files:
            typer.echo(heading)
        for name, file in files:
            typer.echo(
                "  " + _LINES[role].format(file=shlex.quote(str(file)), name=name, key=file.name)
            )
    typer.echo(f"To revoke a key, remove its file in {folder}/allowed.")


def _serve(folder: str) -> str:
    return (
        f"diloco-broker serve --keys {folder} --bind tcp://0.0.0.0:8512 --feed tcp://0.0.0.0:8513"
    )


_HEADINGS = {
    Role.WORKER: "Each worker needs its own file; copy it there, and start the training script with it:",
    Role.OPERATOR: "Operators read and change everything:",
    Role.RELAY: "Relays connect workers, and may give them any name:",
    Role.MONITOR: "Monitors only read:",
}
_LINES = {
    Role.WORKER: f"scp {{file}} {{name}}:  # there: export {VARIABLE}=~/{{key}}",
    Role.OPERATOR: "diloco-broker status --keys {file}",
    Role.RELAY: "scp {file} {name}:  # there: diloco-broker relay --parent-keys ~/{key}",
    Role.MONITOR: "diloco-top --keys {file}",
}


def _me() -> str:
    """The name of this user, reduced to characters that are valid in the name of a key."""
    try:
        name = re.sub(r"[^A-Za-z0-9_-]", "-", getpass.getuser()).strip("-_")[:32]
    except (KeyError, OSError):  # a user id without a name
        name = ""
    return name or "operator"
