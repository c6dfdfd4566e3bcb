"""`diloco-broker keygen`: keys for a broker and for those it lets in."""

from __future__ import annotations

import getpass
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from diloco_broker.cli.failures import fail, failing_in_a_sentence
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients.keys import VARIABLE
from diloco_protocol.errors import UsageError
from diloco_protocol.roles import Peer, Role, check_name

MONITOR = "display"


def keygen(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Where the keys are, or will be.", show_default=False),
    ],
    workers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORKER]...", help="Names of workers; each trains under its name."),
    ] = None,
    operator: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Somebody who may steer the run; may be given again."),
    ] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A relay, which vouches for its workers; may be given again."
        ),
    ] = None,
    monitor: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A display that may only look; may be given again."),
    ] = None,
) -> None:
    """Make keys: of the broker, of its workers by name, of operators, relays and monitors.

    The first time the broker's own key is made, with one operator and one monitor. Later calls add
    keys and change none. A broker that runs lets in new ones within seconds.
    """
    is_new = not (folder / "broker.key").exists()
    wanted = [(Role.WORKER, name) for name in workers or ()]
    wanted += [(Role.OPERATOR, name) for name in operator or ([_me()] if is_new else [])]
    wanted += [(Role.RELAY, name) for name in relay or ()]
    wanted += [(Role.MONITOR, name) for name in monitor or ([MONITOR] if is_new else [])]
    if not wanted:
        fail(f"No key to make; name a worker: diloco-broker keygen {folder} gpu-0")
    with failing_in_a_sentence():
        for _, name in wanted:  # before anything is made
            check_name(name)
        try:
            keys = KeyFolder.make(folder)
            made = keys.add_all(Peer(role, name) for role, name in wanted)
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be written: {error.strerror}.") from None
    quoted = shlex.quote(str(folder))
    if is_new:
        typer.echo(f"The broker's own key stays on its machine:\n  {_serve(quoted)}")
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
    Role.WORKER: "Each worker gets its one file; copy it, and start the training script with it:",
    Role.OPERATOR: "Operators steer, and see everything:",
    Role.RELAY: "Relays connect workers, and may give them any name:",
    Role.MONITOR: "Monitors only look:",
}
_LINES = {
    Role.WORKER: f"scp {{file}} {{name}}:  # there: export {VARIABLE}=~/{{key}}",
    Role.OPERATOR: "diloco-broker status --keys {file}",
    Role.RELAY: "scp {file} {name}:  # there: diloco-broker relay --parent-keys ~/{key}",
    Role.MONITOR: "diloco-top --keys {file}",
}


def _me() -> str:
    """The name of this user, as far as it can be the name of a key."""
    try:
        name = re.sub(r"[^A-Za-z0-9_-]", "-", getpass.getuser()).strip("-_")[:32]
    except (KeyError, OSError):  # a user id without a name
        name = ""
    return name or "operator"
