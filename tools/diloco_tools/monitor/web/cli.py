"""The command diloco-dashboard."""

import signal
import socket
import sys
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_protocol.addresses import is_loopback
from diloco_protocol.clients.command_line import (
    App,
    FeedArgument,
    FeedOption,
    FeedServerOption,
    feed_of,
)
from diloco_protocol.errors import UsageError
from diloco_protocol.feed import FeedError
from diloco_protocol.roles import Role
from diloco_tools.monitor.feed.replay import read_history
from diloco_tools.monitor.web.security import EVERYWHERE, Policy, new_token
from diloco_tools.terminal import (
    HostOption,
    InsecureOption,
    KeysOption,
    ReplayOption,
    check_host,
    fail,
    keys_of,
    listen,
)

if TYPE_CHECKING:
    from uvicorn import Server

COMMAND = "diloco-dashboard"
DEFAULT_PORT = 8514

app = App()


@app.command()
def dashboard(
    *,
    address: FeedArgument = None,
    feed: FeedOption = None,
    control: FeedServerOption = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the page; 0 takes a free one.")
    ] = DEFAULT_PORT,
    host: HostOption = "127.0.0.1",
    readonly: Annotated[
        bool, typer.Option("--readonly", help="Only show; nothing can be changed from the page.")
    ] = False,
    replay: ReplayOption = None,
    insecure: InsecureOption = False,
    keys: KeysOption = None,
    lifeline: Annotated[
        bool,
        typer.Option(
            "--lifeline",
            hidden=True,  # for programs that start this one, so that it ends with them
            help="End as soon as standard input is closed.",
        ),
    ] = False,
) -> None:
    """Show a DiLoCo run on a web page, and steer it from there.

    Prints the address to open. Without the token in it the page is read-only.

    It keeps running while the broker is down, and reconnects.
    """
    if replay is not None and control is not None:
        fail(COMMAND, "--replay shows a past run, which cannot be steered: leave out --server")
    try:
        from diloco_tools.monitor.web.app import Dashboard, application, server_of
        from diloco_tools.monitor.web.source import FeedSource
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("starlette", "uvicorn", "anyio"):
            raise
        fail(COMMAND, f"{package} is not installed: pip install 'diloco-broker[dashboard]'")

    # First of all, so that a signal ends the program cleanly at any time; uvicorn installs its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        check_host(host, DEFAULT_PORT, insecure=insecure)
        key = None if replay is not None else keys_of(keys, steers=not readonly)
        past = read_history(replay) if replay is not None else None
        where = feed_of(address, feed, control, key)
        source = FeedSource(where, key) if past is None else None
    except (FeedError, UsageError) as error:
        fail(COMMAND, error)
    reader = None if key is None or key.peer.role is Role.OPERATOR else key.peer
    only_shows = readonly or replay is not None or reader is not None
    # On an address that other machines reach, reading needs the token too.
    token = None if is_loopback(host) and only_shows else new_token()
    page = Dashboard(Policy(host, token, readonly, reader), source, past, control, key)
    with source or nullcontext():
        listening = listen(COMMAND, host, port)
        server = server_of(application(page))
        if lifeline:
            threading.Thread(target=_hold, args=(server,), name="lifeline", daemon=True).start()
        print(f"dashboard {_address(listening, host, token)}", flush=True)
        server.run(sockets=[listening])


def _address(listening: socket.socket, host: str, token: str | None) -> str:
    """The address to open in a browser."""
    name = "localhost" if host in EVERYWHERE else host
    shown = f"[{name}]" if ":" in name else name
    query = f"?token={token}" if token is not None else ""
    return f"http://{shown}:{listening.getsockname()[1]}/{query}"


def _hold(server: "Server") -> None:
    while sys.stdin.buffer.read(4096):
        pass
    server.should_exit = True


if __name__ == "__main__":
    app(prog_name=COMMAND)
